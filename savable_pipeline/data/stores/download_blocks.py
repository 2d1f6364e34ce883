"""Which rows are downloaded together: a piece of the shard, or the run of rows that the plan names together.

A dataset that fits into the cache is downloaded in pieces of 8 MiB. One that does not is downloaded in the very runs
that were announced, so that each byte is downloaded once an epoch whatever else the cache must hold.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from savable_pipeline.data.remote.pace import PIECE
from savable_pipeline.data.remote.shard_cache import ShardCache
from savable_pipeline.data.shards.shard_list import Rows

Block: TypeAlias = tuple[int, int]  # rows of one shard: the first, and the one after the last
_ROWS_KEPT = 1 << 18  # whose blocks are remembered


class DownloadBlocks:
    """The blocks of a cached version of a dataset."""

    def __init__(self, cached: ShardCache, *, in_pieces: bool) -> None:
        self._cached = cached
        self.in_pieces = in_pieces
        self._by_row: dict[int, Block] = {}  # the block that a row was announced in
        self._announced: set[Block] = set()  # pieces

    def announce(self, rows: Rows) -> list[Block]:
        """The blocks of these ascending rows, without pieces that were announced before."""
        blocks = self._blocks(rows)
        if self.in_pieces:
            blocks = [block for block in blocks if block not in self._announced]
            self._announced.update(blocks)
            return blocks
        if len(self._by_row) > _ROWS_KEPT:
            self._by_row.clear()
        self._by_row.update((row, block) for block in blocks for row in range(*block))
        return blocks

    def parts(self, rows: Rows, *, whole: bool) -> list[tuple[Block, list[int]]]:
        """The blocks of these ascending rows, which are needed now, and those of the rows that each holds.

        Each block is the `whole` piece, or the rows of it from the first that is needed to the last.
        """
        shards, pieces = self._cached.shards_of(rows), self._cached.layout.begins(rows) // PIECE
        cuts = np.flatnonzero((np.diff(shards) != 0) | (np.diff(pieces) != 0)) + 1
        found = []
        for part in np.split(rows, cuts):
            row, stop = int(part[0]), int(part[-1]) + 1
            block = self._piece(self._cached.shard_of(row), self._cached.extent(row, stop)[0] // PIECE)
            found.append((block if whole else (row, stop), part.tolist()))
        return found

    def forget_announced(self) -> None:
        """Lets pieces be announced again: the downloader that knew of them is gone."""
        self._announced.clear()

    def block_of(self, row: int) -> Block:
        """The block to download for a row: its piece, or the run that it was announced in."""
        if self.in_pieces:
            return self._piece(self._cached.shard_of(row), self._cached.extent(row, row + 1)[0] // PIECE)
        return self._by_row.get(row, (row, row + 1))

    def _blocks(self, rows: Rows) -> list[Block]:
        """The blocks that hold these ascending rows; runs of rows are cut where a piece of the shard ends."""
        shards = self._cached.shards_of(rows)
        pieces = self._cached.layout.begins(rows) // PIECE
        if self.in_pieces:
            return [self._piece(*piece) for piece in dict.fromkeys(zip(shards.tolist(), pieces.tolist(), strict=True))]
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(shards) != 0) | (np.diff(pieces) != 0)) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts)]

    def _piece(self, shard: int, piece: int) -> Block:
        """The rows of a shard that start in its piece number `piece`, without one that is longer than a piece."""
        row_from = self._cached.layout.row_from
        row, stop = row_from(shard, piece * PIECE), row_from(shard, (piece + 1) * PIECE)
        if row < stop:
            begin, end = self._cached.extent(stop - 1, stop)
            stop -= end - begin > PIECE
        return row, stop
