"""Columns of images, audio and films, as HF `datasets` writes them: structs of `bytes` and `path`, and lists of these.

{bytes, path}                       the bytes; the part is named by the path's extension: png
a list of them                      a part for each: 0.png, 1.png, …
{bytes: null, path}                 the file lies elsewhere: a `NamedFile`, and no part
bytes, in the column `image`        a part as if they had no path, if they begin as an image does; else as they are

Bytes and paths may be of Arrow's view types, as Polars writes them, and one of the two of none where all are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from savable_pipeline.core.file_heads import media_of
from savable_pipeline.data.shards.part_types import IMAGE_PARTS
from savable_pipeline.data.stores.arrow_columns import (
    NUMBERS,
    OFFSETS,
    BrokenColumnError,
    BytesColumn,
    NumberColumn,
    Unread,
    Validity,
    ValueColumn,
)

_LONGEST_EXTENSION = 8
_BYTES = ("binary", "large_binary", "binary_view", "null")
_PATHS = ("string", "large_string", "string_view", "null")
_IMAGES = ("image", "img", "image_bytes")  # names of columns of bytes, in small letters
_MEDIA = frozenset(("jpg", "png", "gif", "bmp", "tiff", "flac", "ogg", "mp3", "webp", "wav"))  # that have no path


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that a row names by a path, without its bytes: `part` would be its name, "" where the path tells none."""

    column: str
    path: str
    part: str


class MediaColumn:
    """A column of structs of `bytes` and `path`, such as images, or of bytes alone."""

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        self._bare = not pa.types.is_struct(array.type)
        data, paths = (array, None) if self._bare else (array.field("bytes"), array.field("path"))
        self._validity, self._paths = Validity(array), _bytes_column(paths, len(array), unread)
        self._rows = min(len(array), self._paths.rows)
        self._bytes = _bytes_column(data, self._rows, unread)

    def value(self, row: int) -> bytes | None:
        """The bytes of a row; None for null. Raises `BrokenColumnError`."""
        return self._bytes.value(row) if self._validity.of(row) else None

    def has_part(self, row: int) -> bool:
        """Whether `value` is not None, without its bytes. Raises `BrokenColumnError`."""
        return self._validity.of(row) and self._bytes.has_part(row)

    def is_null(self, row: int) -> bool:
        """Whether a row has no bytes. Raises `BrokenColumnError`."""
        return not (self._validity.of(row) and self._bytes.validity.of(row))

    def extension(self, row: int) -> str:
        """The extension of a row's path, or what the bytes begin like; "bin" if neither says it, "" of bytes alone."""
        extension = extension_of((self._paths.value(row) or b"").decode(errors="replace"))
        if extension:
            return extension
        found = media_of(self._bytes.head(row, 12), _MEDIA)
        return "" if self._bare and found not in IMAGE_PARTS else found

    @cached_property
    def named(self) -> NDArray[np.int64]:
        """The rows that have a path and no bytes."""
        nulls = self._bytes.validity.nulls(self._rows)
        if nulls.any():
            nulls &= ~self._validity.nulls(self._rows) & ~self._paths.validity.nulls(self._rows)
        return np.array([row for row in np.flatnonzero(nulls).tolist() if self._has_path(row)], np.int64)

    def file(self, row: int) -> str | None:
        """The path of a row that has no bytes; None of any other."""
        place = int(np.searchsorted(self.named, row))
        return self._path(row) if place < len(self.named) and self.named[place] == row else None

    def _has_path(self, row: int) -> bool:
        try:
            return bool(self._path(row))
        except BrokenColumnError:  # raised by `file`, when the row is read
            return True

    def _path(self, row: int) -> str:
        return (self._paths.value(row) or b"").decode(errors="replace")


