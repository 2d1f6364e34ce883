"""Ranges of long files, which rows of a table name by file, start and end.

    corpus/train.parquet    path "wav/a.wav", start 12.5, end 14.0
    corpus/wav/a.wav        an entry of the same index, without samples: pinned and verified like a shard

A row chooses among the files of the dataset, by a path relative to its table's folder. It cannot open other files.
`RangedRows` is the base of stores of tables with rows that name ranges: `RangedTable` of Parquet, Arrow and JSONL by
columns, and LeRobot's store (lerobot.py).
"""

from __future__ import annotations

import dataclasses
import posixpath
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from typing import Any, BinaryIO, TypeAlias

import msgspec
from xxhash import xxh3_64

from savable_pipeline.data.shards.byte_source import ByteSource, RangeFile
from savable_pipeline.data.shards.index import Format, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, VIDEO_PARTS
from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.record_store import FileStore, hash_some
from savable_pipeline.errors import ShardError

# by part: the columns of path, start and end
RangeColumns: TypeAlias = Mapping[str, tuple[str, str | None, str | None]]
_SAMPLED = 1 << 16  # bytes to compare at each of the start, the middle and the end of a file
_SUFFIXES = tuple(f".{name}" for name in (*AUDIO_PARTS, *VIDEO_PARTS))  # of the files that rows name


class MediaRange(msgspec.Struct, frozen=True):
    """Range of a file from `begin_s` to `end_s`, in seconds.

    `path` is as in the row. An `end_s` of None is the end of the file.
    """

    path: str
    begin_s: float = 0.0
    end_s: float | None = None


def _digest(file: ByteSource) -> int:
    """Return a hash of bytes at the start, the middle and the end of a file of which rows name ranges."""
    return hash_some(xxh3_64(), file, _SAMPLED, 2)


class RangedRows(FileStore):
    """Rows with parts that are ranges of other files.

    The bytes of such a part are the result of `range_of`, as JSON. `open` returns the whole file, with the start and
    the end of the range in seconds. A class derives from this class first, and then from the store of the table.
    """

    base: str | None = None  # the folder that paths are relative to; None means that of the table
    last_parts: Collection[str] = ()  # parts to list after all others

    @abstractmethod
    def range_of(self, shard: int, row: int, part: str) -> MediaRange | None:
        """Return the range of a part of a row, or None. Raises `ShardError`."""

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return the parts of the table, then the ranges, then `last_parts`."""
        named = [part for part in self.range_parts if self.range_of(shard, row, part) is not None]
        plain = [part for part in super().extensions(shard, row) if part not in self.range_parts]  # type: ignore[safe-super]
        return [*(part for part in plain if part not in self.last_parts), *named, *self.last_parts]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`. The bytes of a range are its path and seconds."""
        if (part := self._range_part(extension)) is None:
            return super().read(shard, row, extension)  # type: ignore[safe-super]
        return msgspec.json.encode(self._existing_range(shard, row, part))

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        """See `RecordStore.open`. For a range, the result is the whole file."""
        if (part := self._range_part(extension)) is None:
            return super().open(shard, row, extension)
        found = self._existing_range(shard, row, part)
        number = self.file_named(shard, row, found.path)
        size, read_ahead = int(self.entries.sizes[number]), self.files.read_ahead
        source = ByteSource(lambda offset, wanted: read_ahead(number, offset, wanted, size), size)
        return RangeFile(source, found.begin_s, found.end_s, getattr(found, "fps", None))

    def file_named(self, shard: int, row: int, path: str) -> int:
        """Return the number of the file that a row names.

        Raises `ShardError` for a file outside of the dataset.
        """
        names = self.entries.names
        base = posixpath.dirname(names[shard]) if self.base is None else self.base
        name = posixpath.normpath(posixpath.join(base, path))
        number = bisect_left(names, name)
        why = ""
        if "://" in path:
            why = "a URL. Put the file beside the table"
        elif not is_inside(path):
            why = "a path that leads out of the table's folder. Put the file below it"
        elif number == len(names) or names[number] != name:
            why = "not a file of the dataset. Put it there, or read the folder of both"
        elif self._is_outside(number):
            why = "a link that leads out of the dataset's folder. Put the file itself there, by `cp -L`"
        if why:
            raise ShardError(f"{self.where(shard)}: row {row}: names {path!r}: {why}", reason="no file of the dataset")
        return number

    def _is_outside(self, number: int) -> bool:
        """Return whether a file is a link that leads out of the dataset's folder."""
        files, root = self.files, self.found.root
        if files.is_remote or number in self._inside:
            return False
        if not files.path(number).resolve().is_relative_to(root.resolve()):
            return True
        self._inside.add(number)
        return False

    @cached_property
    def _inside(self) -> set[int]:
        """Return the numbers of the files that were found to be inside the dataset's folder."""
        return set()

    def _range_part(self, extension: str) -> str | None:
        if extension in self.range_parts:
            return extension
        return next((part for part in self.range_parts if part.lower() == extension.lower()), None)

    def _existing_range(self, shard: int, row: int, part: str) -> MediaRange:
        """Return the range of a part. Raises KeyError if the row names no file."""
        if (found := self.range_of(shard, row, part)) is None:
            raise KeyError(f"no part {part!r}: the row names no file")
        return found


