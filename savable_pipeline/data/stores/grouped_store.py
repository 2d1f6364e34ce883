"""`GroupedStore`: files whose rows are decoded in groups, such as the row groups of Parquet or compressed shards.

file ─ groups of rows ─ each decoded once, into `DecodedBlocks` ─ rows
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from typing import Any

import numpy as np

from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.awaited_rows import AwaitedOfGroup, AwaitedRows
from savable_pipeline.data.stores.decoded_blocks import DECODED_BYTES, DecodedBlocks
from savable_pipeline.data.stores.file_store import FileStore
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.errors import ShardError

_MOST_DECODED = 4 << 30  # bytes of a group, beyond which it is refused unless the cache is as large


class GroupedStore(FileStore):
    """Decodes groups into `blocks`, and keeps the rows that are awaited of those that it gives up."""

    def __init__(self, found: IndexedFiles, blocks: DecodedBlocks[Any] | None) -> None:
        super().__init__(found)
        self.blocks: DecodedBlocks[Any] = DecodedBlocks(DECODED_BYTES) if blocks is None else blocks
        self._me = object()  # in the cache's keys: a number could be another store's, later
        self.awaited = AwaitedRows()
        self._last: tuple[int, int, Any, int] = -1, 0, None, 0  # shard, row, rows and place of the row found last
        self._broken: dict[tuple[int, int], str] = {}  # damaged groups, and what is wrong with them

    @abstractmethod
    def group_ends(self, shard: int) -> list[int]:
        """The row after the last of each group of a file."""

    @abstractmethod
    def decoded(self, shard: int, group: int, expected: int) -> tuple[Any, int]:
        """The rows of a group, `expected` many, and their bytes in memory. Raises `ShardError`."""

    @property
    def most_decoded(self) -> int:
        """The bytes in memory beyond which a group is refused."""
        return max(self.blocks.limit, _MOST_DECODED)

    def find(self, shard: int, row: int) -> tuple[Any, int]:
        """The decoded group with a row, and the row's place in it."""
        last = self._last
        if last[1] == row and last[0] == shard:
            return last[2], last[3]
        ends = self.group_ends(shard)
        group = bisect_right(ends, row)
        first = ends[group - 1] if group else 0
        key, name = (self._me, shard, group), (shard, group)
        rows, place = self.blocks.held(key), row - first
        if rows is None and (rows := self.blocks.kept(key, row)) is not None:
            self.awaited.done(name, row)
            return rows, 0
        if rows is None:
            found = AwaitedOfGroup(self.awaited, name, first)
            rows = found.rows = self.blocks.get(key, lambda: self._decoded(shard, group, ends[group] - first), found)
        self.awaited.done(name, row)
        self._last = shard, row, rows, place
        return rows, place

    def prefetch(self, indices: Rows) -> None:
        """Remembers which rows will be read: should their group be given up before, they are kept."""
        super().prefetch(indices)
        if self.row_groups(0) is None:
            return
        shards = self.found.shards_of(indices)
        for shard in np.unique(shards).tolist():
            rows = indices[shards == shard] - self.firsts[shard]
            self.awaited.announce(shard, rows, self.group_ends(shard))

    def _decoded(self, shard: int, group: int, expected: int) -> tuple[Any, int]:
        if (shard, group) in self._broken:  # found once: decoding it again for each row would take hours
            raise ShardError(self._broken[shard, group])
        try:
            return self.decoded(shard, group, expected)
        except ShardError as error:
            if error.reason == "damaged shard":
                self._broken[shard, group] = str(error)
            raise
