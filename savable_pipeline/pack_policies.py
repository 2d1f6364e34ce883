"""Which piece goes into which pack: the policies of `OnlinePacker`, which look at lengths alone.

    sequential             a b c c │ c d d …   one pack is open; what does not fit is cut at its border
    first_fit              the oldest open pack with room, else a new one; of too many, the oldest is given
    best_fit               the fullest open pack with room, else a new one; of too many, the fullest is given
    first_fit_decreasing   as many pieces as fill `open_packs` are held, then laid out from the longest to the shortest

(Johnson: Near-Optimal Bin Packing Algorithms, 1973.) A policy knows nothing of items and encoders: the packer asks how
much it can take (`reach`), cuts, adds, and gives whatever is due before it adds again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from savable_pipeline.keys import key, permutation

Policy = Literal["sequential", "first_fit", "best_fit", "first_fit_decreasing"]
MISSING: Any = object()  # stands for an item that is made again from its ref when it is needed


@dataclass(slots=True, eq=False)
class Piece:
    """An item in a pack; or `length` tokens from `start` on of an item of `total` tokens."""

    ref: Any
    length: int
    images: int = 0
    start: int = 0
    total: int = 0
    item: Any = MISSING
    item_bytes: int = 0  # of the process's budget

    @property
    def is_cut(self) -> bool:
        """Whether this is less than the whole item."""
        return self.length != self.total


@dataclass(slots=True, eq=False)
class OpenPack:
    """A pack, and the room that is left in it."""

    room: int
    images: int  # room for so many
    pieces: list[Piece] = field(default_factory=list)

    def fits(self, piece: Piece) -> bool:
        """Whether there is room for a piece."""
        return piece.length <= self.room and piece.images <= self.images

    def add(self, piece: Piece) -> None:
        """Lay a piece behind the others."""
        self.pieces.append(piece)
        self.room -= piece.length
        self.images -= piece.images


class Packing:
    """The packs that are open, oldest first, and what is due. Base of the policies."""

    def __init__(self, *, max_length: int, max_images: int, open_packs: int) -> None:
        self.max_length = max_length
        self.max_images = max_images
        self.open_packs = open_packs
        self.packs: list[OpenPack] = []
        self.held: list[Piece] = []  # in no pack yet
        self.rounds = 0  # how often what was held has been laid out

    @property
    def reach(self) -> int:
        """The longest piece that the next one may be."""
        return self.max_length

    def add(self, piece: Piece) -> None:
        """Find a place for a piece, no longer than `reach`."""
        raise NotImplementedError

    def due(self) -> OpenPack | None:
        """The pack that must be given before another piece is added, if there is one."""
        raise NotImplementedError

    def last(self) -> OpenPack | None:
        """The pack to give when nothing more will come; None when all are given."""
        return self.packs[0] if self.packs else None

    def pieces(self) -> Iterator[Piece]:
        """All that is held, in packs and in none."""
        for pack in self.packs:
            yield from pack.pieces
        yield from self.held

    def open(self) -> OpenPack:
        """A new pack, the last of the open ones."""
        self.packs.append(OpenPack(self.max_length, self.max_images))
        return self.packs[-1]

    def full(self) -> OpenPack | None:
        """The oldest pack with no room at all."""
        for pack in self.packs:
            if not pack.room:
                return pack
        return None


class Sequential(Packing):
    """Pieces in the order they come, each as long as the open pack has room: nothing is wasted but by images."""

    @property
    def reach(self) -> int:
        """The room of the open pack."""
        return self.packs[-1].room if self.packs else self.max_length

    def add(self, piece: Piece) -> None:
        """Behind the last piece."""
        pack = self.packs[-1] if self.packs and self.packs[-1].fits(piece) else self.open()
        pack.add(piece)

    def due(self) -> OpenPack | None:
        """A full pack, or one that had no room for the images of the next piece."""
        return self.packs[0] if len(self.packs) > 1 else self.full()


class FirstFit(Packing):
    """The oldest open pack with room."""

    def add(self, piece: Piece) -> None:
        """Into the oldest pack with room."""
        (_oldest(self.packs, piece) or self.open()).add(piece)

    def due(self) -> OpenPack | None:
        """A full pack, or of too many the oldest."""
        return self.full() or (self.packs[0] if len(self.packs) > self.open_packs else None)


class BestFit(Packing):
    """The fullest open pack with room; of equally full ones the oldest."""

    def add(self, piece: Piece) -> None:
        """Into the fullest pack with room."""
        best, least = None, self.max_length + 1
        for pack in self.packs:
            if pack.room < least and pack.fits(piece):
                best, least = pack, pack.room
        (best or self.open()).add(piece)

    def due(self) -> OpenPack | None:
        """A full pack, or of too many the fullest but the new one."""
        full = self.full()
        if full is None and len(self.packs) > self.open_packs:
            return min(self.packs[:-1], key=lambda pack: pack.room)
        return full


class FirstFitDecreasing(Packing):
    """Holds pieces for `open_packs` packs, lays them out longest first, and gives the packs in random order.

    The last pack, which is seldom full, is taken apart again: its pieces wait for the next round.
    """

    def __init__(self, *, max_length: int, max_images: int, open_packs: int, key: int) -> None:
        super().__init__(max_length=max_length, max_images=max_images, open_packs=open_packs)
        self._key = key
        self._length = self._images = 0  # of what is held

    def add(self, piece: Piece) -> None:
        """Hold a piece; lay out what is held if that is enough."""
        self.held.append(piece)
        self._length += piece.length
        self._images += piece.images
        enough = self.open_packs + 1  # the last is taken apart
        if self._length >= enough * self.max_length or self._images >= enough * self.max_images > 0:
            self._lay_out(keep_last=True)

    def due(self) -> OpenPack | None:
        """The next of the packs that are laid out."""
        return self.packs[0] if self.packs else None

    def last(self) -> OpenPack | None:
        """The next pack; what is held is laid out to the end."""
        if self.held:
            self._lay_out(keep_last=False)
        return self.due()

    def _lay_out(self, *, keep_last: bool) -> None:
        packs: list[OpenPack] = []
        for piece in sorted(self.held, key=lambda piece: -piece.length):
            pack = _oldest(packs, piece)
            if pack is None:
                pack = OpenPack(self.max_length, self.max_images)
                packs.append(pack)
            pack.add(piece)
        self.held = packs.pop().pieces if keep_last else []
        self._length = sum(piece.length for piece in self.held)
        self._images = sum(piece.images for piece in self.held)
        self.packs += [packs[i] for i in permutation(key(self._key, self.rounds), len(packs)).tolist()]
        self.rounds += 1


def _oldest(packs: list[OpenPack], piece: Piece) -> OpenPack | None:
    length, images = piece.length, piece.images
    for pack in packs:
        if length <= pack.room and images <= pack.images:
            return pack
    return None


def make_packing(policy: Policy, *, max_length: int, max_images: int, open_packs: int, key: int) -> Packing:
    """The policy of this name; `key` is of what it draws."""
    if policy == "first_fit_decreasing":
        return FirstFitDecreasing(max_length=max_length, max_images=max_images, open_packs=open_packs, key=key)
    kind = {"sequential": Sequential, "first_fit": FirstFit, "best_fit": BestFit}[policy]
    return kind(max_length=max_length, max_images=max_images, open_packs=open_packs)
