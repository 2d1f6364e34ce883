"""`ScannedTables`: the tables of shards that were scanned, in a file until they are joined in an index.

    length u64 │ xxh3_64 u64 │ table: MessagePack │ length …

What is in memory are names and places. Who is stopped leaves the file, and the next call goes on from there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from savable_pipeline.data.shards.index_file import ShardTable

_HEAD = struct.Struct("<QQ")


class ScannedTables:
    """The tables in the file beside the index at `path`, by name; the lock of the index must be held."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.scanned")
        self._file = self._path.open("a+b")
        self._places: dict[str, int] = {}
        self._end = 0
        self._find_left()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def add(self, table: ShardTable) -> None:
        """Writes a table; it is there for the next process as soon as this returns."""
        encoded = msgspec.msgpack.encode(table)
        self._file.write(_HEAD.pack(len(encoded), xxh3_64_intdigest(encoded)) + encoded)
        self._file.flush()
        self._places[table.entry.name] = self._end
        self._end += _HEAD.size + len(encoded)

    def __getitem__(self, name: str) -> ShardTable:
        found = self._read(self._places[name])
        assert found is not None, name
        return found[0]

    def __enter__(self) -> ScannedTables:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Deletes the file once an index has its tables, or where the disk is full; else the next process has it."""
        if kind is None or issubclass(kind, OSError):
            self._path.unlink(missing_ok=True)
        self._file.close()

    def _find_left(self) -> None:
        """Finds the tables that a stopped process left, and cuts off the one it was writing."""
        while (found := self._read(self._end)) is not None:
            self._places[found[0].entry.name] = self._end
            self._end = found[1]
        self._file.truncate(self._end)

    def _read(self, place: int) -> tuple[ShardTable, int] | None:
        """The table at a place, and the place after it; None if none is whole there."""
        head = os.pread(self._file.fileno(), _HEAD.size, place)
        if len(head) < _HEAD.size:
            return None
        length, digest = _HEAD.unpack(head)
        end = place + _HEAD.size + length
        if end > os.fstat(self._file.fileno()).st_size:
            return None
        encoded = os.pread(self._file.fileno(), length, place + _HEAD.size)
        if xxh3_64_intdigest(encoded) != digest:
            return None
        try:
            return msgspec.msgpack.decode(encoded, type=ShardTable), end
        except msgspec.DecodeError:  # of another release
            return None
