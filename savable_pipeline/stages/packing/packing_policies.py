"""Policies of `OnlinePacker`, which choose the pack of each piece.

They use only length, number of images and cost of a piece.

    sequential             a b c c │ c d d …   one open pack; an item that does not fit is cut at the pack's end
    first_fit              the oldest open pack with room, else a new one; if too many are open, the oldest is yielded
    best_fit               the fullest open pack with room, else a new one; if too many are open, the fullest is yielded
    first_fit_decreasing   pieces that fill `open_packs` packs are held, then put into packs, the largest piece first

(Johnson: Near-Optimal Bin Packing Algorithms, 1973.) The packer asks a policy for the greatest length of the next piece
(`reach`), cuts the item to it, adds the piece, and yields the pack that is `due` before it adds another piece.

With `max_cost`, a pack is full as soon as either its tokens or its cost leave no room for another token. The fullest
pack is then the one with the least remaining fraction of tokens or cost. A piece that alone costs more than `max_cost`
is alone in its pack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, index
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from savable_pipeline.core.keyed_random import derive_key, permutation
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.cost import Costing
from savable_pipeline.stages.item_ref import Element
from savable_pipeline.stages.stage_settings import function_name

Policy = Literal["sequential", "first_fit", "best_fit", "first_fit_decreasing"]
PackingFunction: TypeAlias = Callable[[list[int]], Sequence[Sequence[int]]]


_encoder = msgspec.msgpack.Encoder()
_MOST_AT_ONCE = 64  # most items to take from the source at a time
_UNLIMITED_IMAGES = 1 << 60  # more images than any pack has
_UNREACHED_SLACK = 1 << 120  # more than the slack of any pack
_LATE_ROUNDS = 4  # a piece that waited for so many rounds is late, and packed first


class Piece(Element, kw_only=True, eq=False, gc=False):
    """An item in a pack, or a part of an item.

    The piece has `length` tokens, from token `start` on, of an item of `total` tokens. `ref` is the ref of the item,
    and `value` is this part of the item, once it is built.
    """

    length: int
    images: int = 0
    start: int = 0
    total: int = 0
    cost: int = 0  # 0 if the cost of packs is not limited
    rounds: int = 0  # number of rounds that it has waited

    @property
    def is_cut(self) -> bool:
        """Return whether this is only a part of the item."""
        return self.length != self.total


def saved_piece(piece: Piece) -> tuple[Any, ...]:
    """Return a piece as a tuple for a state.

    Trailing fields with their default values are omitted.
    """
    if piece.length == piece.total and not piece.images and not piece.rounds:
        return piece.ref, piece.length  # the usual case, a third of the time of what follows
    count = 6 if piece.rounds else 5 if piece.is_cut else 3
    return (piece.ref, piece.length, piece.images, piece.start, piece.total, piece.rounds)[:count]


@dataclass(slots=True, eq=False)
class OpenPack:
    """A pack that pieces are added to, and its remaining room."""

    room: int  # remaining tokens
    images: int  # remaining images
    cost: int = 0  # remaining cost; below 0 if the only piece costs more than a pack may
    bounds: tuple[int, int] | None = None  # greatest length and cost of a pack; None if the cost is not limited
    # A number that orders packs, the fullest first: the remaining tokens. If the cost is limited, it is the lesser of
    # remaining tokens times greatest cost and remaining cost times greatest length. `add` sets it.
    slack: int = 0
    pieces: list[Piece] = field(default_factory=list)
    saved: bytes = b""  # the first `saved_pieces` pieces in MessagePack
    saved_pieces: int = 0
    length: int = field(init=False)  # most tokens of the pack

    def __post_init__(self) -> None:
        self.length = self.room

    def fits(self, piece: Piece) -> bool:
        """Return whether there is room for a piece."""
        return piece.length <= self.room and piece.images <= self.images and piece.cost <= self.cost

    def add(self, piece: Piece) -> None:
        """Append a piece, and update the remaining room."""
        self.pieces.append(piece)
        self.room -= piece.length
        self.images -= piece.images
        self.cost -= piece.cost
        self.slack = self.room
        if self.bounds is not None:
            max_length, max_cost = self.bounds
            self.slack = min(self.room * max_cost, self.cost * max_length)

    def save(self) -> bytes:
        """Return the pieces as a list in MessagePack.

        Each piece is encoded once instead of for the state of each batch.
        """
        encoded = b"".join(map(_encoder.encode, map(saved_piece, self.pieces[self.saved_pieces :])))
        # assigned together, because Ctrl-C in between would repeat pieces in the next state
        self.saved, self.saved_pieces = self.saved + encoded, len(self.pieces)
        return b"\xdd" + self.saved_pieces.to_bytes(4, "big") + self.saved  # byte dd: the length has 4 bytes


class Packing:
    """Base of the policies.

    It has the open packs, oldest first, and chooses the next pack to yield.
    """

    holds: ClassVar[bool] = False  # whether the policy collects pieces in `waiting` before it puts them into packs

    def __init__(
        self,
        *,
        max_length: int,
        max_images: int,
        open_packs: int,
        max_cost: int = 0,  # 0: no bound
        costing: Costing | None = None,
    ) -> None:
        self.max_length, self.max_images = max_length, max_images  # max_images 0: no bound
        self.open_packs, self.max_cost, self.costing = open_packs, max_cost, costing
        # least cost of a piece; a pack with less remaining cost is full
        self._least_cost = costing.of(1, 0) if costing is not None else 0
        self.packs: list[OpenPack] = []
        # the pack without room for another token, if any; it is yielded before a piece is added
        self.full: OpenPack | None = None
        self.waiting: list[Piece] = []  # pieces that are not in a pack yet
        self.rounds = 0  # number of rounds in which waiting pieces were put into packs

    @property
    def reach(self) -> int:
        """Return the greatest length in tokens that the next piece may have."""
        return self.max_length

    @property
    def at_once(self) -> int:
        """Return how many items to take from the source at a time.

        It is about the number of items in a pack, because taking several together is faster.
        """
        pieces = sum([len(pack.pieces) for pack in self.packs]) + len(self.waiting)
        return min(_MOST_AT_ONCE, 1 + pieces // max(1, len(self.packs) or self.open_packs))

    def add(self, piece: Piece) -> None:
        """Put a piece of at most `reach` tokens into a pack, or let it wait."""
        raise NotImplementedError

    def due(self) -> OpenPack | None:
        """Return the pack to yield before another piece is added, or None."""
        raise NotImplementedError

    def last(self) -> OpenPack | None:
        """Return the next pack after the last piece, or None after the last pack."""
        return self.packs[0] if self.packs else None

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces, in open packs and waiting."""
        for pack in self.packs:
            yield from pack.pieces
        yield from self.waiting

    def open(self, length: int = 0) -> OpenPack:
        """Open a new pack of at most `length` tokens (0: `max_length`)."""
        self.packs.append(self.empty(length))
        return self.packs[-1]

    def empty(self, length: int = 0) -> OpenPack:
        """Build a pack without pieces, of at most `length` tokens (0: `max_length`)."""
        length = length or self.max_length
        bounds = (length, self.max_cost) if self.max_cost else None
        return OpenPack(length, self.max_images or _UNLIMITED_IMAGES, self.max_cost, bounds)

    def put(self, piece: Piece, pack: OpenPack | None) -> None:
        """Put a piece into a pack, or into a new one if `pack` is None."""
        pack = pack or self.open()
        pack.add(piece)
        if not pack.room or pack.cost < self._least_cost:
            self.full = pack

    def remove(self, pack: OpenPack) -> None:
        """Remove a pack that is yielded or skipped."""
        self.packs.remove(pack)
        if self.full is pack:
            self.full = None