def checked_range(
    store: FileStore, shard: int, row: int, path: str, begin_s: float | None, end_s: float | None
) -> MediaRange:
    """Return the range that a row of a table names.

    Raises `ShardError` if it is invalid.
    """
    begin_s = begin_s or 0.0
    if not 0 <= begin_s < (float("inf") if end_s is None else end_s):
        raise _range_error(store, shard, row, f"{path!r} from {begin_s} s to {end_s} s")
    return MediaRange(path, begin_s, end_s)


def _range_error(store: FileStore, shard: int, row: int, reason: str) -> ShardError:
    """Return the error for a row with an invalid range."""
    return store.damaged(shard, f"row {row}", f"no range of a file: {reason}", reason="malformed range")


class RangedTable(RangedRows):
    """Rows with columns or fields for path, start and end of each of the `ranges`.

    None stands for the start and the end of a file. A null path means no range. Raises ValueError for a column of
    `ranges` that the first file lacks.
    """

    all_used = False  # an epoch only reads ranges of the files

    def __init__(self, found: IndexedFiles, *, ranges: RangeColumns, **settings: Any) -> None:
        self._ranges, self.range_parts = ranges, tuple(ranges)
        used = tuple(name for columns in ranges.values() for name in columns if name is not None)
        if settings.get("columns") is not None:
            settings["columns"] = tuple(dict.fromkeys([*settings["columns"], *used]))
        super().__init__(found, needed=used, **settings)  # type: ignore[call-arg]  # of the table that follows

    def range_of(self, shard: int, row: int, part: str) -> MediaRange | None:
        """See `RangedRows.range_of`."""
        columns = self._ranges[part]
        path, begin, end = (None if name is None else self._field_value(shard, row, name) for name in columns)
        if path is None:
            return None
        try:
            seconds = [None if each is None else msgspec.json.decode(each, type=float) for each in (begin, end)]
            return checked_range(self, shard, row, path.decode(), *seconds)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _range_error(self, shard, row, f"{part!r}: {error}") from error

    def _field_value(self, shard: int, row: int, name: str) -> bytes | None:
        try:
            return self.value(shard, row, name)
        except KeyError:
            raise _range_error(self, shard, row, f"{name!r}, which ranges= names, is not there") from None


def with_media(form: Format, media: tuple[str, ...] = _SUFFIXES, *, samples_below: str = "", **changes: Any) -> Format:
    """Return the format of folders of tables with the files that their rows name.

    With `samples_below`, only the rows of tables below that folder are samples.
    """
    return dataclasses.replace(
        form,
        suffixes=(*form.suffixes, *media),
        read=partial(_read_table_or_media, form, samples_below),
        is_same=partial(_is_unchanged, form),
        **changes,
    )


def _read_table_or_media(form: Format, samples_below: str, file: ByteSource, name: str) -> ShardTable:
    if not form.has(name):
        return ShardTable(ShardEntry(name, file.size, 0, _digest(file)), b"")
    table = form.read(file, name)
    if not name.startswith(samples_below):
        table.entry = msgspec.structs.replace(table.entry, samples=0)
    return table


def _is_unchanged(form: Format, file: ByteSource, index: ShardIndex, number: int) -> bool:
    if form.has(index.shards.names[number]):
        return form.matches_index(file, index, number)
    return _digest(file) == int(index.shards.digests[number])
