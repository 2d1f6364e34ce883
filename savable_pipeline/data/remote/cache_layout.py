"""`CacheLayout`: the rows of the cache, which are samples of tars or blocks.

Files that are no tars are cached in blocks of bytes. All blocks of a file have the same size except for the last, so
they follow from the names and sizes in the index. Long samples of tars are stored in blocks too, in a folder of the
version (see cached_samples.py), by the same index.

A remote index may be fetched in parts: its head at once, the rows of a shard before use.

    VERSION/index        the head and, after it, the rows that are cached; the rest is a hole
    VERSION/parts        uint8 (shards,): 1 if the rows of the shard are cached. Without this file, all are
    VERSION/parts.pin    the ETag of the index

Rows of another version are rejected. Rows of a shard are compared with the checksum in the head before they are
written. So processes that fetch the same rows at the same time write the same bytes.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote.cache_files import open_private, read_pin
from savable_pipeline.data.shards.index import PARTS, ShardIndex, index_name
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar import padded
from savable_pipeline.data.shards.tar_format import TarIndex, open_index
from savable_pipeline.errors import RemoteError, ShardError

Get: TypeAlias = Callable[[int, int], bytes]  # (start, stop): bytes `start` to `stop - 1` of the index on the server
WriteAt: TypeAlias = Callable[[int, bytes, int], None]  # (descriptor, bytes, offset)

WHOLE_BYTES = 256 << 20  # largest index that is fetched at once
_ROWS = 1 << 19  # fetched by one request, at most, unless a shard has more
_AT_ONCE = 32  # requests for rows, which are small and bound by latency
_FAULTS = {"changed shard": "it has another size or version than before", "missing shard": "it is gone"}
LONG_FOLDER = "long"
_LEAST_BLOCK = 4096
_LONG_BLOCK = 1 << 18  # of long samples, which are read sequentially
_MOST_BLOCK = 1 << 20  # divides a piece
_MANY_BLOCKS = 1 << 26  # more blocks than this are made larger, because each takes bytes of flags


class IndexParts:
    """Rows of a partly cached index in the folder of a version.

    Raises OSError if the index is not stored in parts.
    """

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        with open_private(folder / PARTS, "r+b") as file:
            self._present = np.frombuffer(mmap.mmap(file.fileno(), len(index.shards)), np.uint8)
        self._file = open_private(folder / "index", "r+b")  # what `index` has mapped, even if the name is reused
        self._index, self.name = index, index_name(index.header.kind)
        self.bytes = os.fstat(self._file.fileno()).st_size
        self.pin = read_pin(folder / "parts.pin")

    def absent(self, shards: Rows) -> Rows:
        """Return those of these shards whose rows are not cached."""
        absent: Rows = shards[self._present[shards] == 0]
        return absent

    def all_absent(self) -> Rows:
        """Return the numbers of all shards whose rows are not cached."""
        return np.flatnonzero(self._present == 0)

    def fetch(self, root: str, shards: Iterable[int], get: Get, write: WriteAt) -> None:
        """Fetch the rows of these shards in order, by several requests at a time.

        Raises `RemoteError`.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(partial(self._fetch, root, get, write), self._runs(shards)):
                pass

    def check(self, shards: Rows) -> None:
        """Forget the cached rows of these shards that are damaged."""
        present = shards[self._present[shards] == 1].tolist()
        self._present[[shard for shard in present if not self._index.is_whole(shard)]] = 0

    def _runs(self, shards: Iterable[int]) -> Iterator[range]:
        """Yield runs of consecutive shards, each of at most `_ROWS` samples or one shard."""
        first = end = -1
        rows = self._index.shard_rows
        for shard in shards:
            if shard != end or rows[shard + 1] - rows[first] > _ROWS:
                if end > first:
                    yield range(first, end)
                first = shard
            end = shard + 1
        if end > first:
            yield range(first, end)

    def _fetch(self, root: str, get: Get, write: WriteAt, shards: range) -> None:
        try:
            rows = self._index.rows_from(get, shards)
        except ShardError as error:
            raise RemoteError(
                f"{root}/{self.name}: {_FAULTS.get(error.reason, error)}. The index is damaged or was replaced in the "
                "run. The loader's state is whole: save it and start again with the new index"
            ) from error
        for offset, raw in rows:
            write(self._file.fileno(), raw, offset)
        self._present[shards.start : shards.stop] = 1


