"""An index behind a URL that is fetched by the part that is needed: its head at once, the rows of a shard before use.

    VERSION/index    the head and, behind it, the rows that are here; the rest is a hole
    VERSION/parts    uint8 (shards,): 1 where the rows of a shard are here. No such file: all are
    VERSION/parts.pin    the server's version of the index (its ETag), of which all of it is

Rows of another version never come here, and those of a shard are checked with the checksum in the head before they are
written. So processes that fetch the same rows at once write the same bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote.own_files import open_own
from savable_pipeline.data.remote.version_pins import read_pin
from savable_pipeline.data.shards.index_file import ShardIndex
from savable_pipeline.data.shards.index_place import index_name
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import RemoteError, ShardError

Get: TypeAlias = Callable[[int, int], bytes]  # bytes `start` to `stop - 1` of the index on the server
Write: TypeAlias = Callable[[int, bytes, int], None]  # to a descriptor, bytes at an offset

WHOLE_BYTES = 256 << 20  # of an index, up to which all of it is fetched
_ROWS = 1 << 19  # fetched by one request, at most, unless a shard has more
_AT_ONCE = 32  # requests for rows: small ones, which wait for the way to the server
_FAULTS = {"changed shard": "it has another size or version than before", "missing shard": "it is gone"}


class IndexParts:
    """Which rows of the index in the folder of a version are here. Raises OSError if it is not one in parts."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        with open_own(folder / "parts", "r+b") as file:
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
                f"{root}/{self.name}: {_FAULTS.get(error.reason, error)}. It is damaged, or was replaced while this "
                "run reads by it. The loader's state is whole: save it and start again; the run goes on by the index "
                "that is there then"
            ) from error
        for offset, raw in rows:
            write(self._file.fileno(), raw, offset)
        self._here[shards.start : shards.stop] = 1


def open_parts(folder: Path, index: ShardIndex) -> IndexParts | None:
    """The parts of the index in the folder of a version; None if the whole index is there."""
    parts = folder / "parts"
    if not parts.exists():
        return None
    if parts.stat().st_size != len(index.shards):  # a crash of the machine has cut it
        begin_parts(folder, len(index.shards))
    return IndexParts(folder, index)


def begin_parts(folder: Path, shards: int) -> None:
    """Notes that no rows of the index of so many shards are in the folder of a version."""
    replace_file(folder / "parts", [bytes(shards)])
