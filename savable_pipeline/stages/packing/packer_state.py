"""What an `OnlinePacker` saves: refs and lengths of the items in open packs, of held ones and of the next."""

from __future__ import annotations

from typing import Any

import msgspec

from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.stages.item_ref import ItemRef, as_ref
from savable_pipeline.stages.packing.packing_policies import Piece


class Placed(msgspec.Struct, array_like=True):
    """A piece in a state; trailing fields with their default values may be left out."""

    ref: Any
    length: SavedCount
    images: SavedCount = 0
    start: SavedCount = 0
    total: SavedCount = 0  # 0: the item is whole
    rounds: SavedCount = 0

    def piece(self) -> Piece:
        """The piece, whose item is missing."""
        total = self.total or self.length
        return Piece(as_ref(self.ref), self.length, self.images, self.start, total, rounds=self.rounds)


class PackerState(msgspec.Struct):
    """The state of a packer; see `OnlinePacker.save_state`."""

    packs: list[list[Placed]]
    count: SavedCount
    taken: Any
    source: dict[str, Any]
    taken_part: tuple[SavedCount, SavedCount] = (0, 0)
    taken_size: tuple[SavedCount, SavedCount] | None = None
    held: list[Placed] = []
    rounds: SavedCount = 0


def placed(piece: Piece) -> tuple[Any, ...]:
    """A piece as a state holds it."""
    if piece.rounds:
        return (piece.ref, piece.length, piece.images, piece.start, piece.total, piece.rounds)
    if piece.is_cut:
        return (piece.ref, piece.length, piece.images, piece.start, piece.total)
    return (piece.ref, piece.length, piece.images) if piece.images else (piece.ref, piece.length)


def piece_ref(piece: Piece) -> ItemRef:
    """The ref of a whole item, or (ref, start, stop) of a cut one."""
    return (piece.ref, piece.start, piece.start + piece.length) if piece.is_cut else piece.ref
