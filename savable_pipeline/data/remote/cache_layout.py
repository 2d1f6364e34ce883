"""`CacheLayout`: what a row of the cache is. Of tars: a sample of the index. Of other files: a block of bytes.

All blocks have equally many bytes but the last of a file: these follow from the names and sizes in the index. Long
samples of tars are in blocks too, in a folder of the version (see `long_samples`), by the same index.
"""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import TypeAlias

import numpy as np

from savable_pipeline.data.remote.index_parts import IndexParts, open_parts
from savable_pipeline.data.shards.index_file import ShardIndex
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar import padded
from savable_pipeline.data.shards.tar_index import TarIndex, open_index

LONG_FOLDER = "long"
_LEAST_BLOCK = 4096
_LONG_BLOCK = 1 << 18  # of long samples, which are read on and on
_MOST_BLOCK = 1 << 20  # divides a piece
_MANY_BLOCKS = 1 << 26  # beyond which blocks are made larger: each takes two bytes of flags


class TarLayout:
    """The samples of an index of tars: consecutive bytes of its shards, counted through all of them.

    `firsts` has the first row of each shard, then the number of all: int64 (shards + 1,). `suffix` is that of the names
    of the shards' files in the cache; `parts` tells which rows of the index are here, None: all.
    """

    suffix = ".tar"

    def __init__(self, index: TarIndex, parts: IndexParts | None) -> None:
        self._tars = index
        self.index: ShardIndex = index
        self.parts, self.shards, self.firsts = parts, index.shards, index.shard_rows
        self._starts, self._ends = np.asarray(index.starts), np.ascontiguousarray(self.firsts, np.int64).data

    def begins(self, rows: Rows) -> Rows:
        """The first byte of each of these rows in its shard: int64 of the same shape."""
        return self._starts[rows].astype(np.int64)

    def row_from(self, shard: int, offset: int) -> int:
        """The first row of a shard that begins at this byte or behind it; the next shard's if there is none."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        return first + int(np.searchsorted(self._starts[first:end], np.uint64(offset)))

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """The first byte of a row, and the byte after row `stop - 1` of the same shard."""
        index, last = self._tars, stop - 1
        if stop < self._ends[bisect.bisect_right(self._ends, row)]:
            return index.starts[row], index.starts[stop]
        layout = index.layout(last)
        offset, size = index.place(last, len(layout.gaps) - 1, layout)
        return index.starts[row], offset + padded(size)

    def lies_there(self, shard: int, fd: int, row: int) -> bool:
        """Whether the headers of a sample in an open file say what the index does."""
        return self._tars.lies_there(self.shards.names[shard], fd, row)


class BlockLayout:
    """The files of an index in blocks of at least `block` bytes. See `TarLayout`."""

    suffix = ".bytes"

    def __init__(self, index: ShardIndex, parts: IndexParts | None, block: int = _LEAST_BLOCK) -> None:
        self.index, self.parts, self.shards = index, parts, index.shards
        self.block, total = block, int(index.shards.sizes.sum())
        while total // self.block > _MANY_BLOCKS and self.block < _MOST_BLOCK:
            self.block *= 2
        self.firsts: Rows = np.concatenate([[0], np.cumsum(-(-index.shards.sizes // self.block))])

    def begins(self, rows: Rows) -> Rows:
        """See `TarLayout.begins`."""
        found: Rows = (rows - self.firsts[np.searchsorted(self.firsts, rows, side="right") - 1]) * self.block
        return found

    def row_from(self, shard: int, offset: int) -> int:
        """See `TarLayout.row_from`."""
        return min(int(self.firsts[shard]) - (-offset // self.block), int(self.firsts[shard + 1]))

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """See `TarLayout.extent`."""
        shard = int(np.searchsorted(self.firsts, row, side="right")) - 1
        first = int(self.firsts[shard])
        return (row - first) * self.block, min((stop - first) * self.block, int(self.shards.sizes[shard]))

    def lies_there(self, shard: int, fd: int, row: int) -> bool:
        """True: the version that the server names is all that tells."""
        return True


CacheLayout: TypeAlias = TarLayout | BlockLayout


def open_layout(folder: Path) -> CacheLayout:
    """The layout of the version in this folder. Raises OSError if there is none, `ShardError` if it is damaged."""
    if folder.name == LONG_FOLDER:
        return BlockLayout(open_index(folder.parent / "index"), None, _LONG_BLOCK)
    index = open_index(folder / "index")
    parts = open_parts(folder, index)
    return TarLayout(index, parts) if isinstance(index, TarIndex) else BlockLayout(index, parts)