class Sequential(Packing):
    """Policy that fills one pack after the other, and cuts items at the end of a pack.

    Packs are full unless `max_images` is reached.
    """

    @property
    def reach(self) -> int:
        """Return the greatest length whose tokens and cost fit into the open pack."""
        pack = self.packs[-1] if self.packs else self.empty()
        return self._affordable_length(pack) if self.costing is not None else pack.room

    def _affordable_length(self, pack: OpenPack) -> int:
        """Return the greatest length whose tokens and cost fit into a pack, at least 1."""
        assert self.costing is not None
        cost_of = self.costing.of
        return max(1, bisect_right(range(1, pack.room + 1), pack.cost, key=lambda length: cost_of(length, 0)))

    def add(self, piece: Piece) -> None:
        """Append a piece to the open pack, or to a new one if the piece does not fit."""
        self.put(piece, self.packs[-1] if self.packs and self.packs[-1].fits(piece) else None)

    def due(self) -> OpenPack | None:
        """Return the first pack if it is full or there is a second one, or None."""
        return self.packs[0] if len(self.packs) > 1 else self.full


class FirstFit(Packing):
    """Policy that puts a piece into the oldest open pack with room."""

    def add(self, piece: Piece) -> None:
        """Put a piece into the oldest pack with room, or into a new one."""
        self.put(piece, _oldest_with_room(self.packs, piece))

    def due(self) -> OpenPack | None:
        """Return a full pack, or the oldest one if more than `open_packs` are open."""
        return self.full or (self.packs[0] if len(self.packs) > self.open_packs else None)


