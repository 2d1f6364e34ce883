"""`CacheLayout`: what a row of the cache is. Of tars: a sample of the index. Of other files: a block of bytes.

All blocks have equally many bytes but the last of a file: these follow from the names and sizes in the index. Long
samples of tars are in blocks too, in a folder of the version (see cached_samples.py), by the same index.

An index behind a URL may be fetched by the part that is needed: its head at once, the rows of a shard before use.

    VERSION/index    the head and, behind it, the rows that are here; the rest is a hole
    VERSION/parts    uint8 (shards,): 1 where the rows of a shard are here. No such file: all are
    VERSION/parts.pin    the server's version of the index (its ETag), of which all of it is

Rows of another version never come here, and those of a shard are checked with the checksum in the head before they are
written. So processes that fetch the same rows at once write the same bytes.
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
from savable_pipeline.data.remote.cache_files import open_own, read_pin
from savable_pipeline.data.shards.index import PARTS, ShardIndex, index_name
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar import padded
from savable_pipeline.data.shards.tar_format import TarIndex, open_index
from savable_pipeline.errors import RemoteError, ShardError

Get: TypeAlias = Callable[[int, int], bytes]  # bytes `start` to `stop - 1` of the index on the server
Write: TypeAlias = Callable[[int, bytes, int], None]  # to a descriptor, bytes at an offset

WHOLE_BYTES = 256 << 20  # of an index, up to which all of it is fetched
_ROWS = 1 << 19  # fetched by one request, at most, unless a shard has more
_AT_ONCE = 32  # requests for rows: small ones, which wait for the way to the server
_FAULTS = {"changed shard": "it has another size or version than before", "missing shard": "it is gone"}
LONG_FOLDER = "long"
_LEAST_BLOCK = 4096
_LONG_BLOCK = 1 << 18  # of long samples, which are read on and on
_MOST_BLOCK = 1 << 20  # divides a piece
_MANY_BLOCKS = 1 << 26  # beyond which blocks are made larger: each takes two bytes of flags


class IndexParts:
    """Which rows of the index in the folder of a version are here. Raises OSError if it is not one in parts."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        with open_own(folder / PARTS, "r+b") as file:
            self._here = np.frombuffer(mmap.mmap(file.fileno(), len(index.shards)), np.uint8)
        self._file = open_own(folder / "index", "r+b")  # the file that `index` has mapped, whatever takes its name
        self._index, self.name = index, index_name(index.header.kind)
        self.bytes = os.fstat(self._file.fileno()).st_size
        self.pin = read_pin(folder / "parts.pin")

    def absent(self, shards: Rows) -> Rows:
        """Those of these shards whose rows are not here."""
        absent: Rows = shards[self._here[shards] == 0]
        return absent

    def all_absent(self) -> Rows:
        """The numbers of all shards whose rows are not here."""
        return np.flatnonzero(self._here == 0)

    def fetch(self, root: str, shards: Iterable[int], get: Get, write: Write) -> None:
        """Fetches the rows of these shards, in order, some requests at a time. Raises `RemoteError`."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(partial(self._fetch, root, get, write), self._runs(shards)):
                pass

    def check(self, shards: Rows) -> None:
        """Forgets those rows of these shards that are damaged."""
        here = shards[self._here[shards] == 1].tolist()
        self._here[[shard for shard in here if not self._index.is_whole(shard)]] = 0

    def _runs(self, shards: Iterable[int]) -> Iterator[range]:
        """Runs of consecutive shards, each of at most `_ROWS` samples or one shard."""
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

    def _fetch(self, root: str, get: Get, write: Write, shards: range) -> None:
        try:
            rows = self._index.rows_from(get, shards)
        except ShardError as error:
            raise RemoteError(
                f"{root}/{self.name}: {_FAULTS.get(error.reason, error)}. The index is damaged or was replaced in the "
                "run. The loader's state is whole: save it and start again with the new index"
            ) from error
        for offset, raw in rows:
            write(self._file.fileno(), raw, offset)
        self._here[shards.start : shards.stop] = 1


def open_parts(folder: Path, index: ShardIndex) -> IndexParts | None:
    """The parts of the index in the folder of a version; None if the whole index is there."""
    parts = folder / PARTS
    if not parts.exists():
        return None
    if parts.stat().st_size != len(index.shards):  # a crash of the machine has cut it
        begin_parts(folder, len(index.shards))
    return IndexParts(folder, index)


def begin_parts(folder: Path, shards: int) -> None:
    """Notes that no rows of the index of so many shards are in the folder of a version."""
    replace_file(folder / PARTS, [bytes(shards)])


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
        offset, size = index.extent(last, len(layout.gaps) - 1, layout)
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
