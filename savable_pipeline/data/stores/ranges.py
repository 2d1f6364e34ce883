"""Ranges of long files that the rows of tables name: file, from, to; the files lie beside the tables.

    corpus/train.parquet    path "wav/a.wav", start 12.5, end 14.0
    corpus/wav/a.wav        an entry of the same index, without samples: pinned and verified like a shard

A row chooses among the files of the dataset, by a path from its table's folder on; nothing that it says opens others.
"""

from __future__ import annotations

import posixpath
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Collection
from typing import Any, BinaryIO

import msgspec
from xxhash import xxh3_64

from savable_pipeline.data.shards.file_bytes import FileBytes
from savable_pipeline.data.shards.index_file import ShardIndex, ShardTable
from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.file_store import FileStore
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.member_file import RangeFile, SpanFile
from savable_pipeline.errors import ShardError

_SEEN = 1 << 16  # bytes that are compared of the begin, the middle and the end of a file


class MediaRange(msgspec.Struct, frozen=True):
    """A range of a file: its path as the row says it, and seconds; `end_s` None is the file's end."""

    path: str
    begin_s: float = 0.0
    end_s: float | None = None


def read_media(file: FileBytes, name: str) -> ShardTable:
    """The entry of a file that rows name ranges of."""
    return ShardTable(ShardEntry(name, file.size, 0, _digest(file)), b"")


def is_media_as_indexed(file: FileBytes, index: ShardIndex, number: int) -> bool:
    """Whether the begin, the middle and the end of a file are what they were."""
    return _digest(file) == int(index.shards.digests[number])


def _digest(file: FileBytes) -> int:
    digest = xxh3_64()
    places = [(max(0, file.size - _SEEN) * half // 2, _SEEN) for half in range(3)]
    file.expect(places)
    for offset, size in places:
        digest.update(file.read(offset, size))
    return digest.intdigest()


class RangedRows(FileStore):
    """What stores have whose rows name ranges: `range_parts`, whose bytes are what the row says, as JSON.

    `open` gives the whole file, with the seconds. Raises `ShardError` for a file that is not one of the dataset's.
    """

    all_used = False  # of long files
    range_parts: Collection[str] = ()

    def __init__(self, found: IndexedFiles, **settings: Any) -> None:
        self._inside: set[int] = set()  # files that are no links out of the dataset
        super().__init__(found, **settings)

    @abstractmethod
    def media_range(self, shard: int, row: int, part: str) -> MediaRange | None:
        """The range that is a part of a row; None where the row has none. Raises `ShardError`."""

    def base(self, shard: int) -> str:
        """The folder that the paths in a table are relative to, from the dataset's folder on."""
        return posixpath.dirname(self.entries.names[shard])

    def extensions(self, shard: int, row: int) -> list[str]:
        """The parts of the table, then the ranges."""
        plain = super().extensions(shard, row)  # type: ignore[safe-super]  # a store of tables comes next
        named = [part for part in self.range_parts if self.media_range(shard, row, part) is not None]
        return [*(name for name in plain if name not in self.range_parts), *named]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`; of a range, path and seconds."""
        part = self._part(extension)
        if part is None:
            return super().read(shard, row, extension)  # type: ignore[safe-super]
        return msgspec.json.encode(self._range(shard, row, part))

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        """See `RecordStore.open`; of a range, the whole file."""
        part = self._part(extension)
        if part is None:
            return super().open(shard, row, extension)
        found = self._range(shard, row, part)
        number = self.file_named(shard, row, found.path)
        size, read_on = int(self.entries.sizes[number]), self.files.read_on
        file = SpanFile(lambda offset, wanted: read_on(number, offset, wanted, size), 0, size)
        return RangeFile(file, found.begin_s, found.end_s)

    def file_named(self, shard: int, row: int, path: str) -> int:
        """The number of the file that a row names. Raises `ShardError` for all that is not of the dataset."""
        name = posixpath.normpath(posixpath.join(self.base(shard), path))
        number = bisect_left(self.entries.names, name)
        fault = ""
        if "://" in path:
            fault = "a URL, which no row may name: put the file beside the table"
        elif not is_inside(path):
            fault = "a path that leads out of the table's folder: put the file below it"
        elif number == len(self.entries) or self.entries.names[number] != name:
            fault = "it is none of the dataset's files: put it there, or name the folder of both to the reader"
        elif self._is_outside(number):
            fault = "a link that leads out of the dataset's folder: put the file itself there, by `cp -L`"
        if fault:
            raise ShardError(
                f"{self.place(shard)}: row {row}: names {path!r}: {fault}", reason="no file of the dataset"
            )
        return number

    def checked_range(self, shard: int, row: int, path: str, begin_s: float | None, end_s: float | None) -> MediaRange:
        """The range, if it can be one. Raises `ShardError`."""
        begin_s = begin_s or 0.0
        if not 0 <= begin_s < (float("inf") if end_s is None else end_s):
            raise self.no_range(shard, row, f"{path!r} from {begin_s} s to {end_s} s")
        return MediaRange(path, begin_s, end_s)

    def no_range(self, shard: int, row: int, what: str) -> ShardError:
        """The error for a row whose range cannot be one."""
        return self.damaged(shard, f"row {row}", f"no range of a file: {what}", reason="malformed range")

    def _is_outside(self, number: int) -> bool:
        if self.files.behind_url or number in self._inside:
            return False
        if not self.files.path(number).resolve().is_relative_to(self.found.root.resolve()):
            return True
        self._inside.add(number)
        return False

    def _part(self, extension: str) -> str | None:
        if extension in self.range_parts:
            return extension
        return next((part for part in self.range_parts if part.lower() == extension.lower()), None)

    def _range(self, shard: int, row: int, part: str) -> MediaRange:
        found = self.media_range(shard, row, part)
        if found is None:
            raise KeyError(f"no part {part!r}: the row names no file")
        return found