class BestFit(Packing):
    """Policy that puts a piece into the fullest open pack with room.

    Among equally full packs it chooses the oldest.
    """

    def add(self, piece: Piece) -> None:
        """Put a piece into the fullest pack with room, or into a new one."""
        best, least_slack = None, _UNREACHED_SLACK
        length, images, cost = piece.length, piece.images, piece.cost
        for pack in self.packs:
            if length <= pack.room and pack.slack < least_slack and images <= pack.images and cost <= pack.cost:
                best, least_slack = pack, pack.slack
        self.put(piece, best)

    def due(self) -> OpenPack | None:
        """Return a full pack, or None.

        If none is full but more than `open_packs` are open, return the fullest of all but the newest.
        """
        if self.full is None and len(self.packs) > self.open_packs:
            return min(self.packs[:-1], key=attrgetter("slack"))
        return self.full


class FirstFitDecreasing(Packing):
    """Policy that puts the largest waiting pieces into packs first.

    It holds pieces until they fill `open_packs` packs, and yields the packs in random order.

    The size of a piece is its fraction of a pack: of the length, images or cost, whichever is the greatest. The last
    pack of a round is seldom full, so its pieces wait for the next round. A piece that waited for 4 rounds is packed
    before all others, so that it is not in the last pack again.
    """

    holds = True

    def __init__(self, *, key: int, **bounds: Any) -> None:
        super().__init__(**bounds)
        self._key = key
        self._length = self._images = self._cost = 0  # sums over the waiting pieces

    def add(self, piece: Piece) -> None:
        """Add a waiting piece. Pack all waiting pieces if they fill `open_packs` packs."""
        self.waiting.append(piece)
        self._length += piece.length
        self._images += piece.images
        self._cost += min(piece.cost, self.max_cost)  # a piece that costs more than a pack may is alone in its pack
        enough = self.open_packs + 1  # one more pack, because the pieces of the last one wait again
        if (
            self._length >= enough * self.max_length
            or self._images >= enough * self.max_images > 0
            or self._cost >= enough * self.max_cost > 0
        ):
            self._pack_all(unpack_last=True)

    def due(self) -> OpenPack | None:
        """Return the next filled pack, or None."""
        return self.packs[0] if self.packs else None

    def last(self) -> OpenPack | None:
        """Return the next pack after the last piece, or None after the last pack."""
        if self.waiting:
            self._pack_all(unpack_last=False)
        return self.due()

    def _pack_all(self, *, unpack_last: bool) -> None:
        """Put all waiting pieces into packs. If `unpack_last`, the pieces of the last pack wait again."""
        packs: list[OpenPack] = []
        for piece in self._in_order():
            pack = _oldest_with_room(packs, piece)
            if pack is None:
                # the piece may be longer if `max_length` was reduced
                pack = self.empty(max(self.max_length, piece.length))
                packs.append(pack)
            pack.add(piece)
        self.waiting = packs.pop().pieces if unpack_last else []
        self._length = sum(piece.length for piece in self.waiting)
        self._images = sum(piece.images for piece in self.waiting)
        self._cost = sum(min(piece.cost, self.max_cost) for piece in self.waiting)
        for piece in self.waiting:
            piece.rounds += 1
        self.packs += [packs[i] for i in permutation(derive_key(self._key, self.rounds), len(packs)).tolist()]
        self.rounds += 1

    def _in_order(self) -> list[Piece]:
        """Sort the waiting pieces: first those that waited for many rounds, then the largest first."""
        size = self._scaled_size if self.max_images or self.max_cost else attrgetter("length")
        ordered = sorted(self.waiting, key=size, reverse=True)
        late = [piece for piece in ordered if piece.rounds >= _LATE_ROUNDS]
        return late + [piece for piece in ordered if piece.rounds < _LATE_ROUNDS] if late else ordered

    def _scaled_size(self, piece: Piece) -> int:
        """Return the size of a piece: its fraction of a pack, times a constant that makes it an integer."""
        length, images, cost = self.max_length, self.max_images or 1, self.max_cost or 1
        fractions = [piece.length * images * cost]  # each times length * images * cost
        if self.max_images:
            fractions.append(piece.images * length * cost)
        if self.max_cost:
            fractions.append(piece.cost * length * images)
        return max(fractions)


