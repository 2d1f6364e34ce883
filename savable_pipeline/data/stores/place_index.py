"""The index of files that are not tars: for each file its entry, and the places in it that its format wants to know.

    "SAVPLC01" │ xxh3_64 of the header │ header length u64 │ header: MessagePack │ padding │ places

    header   kind of the files; for each an entry, the number of its places, and a checksum of them
    places   uint64 (all places,), little-endian, file after file: for a Parquet file the rows and bytes of its row
             groups, for a JSONL file the offsets of its lines, …

It is mapped, not read: the time to open it grows with the files, not with the samples.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.open_files import with_handles
from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.data.shards.shard_list import Count, ShardEntry
from savable_pipeline.errors import ShardError

_MAGIC = b"SAVPLC01"
_ALIGN = 64
Places = NDArray[np.uint64]


class FileTable(msgspec.Struct):
    """What the scan of one file found: its entry, and its places as little-endian bytes, uint64 (any,)."""

    entry: ShardEntry
    places: bytes = b""

    def array(self) -> Places:
        """The places: uint64 (any,)."""
        return np.frombuffer(self.places, "<u8")


class _Header(msgspec.Struct, array_like=True):
    kind: str
    entries: list[ShardEntry]
    counts: list[Count]  # of places
    checks: list[int]


class PlaceIndex:
    """An open index of files of this `kind`. Raises OSError, and `ShardError` for one that is damaged."""

    def __init__(self, path: Path, kind: str) -> None:
        view = memoryview(with_handles(lambda: _mapped(path)))
        self._header, begin = _read_header(path, view, kind)
        self.entries = {entry.name: entry for entry in self._header.entries}
        self._number = {entry.name: number for number, entry in enumerate(self._header.entries)}
        self._firsts = np.cumsum([0, *self._header.counts])
        end = begin + 8 * int(self._firsts[-1])
        if end != len(view):
            raise ShardError(f"{path}: {len(view)} bytes, but the header says {end}")
        self._places = np.frombuffer(view[begin:end], "<u8")

    def places(self, name: str) -> Places:
        """The places of a file: uint64 (any,)."""
        number = self._number[name]
        return self._places[self._firsts[number] : self._firsts[number + 1]]

    def is_whole(self, name: str) -> bool:
        """Whether the places of a file match their checksum."""
        return _check_of(self.places(name)) == self._header.checks[self._number[name]]

    def table(self, name: str) -> FileTable:
        """Entry and places of a file."""
        return FileTable(self.entries[name], self.places(name).tobytes())


class ScannedFiles:
    """Files that were scanned just now: what a `PlaceIndex` says of them, without one being written."""

    def __init__(self, tables: list[FileTable]) -> None:
        self._tables = {table.entry.name: table for table in tables}
        self.entries = {name: table.entry for name, table in self._tables.items()}

    def places(self, name: str) -> Places:
        """The places of a file: uint64 (any,)."""
        return self._tables[name].array()

    def is_whole(self, name: str) -> bool:
        """True: nothing was written that could be damaged."""
        return True

    def table(self, name: str) -> FileTable:
        """Entry and places of a file."""
        return self._tables[name]


def write_place_index(path: Path, kind: str, tables: list[FileTable]) -> None:
    """Writes the index of these files, in this order, in one step."""
    arrays = [table.array() for table in tables]
    header = _Header(kind, [table.entry for table in tables], list(map(len, arrays)), list(map(_check_of, arrays)))
    encoded = msgspec.msgpack.encode(header)
    begin = len(encoded).to_bytes(8, "little") + encoded
    begin += bytes(-(16 + len(begin)) % _ALIGN)
    digest = xxh3_64_intdigest(begin).to_bytes(8, "little")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [_MAGIC, digest, begin, *(table.places for table in tables)])


def _check_of(places: Places) -> int:
    return xxh3_64_intdigest(places.tobytes())


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(path: Path, view: memoryview, kind: str) -> tuple[_Header, int]:
    length = int.from_bytes(view[16:24], "little")
    end = 24 + length + -(24 + length) % _ALIGN
    if bytes(view[:8]) != _MAGIC or end > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    if xxh3_64_intdigest(view[16:end]) != int.from_bytes(view[8:16], "little"):
        raise ShardError(f"{path}: the index is damaged: its checksum does not match")
    try:
        header = msgspec.msgpack.decode(view[24 : 24 + length], type=_Header)
    except msgspec.DecodeError as error:
        raise ShardError(f"{path}: the index is damaged: {error}") from error
    if header.kind != kind or not len(header.entries) == len(header.counts) == len(header.checks):
        raise ShardError(f"{path}: the index is damaged: its header does not fit itself")
    outside = next((entry.name for entry in header.entries if not is_inside(entry.name)), None)
    if outside is not None:
        raise ShardError(f"{path}: the index is damaged: it names {outside!r}, which lies outside of the dataset")
    return header, end
