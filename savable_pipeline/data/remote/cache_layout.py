"""`CacheLayout`: what a row of the cache is. Of tar shards: a sample of the index. Of other files: a block of bytes.

VERSION/index    tars: the index of the samples, or the parts of it that were needed: see `index_parts`
VERSION/blocks   other files: their names and sizes, and the bytes of a block, which all have but the last of a file
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote.index_parts import IndexParts, open_parts
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry
from savable_pipeline.data.shards.tar import padded
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.errors import ShardError

_LEAST_BLOCK = 4096
_MOST_BLOCK = 1 << 20  # divides a piece
_MANY_BLOCKS = 1 << 26  # beyond which blocks are made larger: each takes two bytes of flags


class CacheLayout(Protocol):
    """The rows of a version of a dataset: consecutive bytes of its shards, counted through all of them."""

    shards: Sequence[ShardEntry]
    firsts: Rows  # the first row of each shard, then the number of all: int64 (shards + 1,)
    suffix: str  # of the names of the shards' files in the cache
    parts: IndexParts | None  # which rows of the index are here; None: all

    def begins(self, rows: Rows, /) -> Rows:
        """The first byte of each of these rows in its shard: int64 of the same shape."""

    def row_from(self, shard: int, offset: int, /) -> int:
        """The first row of a shard that begins at this byte or behind it; the next shard's if there is none."""

    def extent(self, row: int, stop: int, /) -> tuple[int, int]:
        """The first byte of a row, and the byte after row `stop - 1` of the same shard."""

    def lies_there(self, shard: int, fd: int, row: int, /) -> bool:
        """Whether the bytes of a row in an open file look as they must."""


class TarLayout:
    """The samples of an index of tars."""

    suffix = ".tar"

    def __init__(self, folder: Path) -> None:
        self.index = TarIndex(folder / "index")
        self.parts: IndexParts | None = open_parts(folder, self.index)
        self.shards: Sequence[ShardEntry] = self.index.shards
        self.firsts = self.index.shard_rows
        self._starts = np.asarray(self.index.starts)

    def begins(self, rows: Rows) -> Rows:
        """See `CacheLayout.begins`."""
        return self._starts[rows].astype(np.int64)

    def row_from(self, shard: int, offset: int) -> int:
        """See `CacheLayout.row_from`."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        return first + int(np.searchsorted(self._starts[first:end], np.uint64(offset)))

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """See `CacheLayout.extent`."""
        index, last = self.index, stop - 1
        if stop < self.firsts[np.searchsorted(self.firsts, row, side="right")]:
            return index.starts[row], index.starts[stop]
        layout = index.layout(last)
        offset, size = index.place(last, len(layout.gaps) - 1, layout)
        return index.starts[row], offset + padded(size)

    def lies_there(self, shard: int, fd: int, row: int) -> bool:
        """Whether the headers of a sample say what the index does."""
        return self.index.lies_there(self.shards[shard].name, fd, row)


class _Blocks(msgspec.Struct):
    size: int
    files: list[tuple[str, int]]  # name, bytes


class BlockLayout:
    """Files in blocks of `block` bytes."""

    suffix = ".bytes"
    parts: IndexParts | None = None

    def __init__(self, path: Path) -> None:
        try:
            read = msgspec.msgpack.decode(path.read_bytes(), type=_Blocks)
        except msgspec.DecodeError as error:
            message = f"{path}: {error}; remove {path.parent}, and start again"
            raise ShardError(message, reason="damaged index") from error
        self.block = read.size
        self.shards: Sequence[ShardEntry] = [
            ShardEntry(name, size, -(-size // read.size), 0) for name, size in read.files
        ]
        self.firsts = np.cumsum([0, *(entry.samples for entry in self.shards)])

    def begins(self, rows: Rows) -> Rows:
        """See `CacheLayout.begins`."""
        found: Rows = (rows - self.firsts[np.searchsorted(self.firsts, rows, side="right") - 1]) * self.block
        return found

    def row_from(self, shard: int, offset: int) -> int:
        """See `CacheLayout.row_from`."""
        return int(self.firsts[shard]) + min(-(-offset // self.block), self.shards[shard].samples)

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """See `CacheLayout.extent`."""
        shard = int(np.searchsorted(self.firsts, row, side="right")) - 1
        first = int(self.firsts[shard])
        return (row - first) * self.block, min((stop - first) * self.block, self.shards[shard].size)

    def lies_there(self, shard: int, fd: int, row: int) -> bool:
        """True: the version that the server names is all that tells."""
        return True


def write_blocks(folder: Path, sizes: dict[str, int]) -> None:
    """Makes `folder` a version of the files with these names and sizes in bytes."""
    block, total = _LEAST_BLOCK, sum(sizes.values())
    while total // block > _MANY_BLOCKS and block < _MOST_BLOCK:
        block *= 2
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "blocks", [msgspec.msgpack.encode(_Blocks(block, sorted(sizes.items())))])


def open_layout(folder: Path) -> CacheLayout:
    """The layout of the version in this folder. Raises OSError if there is none, `ShardError` if it is damaged."""
    blocks = folder / "blocks"
    return BlockLayout(blocks) if blocks.exists() else TarLayout(folder)