def open_parts(folder: Path, index: ShardIndex) -> IndexParts | None:
    """Return the parts of the index in a version's folder, or None if it is whole."""
    parts = folder / PARTS
    if not parts.exists():
        return None
    if parts.stat().st_size != len(index.shards):  # a crash of the machine has truncated it
        begin_parts(folder, len(index.shards))
    return IndexParts(folder, index)


def begin_parts(folder: Path, shards: int) -> None:
    """Record that no rows of an index of so many shards are cached."""
    replace_file(folder / PARTS, [bytes(shards)])


class TarLayout:
    """Samples of an index of tars as rows, numbered through all shards.

    `firsts` has the first row of each shard, then the number of all: int64 (shards + 1,). `suffix` is that of the
    shards' files in the cache. `parts` says which rows of the index are cached; None: all.
    """

    suffix = ".tar"

    def __init__(self, index: TarIndex, parts: IndexParts | None) -> None:
        self._tars = index
        self.index: ShardIndex = index
        self.parts, self.shards, self.firsts = parts, index.shards, index.shard_rows
        self._starts, self._ends = np.asarray(index.starts), np.ascontiguousarray(self.firsts, np.int64).data

    def begins(self, rows: Rows) -> Rows:
        """Return the first byte of each row in its shard: int64 of the same shape."""
        return self._starts[rows].astype(np.int64)

    def row_from(self, shard: int, offset: int) -> int:
        """Return the first row of a shard that starts at this byte or later.

        It is the next shard's first row if there is none.
        """
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        return first + int(np.searchsorted(self._starts[first:end], np.uint64(offset)))

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """Return the first byte of a row, and the end of row `stop - 1` of the same shard."""
        index, last = self._tars, stop - 1
        if stop < self._ends[bisect.bisect_right(self._ends, row)]:
            return index.starts[row], index.starts[stop]
        layout = index.layout(last)
        offset, size = index.extent(last, len(layout.gaps) - 1, layout)
        return index.starts[row], offset + padded(size)

    def headers_match(self, shard: int, fd: int, row: int) -> bool:
        """Return whether the headers of a sample in an open file match the index."""
        return self._tars.header_matches(self.shards.names[shard], fd, row)


class BlockLayout:
    """Files of an index in blocks of at least `block` bytes. See `TarLayout`."""

    suffix = ".bytes"

    def __init__(self, index: ShardIndex, parts: IndexParts | None, block: int = _LEAST_BLOCK) -> None:
        self.index, self.parts, self.shards = index, parts, index.shards
        self.block, total = block, int(index.shards.sizes.sum())
        while total // self.block > _MANY_BLOCKS and self.block < _MOST_BLOCK:
            self.block *= 2
        self.firsts: Rows = np.concatenate([[0], np.cumsum(-(-index.shards.sizes // self.block))])

    def begins(self, rows: Rows) -> Rows:
        """Return the first byte of each of these rows. See `TarLayout.begins`."""
        found: Rows = (rows - self.firsts[np.searchsorted(self.firsts, rows, side="right") - 1]) * self.block
        return found

    def row_from(self, shard: int, offset: int) -> int:
        """Return the first row from this byte. See `TarLayout.row_from`."""
        return min(int(self.firsts[shard]) - (-offset // self.block), int(self.firsts[shard + 1]))

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """Return the bytes of rows. See `TarLayout.extent`."""
        shard = int(np.searchsorted(self.firsts, row, side="right")) - 1
        first = int(self.firsts[shard])
        return (row - first) * self.block, min((stop - first) * self.block, int(self.shards.sizes[shard]))

    def headers_match(self, shard: int, fd: int, row: int) -> bool:
        """Return True, because blocks have no headers.

        Only the server's version detects a change.
        """
        return True


CacheLayout: TypeAlias = TarLayout | BlockLayout


def open_layout(folder: Path) -> CacheLayout:
    """Return the layout of the version in this folder.

    Raises OSError if there is none, `ShardError` if it is damaged.
    """
    if folder.name == LONG_FOLDER:
        return BlockLayout(open_index(folder.parent / "index"), None, _LONG_BLOCK)
    index = open_index(folder / "index")
    parts = open_parts(folder, index)
    return TarLayout(index, parts) if isinstance(index, TarIndex) else BlockLayout(index, parts)
