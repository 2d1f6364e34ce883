"""`PieceMaker`: cuts items into pieces for an `OnlinePacker`, and rebuilds them.

item ──▶ length ──▶ piece [0, 700) ──▶ a pack of the policy
                    piece [700, …)     the rest is in `taken` until there is room
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.chunked_stage import chunked, value_of
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_buffer import StageBuffer, is_whole
from savable_pipeline.stages.item_ref import UNBUILT, Element, ItemRef, as_ref
from savable_pipeline.stages.packing.packing_policies import Packing, Piece
from savable_pipeline.stages.skipped_samples import SourceCounts
from savable_pipeline.stages.stage import ItemStage
from savable_pipeline.stages.task_encoder import Skip

TooLong = Literal["skip", "truncate", "split"]
_LEAST_TOKENS = 1  # an item has at least this many tokens, because a pack of empty items would never be full


class PieceMaker(StageBuffer):
    """Takes items of `stage.source`, and adds their pieces to `packing`.

    The values of pieces may take `max_bytes` in a process. `asked` is whether the user chose `too_long`. If so, items
    that are skipped as too long are not counted as problems.
    """

    def __init__(
        self, stage: ItemStage, calls: EncoderCalls, packing: Packing, too_long: TooLong, *, asked: bool, max_bytes: int
    ) -> None:
        self.taken: Piece | None = None  # the item that is not completely in packs yet, with `sizes` if declared
        self.ahead: list[Element] = []  # items that were taken from the source after `taken`
        super().__init__(stage, max_bytes)
        self._calls, self._packing = calls, packing
        self._too_long, self._asked = too_long, asked
        self._by_source = SourceCounts(stage.counts)

    @property
    def built(self) -> int:
        """Return the number of items that are in memory, both in packs and in no pack yet."""
        ahead = sum([element.is_built for element in self.ahead])
        return self.counted + ahead + (self.taken is not None and self.taken.is_built)

    def add_next(self) -> bool:
        """Add pieces of the next items to the policy, at most until a pack is due.

        Items that do not fit may be dropped. Returns False if the source has ended.
        """
        if self.taken is not None:
            if self._add_part(self.taken):
                self.taken = None
            return True
        if not self.ahead:
            n, source = self._packing.at_once, chunked(self._owner.source)
            while len(self.ahead) < n and (more := source.take(n - len(self.ahead))):
                self.ahead += more
            if not self.ahead:
                return False
        packing, pieces, done = self._packing, list[Piece](), 0
        try:
            for element in self.ahead:
                if (piece := self._whole_piece(element)) is not None:
                    packing.add(piece)
                    pieces.append(piece)
                done += 1  # incremented last, so that the item is tried again after an error
                if self.taken is not None or packing.due() is not None:
                    break
        finally:
            del self.ahead[:done]
            self._count_pieces(pieces)
        return True

    def _count_pieces(self, pieces: Sequence[Piece]) -> None:
        """Count pieces and their tokens by source, and the bytes of their values."""
        self._by_source.reset_rows(pieces)
        self._by_source.count_items(pieces, self._owner.info.tags, has_lengths=True)
        self.count_bytes(pieces)

    def _whole_piece(self, element: Element) -> Piece | None:
        """Return a whole item as a piece. Returns None if it is lost, or if it does not fit and is now in `taken`."""
        declared, value, ref, packing = None, element.value, element.ref, self._packing
        if value is UNBUILT and element.sizes and type(ref[1]) is int and self._owner.info.declared:
            declared = element.sizes[0]  # not for a pack, because its sizes are those of its items
            length, images = self._calls.checked_length(declared[0], least=_LEAST_TOKENS), declared[1]
        else:
            value = value_of(self._owner.source, element) if value is UNBUILT else value
            if type(value) is Skip:  # the stage upstream has counted it
                return None
            length, images = self._calls.size(element, least=_LEAST_TOKENS)
        if length > packing.reach or images > packing.max_images > 0:
            sizes = declared and (declared,)
            self.taken = Piece(ref, value, sizes, measured=element.measured, length=0, total=length)
            return None
        cost = 0 if packing.costing is None else packing.costing.of(length, images)
        return Piece(ref, value, length=length, images=images, total=length, cost=cost)

    def _add_part(self, taken: Piece) -> bool:
        """Add to the policy the part of the taken item that fits. Returns whether nothing of the item remains."""
        total = self._total_of(taken)
        if total is None:
            return True
        stop = taken.total = total
        if total > self._packing.max_length:
            if self._too_long == "skip" and not taken.start:
                self._count_dropped("longer than max_length", total, total, asked=self._asked)
                return True
            if self._too_long == "truncate":
                stop = self._packing.max_length
                if stop <= taken.start:  # its parts in packs are longer than a `max_length` decided since
                    return True
        length = min(stop - taken.start, self._packing.reach)
        piece = Piece(taken.ref, length=length, start=taken.start, total=total)
        item = self._measure(piece, taken)
        if type(item) is Skip:
            return True
        if not taken.start and stop < total:
            counts = self._owner.counts
            counts["truncated"] += 1
            counts["truncated_tokens"] += total - stop
        if piece.images > self._packing.max_images > 0:
            self._count_dropped("of more than max_images", piece.length, piece.images)
        else:
            piece.value = item
            self._count_pieces([piece])
            self._packing.add(piece)
        taken.start += piece.length
        return taken.start == stop

    def _total_of(self, taken: Piece) -> int | None:
        """Return the declared or measured length of the taken item, or None if it can no longer be rebuilt."""
        if taken.sizes is not None:
            return self._calls.checked_length(taken.sizes[0][0], least=_LEAST_TOKENS)
        item = self._item_of(taken)
        return None if type(item) is Skip else self._calls.length(taken, least=_LEAST_TOKENS)

    def _item_of(self, taken: Piece) -> Any:
        """Return the taken item, or a `Skip` if it can no longer be rebuilt, which the stage upstream has counted."""
        return taken.value if taken.is_built else self._rebuild_wholes([taken])[taken.ref].value

    def _measure(self, piece: Piece, taken: Piece) -> Any:
        """Set images and cost of a piece of the taken item, and return the piece's value.

        The value is UNBUILT if the declared size is enough. For a part of an item with images, the item is built,
        because the size does not say which images the part has.
        """
        if taken.sizes is not None and not (piece.is_cut and taken.sizes[0][1]):
            item, piece.images = UNBUILT, taken.sizes[0][1]
        else:
            item = self._part_of(self._item_of(taken), piece)
            piece.images = 0 if type(item) is Skip else self._calls.images(item)
        self._set_cost(piece)
        return item

    def _set_cost(self, piece: Piece) -> None:
        if self._packing.costing is not None:
            piece.cost = self._packing.costing.of(piece.length, piece.images)

    def values(self, pieces: Sequence[Piece]) -> list[Any]:
        """Return the values of pieces.

        Missing values are rebuilt together. A value is a `Skip` if that is impossible.
        """
        missing = [piece for piece in pieces if piece.value is UNBUILT]
        wholes = self._rebuild_wholes(missing) if missing else {}
        rebuilt = {piece: self._part_of(wholes[piece.ref].value, piece) for piece in missing}
        return [rebuilt.get(piece, piece.value) for piece in pieces]

    def _rebuild_wholes(self, pieces: Sequence[Piece]) -> dict[ItemRef, Element]:
        """Rebuild the whole items of pieces, and return them by ref.

        Missing values of other pieces of the same samples are set, too. If a sample fans out, its items are rebuilt in
        their order, by one iterator.
        """
        positions = {sample: at for at, sample in enumerate(dict.fromkeys([piece.ref[:2] for piece in pieces]))}
        others = [each for each in self._packing.pieces() if each.ref[:2] in positions and not each.is_built]
        both, requested = dict.fromkeys([*pieces, *others]), set(pieces)
        # in a damaged state, the last entry of a ref may not be a number
        parts = {each.ref: each.ref[-1] if type(each.ref[-1]) is int else -1 for each in both}
        wholes = {ref: Element(ref) for ref in sorted(parts, key=lambda ref: (positions[ref[:2]], parts[ref]))}
        chunked(self._owner.source).make([*wholes.values()])
        for each in both:
            whole = wholes[each.ref]
            if type(whole.value) is not Skip and each.total:
                self._calls.check_size(whole, each.total, None if each.is_cut else each.images)
            if type(whole.value) is not Skip and each not in requested:
                each.value = self._part_of(whole.value, each)
                self.count_bytes([each])
        taken = self.taken
        if taken is not None and taken.ref in wholes and type(wholes[taken.ref].value) is not Skip:
            taken.value, taken.measured = wholes[taken.ref].value, wholes[taken.ref].measured
        return wholes

    def _part_of(self, whole: Any, piece: Piece) -> Any:
        """Return the part of the item `whole` that a piece covers, or the `Skip` of a lost item."""
        if type(whole) is Skip or not piece.is_cut:
            return whole
        return self._calls.cut(whole, piece.start, piece.start + piece.length)

    def _count_dropped(self, reason: str, tokens: int, measure: int, *, asked: bool = False) -> None:
        """Count `tokens` of an item as dropped, because `measure`, its length or images, is too large.

        Raises `EncodeError` for very many in a row.
        """
        assert self.taken is not None
        stage, packing = self._owner, self._packing
        in_row = self._by_source.count_dropped(reason, self.taken.ref, tokens, asked=asked)
        stage.counts["skipped_tokens"] += tokens
        if in_row >= stage.info.max_empty:
            length_limit = f"max_length={packing.max_length}, or pass too_long="
            limit = length_limit if "length" in reason else f"max_images={packing.max_images}"
            raise EncodeError(
                f"OnlinePacker: {in_row:,} items in a row were {reason}, the last one with {measure}. Raise {limit}."
            )

    def known(self, saved: Sequence[SavedPiece]) -> list[Piece]:
        """Return the pieces of a state without excluded samples and removed sources."""
        pieces = [each.piece() for each in saved]
        for piece in pieces:
            self._set_cost(piece)
        return [piece for piece in pieces if is_whole(self._owner, piece.ref)]

    def restore_taken(self, ref: Any, part: tuple[int, int], size: Size | None) -> None:
        """Restore the taken item of a state, if there was one and its source still exists.

        `part` is (start of the rest, length of the item), and `size` the declared size of the item.
        """
        self.taken = None
        if ref is not None and is_whole(self._owner, as_ref(ref)):
            self.taken = Piece(as_ref(ref), sizes=size and (size,), length=0, start=part[0], total=part[1])


class SavedPiece(msgspec.Struct, array_like=True):
    """A piece in a state. Trailing fields with their default values may be absent."""

    ref: Any
    length: SavedCount
    images: SavedCount = 0
    start: SavedCount = 0
    total: SavedCount = 0  # 0 means that the item is whole
    rounds: SavedCount = 0

    def piece(self) -> Piece:
        """Return the piece, unbuilt."""
        piece = Piece(as_ref(self.ref), length=self.length, images=self.images, rounds=self.rounds)
        piece.start, piece.total = self.start, self.total or self.length
        return piece


class PackerState(msgspec.Struct):
    """The state of a packer; see `OnlinePacker.save_state`."""

    packs: list[bytes]
    count: SavedCount
    taken: Any
    source: dict[str, Any]
    taken_part: tuple[SavedCount, SavedCount] = (0, 0)
    taken_size: tuple[SavedCount, SavedCount] | None = None
    ahead: list[Any] = []
    waiting: list[SavedPiece] = msgspec.field(default_factory=list, name="held")
    rounds: SavedCount = 0
    lengths: list[SavedCount] = []


def piece_ref(piece: Piece) -> ItemRef:
    """Return the ref of a whole item, or (ref, start, stop) for a part of an item."""
    return (piece.ref, piece.start, piece.start + piece.length) if piece.length != piece.total else piece.ref
