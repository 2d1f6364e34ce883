"""Policies of `OnlinePacker`.

They choose the pack of each piece by its length and number of images alone.

    sequential             a b c c │ c d d …   one open pack; a piece that does not fit is cut at the pack's end
    first_fit              the oldest open pack with room, else a new one; of too many, the oldest is given
    best_fit               the fullest open pack with room, else a new one; of too many, the fullest is given
    first_fit_decreasing   pieces that fill `open_packs` packs are held, then placed from the largest to the smallest

(Johnson: Near-Optimal Bin Packing Algorithms, 1973.) A policy knows no items and no encoders. The packer asks for the
longest piece that may come next (`reach`), cuts the item to it, adds it, and yields the pack that is `due` before it
adds another piece.

A pack also closes at `max_cost`, if there is one: it is full as soon as its tokens or its cost are. The fullest pack is
the one with the least share left of either. A piece that alone costs more than `max_cost` has a pack to itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, index
from typing import Any, ClassVar, Literal, TypeAlias

from savable_pipeline.core.keyed_random import derive_key, permutation
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.cost import Costing
from savable_pipeline.stages.item_ref import Element
from savable_pipeline.stages.stage_settings import function_name

Policy = Literal["sequential", "first_fit", "best_fit", "first_fit_decreasing"]
PackingFunction: TypeAlias = Callable[[list[int]], Sequence[Sequence[int]]]


_AT_ONCE = 16  # the most items to take from the source at a time
_NO_BOUND = 1 << 60
_NEVER = 1 << 120  # more than the slack of any pack, times its cost
_LONGEST = 4  # rounds that a piece is held back


class Piece(Element, kw_only=True, eq=False, gc=False):
    """An item in a pack, or a part of one.

    It has `length` tokens, from `start` on, of an item of `total` tokens.

    Its ref is the item's, its value the part.
    """

    length: int
    images: int = 0
    start: int = 0
    total: int = 0
    cost: int = 0  # 0 where packs have no greatest cost
    rounds: int = 0  # how often it was held back

    @property
    def is_cut(self) -> bool:
        """Whether this is less than the whole item."""
        return self.length != self.total


@dataclass(slots=True, eq=False)
class OpenPack:
    """A pack that is being filled, and the room left in it."""

    room: int  # tokens that still fit
    images: int  # images that still fit
    cost: int = 0  # cost that still fits; below 0 if the only piece is dearer than a pack may be
    bounds: tuple[int, int] | None = None  # the greatest length and cost of a pack; None where only length is bounded
    slack: int = 0  # room left, in tokens or in cost, whichever is the smaller share; set when a piece is added
    pieces: list[Piece] = field(default_factory=list)
    length: int = field(init=False)  # the most tokens of the pack

    def __post_init__(self) -> None:
        self.length = self.room

    def fits(self, piece: Piece) -> bool:
        """Whether there is room for a piece."""
        return piece.length <= self.room and piece.images <= self.images and piece.cost <= self.cost

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.pieces.append(piece)
        self.room -= piece.length
        self.images -= piece.images
        self.cost -= piece.cost
        self.slack = self.room
        if self.bounds is not None:
            max_length, max_cost = self.bounds
            self.slack = min(self.room * max_cost, self.cost * max_length)


class Packing:
    """Base of the policies.

    It has the open packs, oldest first, and chooses the next pack to yield.
    """

    holds: ClassVar[bool] = False  # whether pieces may be in no pack yet

    def __init__(
        self,
        *,
        max_length: int,
        max_images: int,
        open_packs: int,
        max_cost: int = 0,  # 0: no bound
        costing: Costing | None = None,
    ) -> None:
        self.max_length, self.max_images = max_length, max_images  # 0 images: no bound
        self.open_packs, self.max_cost, self.costing = open_packs, max_cost, costing
        self._least_cost = costing.of(1, 0) if costing is not None else 0  # what no longer fits fills a pack
        self.packs: list[OpenPack] = []
        self.held: list[Piece] = []  # in no pack yet
        self.rounds = 0  # how often held pieces have been placed

    @property
    def reach(self) -> int:
        """The greatest length in tokens that the next piece may have."""
        return self.max_length

    @property
    def at_once(self) -> int:
        """Return how many items to take from the source at a time.

        About one pack's items at a time cost less than one by one.
        """
        pieces = sum([len(pack.pieces) for pack in self.packs]) + len(self.held)
        return min(_AT_ONCE, 1 + pieces // max(1, len(self.packs) or self.open_packs))

    def add(self, piece: Piece) -> None:
        """Put a piece of at most `reach` tokens into a pack, or hold it."""
        raise NotImplementedError

    def due(self) -> OpenPack | None:
        """The pack due before another piece is added, if any."""
        raise NotImplementedError

    def last(self) -> OpenPack | None:
        """The next pack to give when no more pieces will come; None when all are given."""
        return self.packs[0] if self.packs else None

    def pieces(self) -> Iterator[Piece]:
        """All pieces, those in packs and those in none."""
        for pack in self.packs:
            yield from pack.pieces
        yield from self.held

    def open(self, length: int = 0) -> OpenPack:
        """Open a new pack, of this many tokens at most; 0: `max_length`."""
        self.packs.append(self.empty(length))
        return self.packs[-1]

    def empty(self, length: int = 0) -> OpenPack:
        """A pack without pieces."""
        length = length or self.max_length
        bounds = (length, self.max_cost) if self.max_cost else None
        return OpenPack(length, self.max_images or _NO_BOUND, self.max_cost, bounds)

    def full(self) -> OpenPack | None:
        """The oldest pack without room for another token; None if there is none."""
        least = self._least_cost
        for pack in self.packs:
            if not pack.room or pack.cost < least:
                return pack
        return None


class Sequential(Packing):
    """Policy that fills one pack after the other and cuts items at its end.

    It wastes no room, unless `max_images` is reached.
    """

    @property
    def reach(self) -> int:
        """The room left in the open pack, in tokens, or what its cost has room for."""
        pack = self.packs[-1] if self.packs else self.empty()
        return self._affordable(pack) if self.costing is not None else pack.room

    def _affordable(self, pack: OpenPack) -> int:
        """The greatest length that fits into a pack by its tokens and its cost, at least 1."""
        assert self.costing is not None
        of = self.costing.of
        return max(1, bisect_right(range(1, pack.room + 1), pack.cost, key=lambda length: of(length, 0)))

    def add(self, piece: Piece) -> None:
        """Append a piece to the open pack, or to a new one if it has too many images."""
        pack = self.packs[-1] if self.packs and self.packs[-1].fits(piece) else self.open()
        pack.add(piece)

    def due(self) -> OpenPack | None:
        """A pack without room, or without room for the images of the piece that came next."""
        return self.packs[0] if len(self.packs) > 1 else self.full()


class FirstFit(Packing):
    """Puts a piece into the oldest open pack with room."""

    def add(self, piece: Piece) -> None:
        """Put a piece into the oldest pack with room, or into a new one."""
        (_oldest(self.packs, piece) or self.open()).add(piece)

    def due(self) -> OpenPack | None:
        """A full pack, or the oldest one if more than `open_packs` are open."""
        return self.full() or (self.packs[0] if len(self.packs) > self.open_packs else None)


class BestFit(Packing):
    """Policy that puts a piece into the fullest open pack with room.

    Of equally full ones, it is the oldest.
    """

    def add(self, piece: Piece) -> None:
        """Put a piece into the fullest pack with room, or into a new one."""
        best, least = None, _NEVER
        length, images, cost = piece.length, piece.images, piece.cost
        for pack in self.packs:
            if length <= pack.room and pack.slack < least and images <= pack.images and cost <= pack.cost:
                best, least = pack, pack.slack
        (best or self.open()).add(piece)

    def due(self) -> OpenPack | None:
        """A full pack, or the fullest but the newest one if more than `open_packs` are open."""
        full = self.full()
        if full is None and len(self.packs) > self.open_packs:
            return min(self.packs[:-1], key=lambda pack: pack.slack)
        return full


class FirstFitDecreasing(Packing):
    """Policy that places the largest buffered pieces first.

    It buffers pieces for `open_packs` packs and yields the packs in random order.

    A piece is as large as its share of a pack: of the length, images or cost, whichever is the greatest. The last pack
    of a round is seldom full: it is taken apart, and its pieces wait for the next round. One that has waited for 4
    rounds is placed before all others, so that it is in the last pack no more.
    """

    holds = True

    def __init__(self, *, key: int, **bounds: Any) -> None:
        super().__init__(**bounds)
        self._key = key
        self._length = self._images = self._cost = 0  # sums over the held pieces

    def add(self, piece: Piece) -> None:
        """Hold a piece; place all held pieces once they fill `open_packs` packs."""
        self.held.append(piece)
        self._length += piece.length
        self._images += piece.images
        self._cost += min(piece.cost, self.max_cost)  # one that costs more than a pack may has a pack to itself
        enough = self.open_packs + 1  # packs; the last one is taken apart
        if (
            self._length >= enough * self.max_length
            or self._images >= enough * self.max_images > 0
            or self._cost >= enough * self.max_cost > 0
        ):
            self._pack_all(leave_last=True)

    def due(self) -> OpenPack | None:
        """The next filled pack; None if there is none."""
        return self.packs[0] if self.packs else None

    def last(self) -> OpenPack | None:
        """The next pack, once all held pieces are placed; None when all are given."""
        if self.held:
            self._pack_all(leave_last=False)
        return self.due()

    def _pack_all(self, *, leave_last: bool) -> None:
        packs: list[OpenPack] = []
        for piece in self._in_order():
            pack = _oldest(packs, piece)
            if pack is None:
                pack = self.empty(max(self.max_length, piece.length))  # held before a shorter one was decided
                packs.append(pack)
            pack.add(piece)
        self.held = packs.pop().pieces if leave_last else []
        self._length = sum(piece.length for piece in self.held)
        self._images = sum(piece.images for piece in self.held)
        self._cost = sum(min(piece.cost, self.max_cost) for piece in self.held)
        for piece in self.held:
            piece.rounds += 1
        self.packs += [packs[i] for i in permutation(derive_key(self._key, self.rounds), len(packs)).tolist()]
        self.rounds += 1

    def _in_order(self) -> list[Piece]:
        """The held pieces: first those that have waited for long, then the others; of each the largest first."""
        size = self._share if self.max_images or self.max_cost else attrgetter("length")
        ordered = sorted(self.held, key=size, reverse=True)
        waiting = [piece for piece in ordered if piece.rounds >= _LONGEST]
        return waiting + [piece for piece in ordered if piece.rounds < _LONGEST] if waiting else ordered

    def _share(self, piece: Piece) -> int:
        """The greatest share of a pack that a piece takes, in units that are the same for all."""
        length, images, cost = self.max_length, self.max_images or 1, self.max_cost or 1
        taken = [piece.length * images * cost]
        if self.max_images:
            taken.append(piece.images * length * cost)
        if self.max_cost:
            taken.append(piece.cost * length * images)
        return max(taken)


def _oldest(packs: list[OpenPack], piece: Piece) -> OpenPack | None:
    length, images, cost = piece.length, piece.images, piece.cost
    for pack in packs:
        if length <= pack.room and images <= pack.images and cost <= pack.cost:
            return pack
    return None


class ByFunction(Packing):
    """Policy of a user's function from lengths to groups of indices.

    It buffers pieces for `open_packs` packs.

        held      3 5 2 4 1 …        items in the order in which they came, until they fill `open_packs` packs
        function  [3, 5, 2, 4, 1]  ─▶  [[1, 2], [0, 3], [4]]
        packs     5+2   3+4   1      given in that order

    The packs of a round are laid out before the first of them is given, and are in the state with the refs of their
    items: a resumed run does not ask the function again about packs already chosen. The first call is made twice, to
    find one that draws.
    """

    holds = True

    def __init__(self, function: PackingFunction, *, max_length: int, open_packs: int) -> None:
        super().__init__(max_length=max_length, max_images=0, open_packs=open_packs)
        self._function, self._asked = function, False
        self._length = 0  # sum over the held pieces

    def add(self, piece: Piece) -> None:
        """Hold a piece."""
        self.held.append(piece)
        self._length += piece.length

    def due(self) -> OpenPack | None:
        """The next pack, once the held pieces fill `open_packs` packs and are laid out; None before that."""
        if not self.packs and self._length >= self.open_packs * self.max_length:
            self._pack_all()
        return super().last()

    def last(self) -> OpenPack | None:
        """The next pack, once all held pieces are laid out; None when all are given."""
        if self.held and not self.packs:
            self._pack_all()
        return super().last()

    def _pack_all(self) -> None:
        """Make packs of all held pieces. Raises `EncodeError` for a wrong answer; then the pieces are still held."""
        groups = self._answer([piece.length for piece in self.held])
        packs = []
        for group in groups:
            pack = OpenPack(self.max_length, 0)
            for position in group:
                pack.add(self.held[position])
            packs.append(pack)
        self.packs, self.held, self._length = packs, [], 0
        self.rounds += 1

    def _answer(self, lengths: list[int]) -> list[list[int]]:
        name = f"OnlinePacker(policy={function_name(self._function)})"
        try:
            groups = self._groups(lengths)
            check_groups(groups, lengths, self.max_length)
            if not self._asked and self._groups(lengths) != groups:
                raise ValueError("it returned other groups for the same lengths. It must depend on the lengths alone")
        except Exception as error:
            raise EncodeError(
                f"{name} failed for {len(lengths)} items: {type(error).__name__}: {error}. Fix it and resume."
            ) from error
        self._asked = True
        return groups

    def _groups(self, lengths: list[int]) -> list[list[int]]:
        return [[index(position) for position in group] for group in self._function(list(lengths))]


def check_groups(groups: Sequence[Sequence[int]], lengths: Sequence[int], max_length: int) -> None:
    """Raise ValueError unless groups are a valid packing.

    Each index is in one group, and no group is empty or longer than a pack.
    """
    used: set[Any] = set()
    for number, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {number} is empty")
        for position in group:
            if not 0 <= position < len(lengths):
                raise ValueError(f"group {number} has index {position}, but there are {len(lengths)} lengths")
            if position in used:
                raise ValueError(f"group {number} repeats index {position}")
            used.add(position)
        total = sum(lengths[position] for position in group)
        if total > max_length:
            raise ValueError(f"group {number} has length {total}, more than max_length={max_length}: {list(group)}")
    if len(used) < len(lengths):
        missing = next(position for position in range(len(lengths)) if position not in used)
        raise ValueError(f"index {missing} is in no group")


def make_packing(
    policy: Policy | PackingFunction, *, key: int, max_length: int, open_packs: int, **bounds: Any
) -> Packing:
    """Build the policy, with the arguments of `Packing`.

    `key` is the 64-bit key of its random numbers.
    """
    if callable(policy):
        return ByFunction(policy, max_length=max_length, open_packs=open_packs)
    bounds |= {"max_length": max_length, "open_packs": open_packs}
    if policy == "first_fit_decreasing":
        return FirstFitDecreasing(key=key, **bounds)
    return {"sequential": Sequential, "first_fit": FirstFit, "best_fit": BestFit}[policy](**bounds)