def _oldest_with_room(packs: list[OpenPack], piece: Piece) -> OpenPack | None:
    """Return the first of the packs, oldest first, with room for a piece, or None."""
    length, images, cost = piece.length, piece.images, piece.cost
    for pack in packs:
        if length <= pack.room and images <= pack.images and cost <= pack.cost:
            return pack
    return None


class ByFunction(Packing):
    """Policy that calls a user's function, which groups items by their lengths.

    It holds pieces until they fill `open_packs` packs.

        lengths   3 5 2 4 1 …        of waiting items in their order, until they fill `open_packs` packs
        function  [3, 5, 2, 4, 1]  ─▶  [[1, 2], [0, 3], [4]]
        packs     5+2   3+4   1      yielded in this order

    All packs of a round are chosen before the first one is yielded, and the state has them as refs of their items, so a
    resumed run does not call the function again for them. The first call is repeated to find functions that are not
    deterministic.
    """

    holds = True

    def __init__(self, function: PackingFunction, *, max_length: int, open_packs: int) -> None:
        super().__init__(max_length=max_length, max_images=0, open_packs=open_packs)
        self._function, self._is_checked = function, False
        self._length = 0  # sum over all waiting pieces

    def add(self, piece: Piece) -> None:
        """Add a waiting piece."""
        self.waiting.append(piece)
        self._length += piece.length

    def due(self) -> OpenPack | None:
        """Return the next pack, or None until the waiting pieces fill `open_packs` packs."""
        if not self.packs and self._length >= self.open_packs * self.max_length:
            self._pack_all()
        return super().last()

    def last(self) -> OpenPack | None:
        """Return the next pack after the last piece, or None after the last pack."""
        if self.waiting and not self.packs:
            self._pack_all()
        return super().last()

    def _pack_all(self) -> None:
        """Put all waiting pieces into packs.

        Raises `EncodeError` for an invalid result, and the pieces then still wait.
        """
        groups = self._checked_groups([piece.length for piece in self.waiting])
        packs = []
        for group in groups:
            pack = OpenPack(self.max_length, 0)
            for position in group:
                pack.add(self.waiting[position])
            packs.append(pack)
        self.packs, self.waiting, self._length = packs, [], 0
        self.rounds += 1

    def _checked_groups(self, lengths: list[int]) -> list[list[int]]:
        """Call the user's function and check its result. Raises `EncodeError` if it is invalid."""
        name = f"OnlinePacker(policy={function_name(self._function)})"
        try:
            groups = self._call_function(lengths)
            check_groups(groups, lengths, self.max_length)
            if not self._is_checked and self._call_function(lengths) != groups:
                raise ValueError("it returned other groups for the same lengths. It must depend on the lengths alone")
        except Exception as error:
            raise EncodeError(
                f"{name} failed for {len(lengths)} items: {type(error).__name__}: {error}. Fix it and resume."
            ) from error
        self._is_checked = True
        return groups

    def _call_function(self, lengths: list[int]) -> list[list[int]]:
        """Call the user's function, and convert its result to lists of int."""
        return [[index(position) for position in group] for group in self._function(list(lengths))]


def check_groups(groups: Sequence[Sequence[int]], lengths: Sequence[int], max_length: int) -> None:
    """Raise ValueError unless groups are valid.

    Each index must be in one group, and no group may be empty or too long for a pack.
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


def build_packing(
    policy: Policy | PackingFunction, *, key: int, max_length: int, open_packs: int, **bounds: Any
) -> Packing:
    """Build a policy without packs.

    `bounds` are the other arguments of `Packing`, and `key` seeds the policy's random numbers.
    """
    if callable(policy):
        return ByFunction(policy, max_length=max_length, open_packs=open_packs)
    bounds |= {"max_length": max_length, "open_packs": open_packs}
    if policy == "first_fit_decreasing":
        return FirstFitDecreasing(key=key, **bounds)
    return {"sequential": Sequential, "first_fit": FirstFit, "best_fit": BestFit}[policy](**bounds)