class MediaListColumn:
    """A column of lists of structs of `bytes` and `path`. Raises `BrokenColumnError`."""

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        self._first, self._validity = array.offset, Validity(array)
        self.items = MediaColumn(array.values, unread)
        self._count = len(array.values)
        self._each = array.type.list_size if pa.types.is_fixed_size_list(array.type) else 0
        if not self._each:
            kind = "q" if pa.types.is_large_list(array.type) else "i"
            offsets = array.buffers()[1]
            raw = memoryview(b"" if offsets is None else offsets).cast("B")
            size = 8 if kind == "q" else 4
            self._offsets = raw[: len(raw) // size * size].cast(kind)  # type: ignore[call-overload]
        there = self._count // self._each if self._each else len(self._offsets) - 1
        self._rows = min(len(array), there - self._first)

    def value(self, row: int) -> None:
        """None: a list is no part by itself."""

    def has_part(self, row: int) -> bool:
        """False, for that."""
        return False

    def places(self, row: int) -> range:
        """Where the elements of a row lie in `items`; none for null."""
        if not self._validity.of(row):
            return range(0)
        row += self._first
        try:
            begin, end = (
                (row * self._each, (row + 1) * self._each)
                if self._each
                else (self._offsets[row], self._offsets[row + 1])
            )
        except IndexError:
            raise BrokenColumnError(f"row {row} lies outside of its column") from None
        if not 0 <= begin <= end <= self._count:
            raise BrokenColumnError(f"row {row} is said to be the elements {begin} to {end} of {self._count}")
        return range(begin, end)

    def is_null(self, row: int) -> bool:
        """Whether a row is null, and not a list."""
        return not self._validity.of(row)

    @cached_property
    def named(self) -> NDArray[np.int64]:
        """The rows with an element that has a path and no bytes."""
        if not len(self.items.named):
            return self.items.named
        return np.array([row for row in range(self._rows) if self._names_files(row)], np.int64)

    def _names_files(self, row: int) -> bool:
        try:
            return any(self.items.file(place) is not None for place in self.places(row))
        except BrokenColumnError:  # raised when the row is read
            return True


def _bytes_column(array: Any, rows: int, unread: Unread | None) -> BytesColumn:
    """The column of bytes or of paths; of a type without values, in a file in which no row has any, so many nulls."""
    if array is None or pa.types.is_null(array.type):
        array = pa.nulls(rows, pa.binary())
    return BytesColumn(array, unread)


Column = BytesColumn | NumberColumn | ValueColumn | MediaColumn | MediaListColumn


def column_of(name: str, array: Any, unread: Unread | None = None) -> Column:
    """The column of this name that reads this array, of whose values some may be `unread`."""
    if is_media(array.type) or _is_image(name, array.type):
        return MediaColumn(array, unread)
    if str(array.type) in OFFSETS or array.type in (pa.string_view(), pa.binary_view()):
        return BytesColumn(array, unread)
    if str(array.type) in NUMBERS:
        return NumberColumn(array)
    if is_media_list(array.type):
        return MediaListColumn(array, unread)
    return ValueColumn(array, unread)


def holds_media(field: Any) -> bool:
    """Whether a column of a schema holds images, audio or films, or lists of them."""
    return is_media(field.type) or is_media_list(field.type) or _is_image(field.name, field.type)


def _is_image(name: str, kind: Any) -> bool:
    """Whether a column holds the bytes of images, by its name."""
    return name.lower() in _IMAGES and str(kind) in _BYTES[:-1]


def is_media(kind: Any) -> bool:
    """Whether a type is a struct of `bytes` and `path`, and of nothing else."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    fields = _fields(kind)
    known = fields.get("bytes") in _BYTES and fields.get("path") in _PATHS
    return known and set(fields.values()) != {"null"}


def _fields(kind: Any) -> dict[str, str]:
    return {kind.field(i).name: str(kind.field(i).type) for i in range(kind.num_fields)}


def is_media_list(kind: Any) -> bool:
    """Whether a type is a list of structs of `bytes` and `path`."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(lists and is_media(kind.value_type))


def extension_of(path: str) -> str:
    """The extension of a path; "" without one that could be the name of a part."""
    extension = path.rpartition(".")[2] if "." in path.rpartition("/")[2] else ""
    return extension if extension.isalnum() and len(extension) <= _LONGEST_EXTENSION else ""
