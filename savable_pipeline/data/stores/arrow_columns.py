"""The values of Arrow columns as the bytes of parts.

Buffers from files are not trusted: each access is bounded.

    string, binary                      their bytes
    numbers                             JSON, or an array of one number
    lists of numbers, of one length per dimension     JSON, or an array; Arrow's fixed-shape tensors likewise
    other lists, other structs, dates, …      JSON; times and durations are built from their integers, times in UTC
    null                                the sample has no such part

Images, audio and videos are structs of `bytes` and `path`, as HF `datasets` writes them, or lists of these:

    {bytes, path}                       the bytes; the part is named by the path's extension: png
    a list of them                      a part for each: 0.png, 1.png, …
    {bytes: null, path}                 the file is elsewhere: a `NamedFile`, and no part
    bytes, in the column `image`        a part as if without a path if they start like an image, else unchanged

Bytes and paths may have Arrow's view types, as Polars writes them. One of the two may have the null type.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from struct import calcsize
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from savable_pipeline.core.file_heads import media_of
from savable_pipeline.data.shards.part_types import IMAGE_PARTS, as_part, find_part

OFFSETS = {"string": "i", "binary": "i", "large_string": "q", "large_binary": "q"}
NUMBER_FORMATS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float": "f", "double": "d"}
NUMBER_FORMATS |= {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}
_LONGEST_EXTENSION = 8
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
T = TypeVar("T")
_BYTES = ("binary", "large_binary", "binary_view", "null")  # types of `bytes` in a struct
_PATHS = ("string", "large_string", "string_view", "null")  # types of `path` in a struct
_IMAGES = ("image", "img", "image_bytes")  # lower-case names of columns of image bytes
# formats detected by their first bytes, for media without a path
_MEDIA = frozenset(("jpg", "png", "gif", "bmp", "tiff", "flac", "ogg", "mp3", "webp", "wav"))


class BrokenColumnError(ValueError):
    """Error for a column whose buffers contradict its type."""


def _number_view(buffer: Any, kind: str) -> memoryview[Any]:
    """Return the numbers in a buffer, which may be None, by their type code `kind`."""
    raw = memoryview(b"" if buffer is None else buffer).cast("B")
    found: memoryview[Any] = raw[: len(raw) // calcsize(kind) * calcsize(kind)].cast(kind)  # type: ignore[call-overload]
    return found


_JSON: Any = getattr(pa, "JsonType", ())  # pyarrow 19 and later


class Validity:
    """Validity bits of an array, one per row.

    Arrow's own check of a row would also follow the row's offsets, which are not trusted.
    """

    def __init__(self, array: Any) -> None:
        bits = array.buffers()[0]
        self._first, self._bits = array.offset, None if bits is None else memoryview(bits)

    @property
    def has_nulls(self) -> bool:
        """Return whether a row may be null."""
        return self._bits is not None

    def is_valid(self, row: int) -> bool:
        """Return whether a row is not null. Raises `BrokenColumnError`."""
        if self._bits is None:
            return True
        row += self._first
        try:
            return bool(self._bits[row >> 3] >> (row & 7) & 1)
        except IndexError:
            raise BrokenColumnError(f"row {row} is outside its column") from None

    def nulls(self, count: int) -> NDArray[np.bool_]:
        """Return which of the first `count` rows are null: bool (count,).

        Rows without a validity bit count as not null.
        """
        found = np.zeros(count, np.bool_)
        if self._bits is not None:
            used = np.frombuffer(self._bits, np.uint8)[: (self._first + count + 7) // 8]
            bits = np.unpackbits(used, bitorder="little")[self._first : self._first + count]
            found[: len(bits)] = bits == 0
        return found


class Unread(Protocol):
    """Source of the values of arrays that are partly not in memory."""

    def reader(self, buffer: Any, /) -> Callable[[int, int], bytes] | None:
        """Return a function of (begin, end) that reads these bytes of a buffer, or None.

        It is None for a buffer in memory.
        """

    def rows(self, array: Any, first: int, count: int, /) -> Any:
        """Return `count` rows from `first` on, with all values of nested arrays.

        The array must be valid except for unread values. Raises `ShardError`.
        """


class BytesColumn:
    """Column of strings or bytes: a view of its buffers, which reads values on access.

    Raises `BrokenColumnError`.
    """

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        if array.type in (pa.string_view(), pa.binary_view()):
            try:
                array.validate(full=True)  # Validate before Arrow follows the views, because they may point anywhere.
            except pa.ArrowException as error:
                raise BrokenColumnError(str(error)) from error
            array = array.cast(pa.large_binary())
        _, offsets, data = array.buffers()
        self._first, self.validity = array.offset, Validity(array)
        self._has_nulls = self.validity.has_nulls
        self._offsets, self._data = _number_view(offsets, OFFSETS[str(array.type)]), _number_view(data, "B")
        self._read = None if unread is None else unread.reader(data)
        self.rows = max(0, len(self._offsets) - 1 - self._first)  # rows that the offsets buffer covers

    def value(self, row: int) -> bytes | None:
        """Return the bytes of a row, or None for null. Raises `BrokenColumnError`."""
        if (byte_range := self._byte_range(row)) is None:
            return None
        begin, end = byte_range
        return self._data[begin:end].tobytes() if self._read is None else self._read(begin, end)

    def head(self, row: int, size: int) -> bytes:
        """Return at most `size` first bytes of a row, which are none for null.

        Raises `BrokenColumnError`.
        """
        begin, end = self._byte_range(row) or (0, 0)
        end = min(end, begin + size)
        return self._data[begin:end].tobytes() if self._read is None else self._read(begin, end)

    def has_part(self, row: int) -> bool:
        """Return whether a row has a value.

        Raises `BrokenColumnError`.
        """
        return self._byte_range(row) is not None

    def _byte_range(self, row: int) -> tuple[int, int] | None:
        """Return where the bytes of a row start and end, or None for null. Raises `BrokenColumnError`."""
        if self._has_nulls and not self.validity.is_valid(row):
            return None
        row += self._first
        try:
            begin, end = self._offsets[row], self._offsets[row + 1]
        except IndexError:
            raise BrokenColumnError(f"row {row} is outside its column") from None
        if not 0 <= begin <= end <= len(self._data):
            raise BrokenColumnError(f"row {row} spans bytes {begin} to {end} of {len(self._data)}")
        return begin, end


class NumberColumn:
    """Column of numbers: a view of its buffer, which reads values on access."""

    def __init__(self, array: Any) -> None:
        _, data = array.buffers()
        self._first, self._validity = array.offset, Validity(array)
        self._has_nulls = self._validity.has_nulls
        self._values = _number_view(data, NUMBER_FORMATS[str(array.type)])

    def value(self, row: int) -> bytes | None:
        """Return the value of a row as JSON, or None for null. Raises `BrokenColumnError`."""
        if self._has_nulls and not self._validity.is_valid(row):
            return None
        row += self._first
        try:
            return as_part(self._values[row])
        except IndexError:
            raise BrokenColumnError(f"row {row} is outside its column") from None

    def array(self, row: int) -> NDArray[Any]:
        """Return the value of a row that is not null, as an array of the shape ()."""
        return np.array(self._values[self._first + row], self._values.format)

    def has_part(self, row: int) -> bool:
        """Return whether a row has a value. Raises `BrokenColumnError`."""
        return self.value(row) is not None


class ValueColumn:
    """A column of any other type, whose values become JSON."""

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        self._array, self._unread = array, unread
        self._checked = False
        self._converts = not isinstance(array.type, _JSON) and _needs_conversion(array.type)

    def value(self, row: int) -> bytes | None:
        """Return the value of a row: strings and bytes unchanged, others as JSON, or None.

        Raises `BrokenColumnError`.
        """
        if not self._converts:
            return as_part(self._call_with_row(row, lambda rows: rows[0].as_py()))
        found = self._call_with_row(row, lambda rows: plain_value(rows[0]))
        return f'"{found}"'.encode() if isinstance(found, str) else as_part(found)

    def array(self, row: int) -> NDArray[Any]:
        """Return the numbers of a row that is not null: (any, …) of their type.

        Raises `BrokenColumnError`, TypeError.
        """
        return self._call_with_row(row, _numbers_of)

    def _call_with_row(self, row: int, call: Callable[[Any], T]) -> T:
        """Return the result of `call` for an array of this row alone. Raises `BrokenColumnError`."""
        try:
            if not self._checked:
                self._array.validate(full=True)
                self._checked = True
            if not 0 <= row < len(self._array):
                raise IndexError("outside its column")
            return call(self._array.slice(row, 1) if self._unread is None else self._unread.rows(self._array, row, 1))
        except (pa.ArrowException, IndexError, ValueError, OverflowError) as error:
            raise BrokenColumnError(f"row {row}: {error}") from error

    def has_part(self, row: int) -> bool:
        """Return whether a row has a value. Raises `BrokenColumnError`."""
        return self._call_with_row(row, lambda rows: not rows.null_count)


def _numbers_of(rows: Any) -> NDArray[Any]:
    """Return the numbers of a one-row array, with one dimension per level of lists. Raises TypeError."""
    shape, axes = [1], [0]
    while _is_list((lists := getattr(rows, "storage", rows)).type) and not rows.null_count:
        lengths = {len(each) for each in lists} or {0}
        if len(lengths) > 1:
            raise TypeError("lists of several lengths")
        sizes, order = _tensor_axes(rows.type) or (lengths, [0])
        axes += [len(axes) + axis for axis in order]
        shape += sizes
        rows = lists.flatten()
    kind = rows.type
    if rows.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise TypeError("a null among its numbers" if rows.null_count else f"of the type {kind}")
    found: NDArray[Any] = rows.to_numpy(zero_copy_only=False).reshape(shape).transpose(axes)[0]
    return found


def _tensor_axes(kind: Any) -> tuple[list[int], list[int]] | None:
    """Return the stored shape and the order of axes of a tensor type, or None.

    Raises ValueError for an order that differs from its inverse: pyarrow writes the inverse of what it reads.
    """
    if not isinstance(kind, pa.FixedShapeTensorType):
        return None
    order = kind.permutation or list(range(len(kind.shape)))
    if any(order[order[axis]] != axis for axis in range(len(order))):
        raise ValueError(f"tensors with the permutation {order}, which pyarrow swaps. Write them without a permutation")
    return kind.shape, order


def _needs_conversion(kind: Any) -> bool:
    """Return whether a type contains times, JSON or tensors.

    pyarrow returns times as pandas objects, JSON as strings and tensors as flat lists.
    """
    if kind.num_fields:
        return any(_needs_conversion(kind.field(i).type) for i in range(kind.num_fields))
    timed = pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind)
    return bool(timed or isinstance(kind, (_JSON, pa.FixedShapeTensorType)))


def plain_value(value: Any) -> Any:
    """Return a value for JSON, or raise ValueError.

    Times become ISO 8601 in UTC, durations seconds, and tensors nested lists. JSON in strings is parsed.
    """
    kind = value.type
    if not value.is_valid or not _needs_conversion(kind):
        return value.as_py()
    if isinstance(kind, _JSON):
        return json.loads(value.as_py())
    if tensor := _tensor_axes(kind):
        shape, axes = tensor
        return np.array(value.as_py(), object).reshape(shape).transpose(axes).tolist()
    if pa.types.is_duration(kind):
        return value.value / _UNITS[kind.unit]
    if pa.types.is_struct(kind):
        return {kind.field(i).name: plain_value(value[i]) for i in range(kind.num_fields)}
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        day, _, time = str(np.datetime64(value.value, kind.unit)).partition("T")
        seconds, _, fraction = time.partition(".")
        fraction = fraction.ljust(6, "0") if fraction.rstrip("0") else ""
        time = f"{seconds}.{fraction.removesuffix('000') if len(fraction) > 6 else fraction}" if fraction else seconds
        return time if pa.types.is_time(kind) else f"{day}T{time}{'+00:00' if kind.tz else ''}"
    if pa.types.is_map(kind):
        return [(plain_value(each["key"]), plain_value(each["value"])) for each in value.values]
    return [plain_value(each) for each in value.values]


@dataclass(frozen=True, slots=True)
class NamedFile:
    """File that a row names by a path, without its bytes.

    `part` is the name that the part would have, "" for a path without extension.
    """

    column: str
    path: str
    part: str


class MediaColumn:
    """Column of media such as images: structs of `bytes` and `path`, or only bytes."""

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        self._is_bytes_only = not pa.types.is_struct(array.type)
        data, paths = (array, None) if self._is_bytes_only else (array.field("bytes"), array.field("path"))
        self._validity, self._paths = Validity(array), _bytes_column(paths, len(array), unread)
        self._rows = min(len(array), self._paths.rows)
        self._bytes = _bytes_column(data, self._rows, unread)

    def value(self, row: int) -> bytes | None:
        """Return the bytes of a row, or None for null. Raises `BrokenColumnError`."""
        return self._bytes.value(row) if self._validity.is_valid(row) else None

    def has_part(self, row: int) -> bool:
        """Return whether a row has bytes.

        Raises `BrokenColumnError`.
        """
        return self._validity.is_valid(row) and self._bytes.has_part(row)

    def is_null(self, row: int) -> bool:
        """Return whether a row has no bytes. Raises `BrokenColumnError`."""
        return not (self._validity.is_valid(row) and self._bytes.validity.is_valid(row))

    def extension(self, row: int) -> str:
        """Return the extension of a row's path, or the one detected from its first bytes.

        The result is "bin" if neither is known, and "" for a column of only bytes.
        """
        extension = extension_of((self._paths.value(row) or b"").decode(errors="replace"))
        if extension:
            return extension
        found = media_of(self._bytes.head(row, 12), _MEDIA)
        return "" if self._is_bytes_only and found not in IMAGE_PARTS else found

    @cached_property
    def path_rows(self) -> NDArray[np.int64]:
        """Return the rows that have a path and no bytes."""
        nulls = self._bytes.validity.nulls(self._rows)
        if nulls.any():
            nulls &= ~self._validity.nulls(self._rows) & ~self._paths.validity.nulls(self._rows)
        return np.array([row for row in np.flatnonzero(nulls).tolist() if self._has_path(row)], np.int64)

    def file(self, row: int) -> str | None:
        """Return the path of a row without bytes, or None for any other row."""
        position = int(np.searchsorted(self.path_rows, row))
        has_only_path = position < len(self.path_rows) and self.path_rows[position] == row
        return self._path(row) if has_only_path else None

    def _has_path(self, row: int) -> bool:
        try:
            return bool(self._path(row))
        except BrokenColumnError:  # `file` raises this error when the row is read
            return True

    def _path(self, row: int) -> str:
        return (self._paths.value(row) or b"").decode(errors="replace")


class MediaListColumn:
    """Column of lists of structs of `bytes` and `path`. Raises `BrokenColumnError`."""

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        self._first, self._validity = array.offset, Validity(array)
        self.items = MediaColumn(array.values, unread)
        self._count = len(array.values)
        self._list_size = array.type.list_size if pa.types.is_fixed_size_list(array.type) else 0  # 0 if it varies
        if not self._list_size:
            self._offsets = _number_view(array.buffers()[1], "q" if pa.types.is_large_list(array.type) else "i")
        available = self._count // self._list_size if self._list_size else len(self._offsets) - 1
        self._rows = min(len(array), available - self._first)

    def value(self, row: int) -> None:
        """Return None, because a list is not a part by itself."""

    def has_part(self, row: int) -> bool:
        """Return False, because a list is not a part by itself."""
        return False

    def elements(self, row: int) -> range:
        """Return the range of a row's elements in `items`, which is empty for null."""
        if not self._validity.is_valid(row):
            return range(0)
        row += self._first
        try:
            begin, end = (
                (row * self._list_size, (row + 1) * self._list_size)
                if self._list_size
                else (self._offsets[row], self._offsets[row + 1])
            )
        except IndexError:
            raise BrokenColumnError(f"row {row} is outside its column") from None
        if not 0 <= begin <= end <= self._count:
            raise BrokenColumnError(f"row {row} spans elements {begin} to {end} of {self._count}")
        return range(begin, end)

    def is_null(self, row: int) -> bool:
        """Return whether a row is null. An empty list is not."""
        return not self._validity.is_valid(row)

    @cached_property
    def path_rows(self) -> NDArray[np.int64]:
        """Return the rows with an element that has a path and no bytes."""
        if not len(self.items.path_rows):
            return self.items.path_rows
        return np.array([row for row in range(self._rows) if self._names_files(row)], np.int64)

    def _names_files(self, row: int) -> bool:
        try:
            return any(self.items.file(item) is not None for item in self.elements(row))
        except BrokenColumnError:  # the error is raised when the row is read
            return True


def _bytes_column(array: Any, rows: int, unread: Unread | None) -> BytesColumn:
    """Return the column of bytes or of paths, with `rows` nulls if there is no array.

    An array of the null type, which Arrow uses if no row of a file has a value, becomes nulls too.
    """
    if array is None or pa.types.is_null(array.type):
        array = pa.nulls(rows, pa.binary())
    return BytesColumn(array, unread)


Column = BytesColumn | NumberColumn | ValueColumn | MediaColumn | MediaListColumn


def column_of(name: str, array: Any, unread: Unread | None = None) -> Column:
    """Return the column of this name for an array, whose values may be `unread`."""
    if is_media(array.type) or _is_image(name, array.type):
        return MediaColumn(array, unread)
    if str(array.type) in OFFSETS or array.type in (pa.string_view(), pa.binary_view()):
        return BytesColumn(array, unread)
    if str(array.type) in NUMBER_FORMATS:
        return NumberColumn(array)
    if is_media_list(array.type):
        return MediaListColumn(array, unread)
    return ValueColumn(array, unread)


def holds_media(field: Any) -> bool:
    """Return whether a column of a schema has images, audio, videos, or lists of them."""
    return is_media(field.type) or is_media_list(field.type) or _is_image(field.name, field.type)


def _is_image(name: str, kind: Any) -> bool:
    """Return whether a column seems to have the bytes of images, by its name and type."""
    return name.lower() in _IMAGES and str(kind) in _BYTES and str(kind) != "null"


def is_media(kind: Any) -> bool:
    """Return whether a type is a struct of exactly `bytes` and `path`."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    fields = {kind.field(i).name: str(kind.field(i).type) for i in range(kind.num_fields)}
    known = fields.get("bytes") in _BYTES and fields.get("path") in _PATHS
    return known and set(fields.values()) != {"null"}


def is_media_list(kind: Any) -> bool:
    """Return whether a type is a list of structs of `bytes` and `path`."""
    return _is_list(kind) and is_media(kind.value_type)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def extension_of(path: str) -> str:
    """Return the extension of a path, or "" if it cannot be the name of a part."""
    extension = path.rpartition(".")[2] if "." in path.rpartition("/")[2] else ""
    return extension if extension.isalnum() and len(extension) <= _LONGEST_EXTENSION else ""


_NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's folder name for rows whose partition value is null
# where a part of a row is: in the column of this name, or in the element of this number in a column of lists
PartLocation: TypeAlias = "str | tuple[str, int]"


class NoBytesError(ValueError):
    """Error for a row that names files without their bytes."""


class ArrowRows:
    """Rows in record batches of one schema.

    The column `hidden` is read, but is not a part. `constants` are parts that all rows have, such as the values of
    partitions. To read a row that names a file without its bytes raises `NoBytesError`. With `partial`, the row lacks
    that part, and `named_files` returns the file. Some values may be `unread`.
    """

    def __init__(
        self,
        batches: list[Any],
        *,
        constants: dict[str, bytes],
        hidden: str | None = None,
        partial: bool = False,
        unread: Unread | None = None,
    ) -> None:
        self._batches: list[dict[str, Any]] = [
            {name: column_of(name, batch.column(i), unread) for i, name in enumerate(batch.schema.names)}
            for batch in batches
        ]
        # the first row of each batch, then the number of rows
        self._batch_starts: list[int] = [0, *accumulate(batch.num_rows for batch in batches)]
        self._first_batch_rows = batches[0].num_rows if batches else 0
        names = [name for name in batches[0].schema.names if name != hidden] if batches else []
        self._names = names
        self._constant_parts = {name: value for name, value in constants.items() if name not in names}
        self._media = [name for name in names if isinstance(self._batches[0][name], MediaColumn)]
        self._lists = [name for name in names if isinstance(self._batches[0][name], MediaListColumn)]
        media = [*self._media, *self._lists]
        counts = {name: sum(len(columns[name].path_rows) for columns in self._batches) for name in media}
        # number of rows that name files without their bytes, by column
        self._path_counts = {name: count for name, count in counts.items() if count}
        # a bare path names a file without its bytes
        self._rejects_bare_path = bool(self._path_counts) and not partial

    def __len__(self) -> int:
        return self._batch_starts[-1]

    def value(self, row: int, name: str) -> bytes | None:
        """Return the bytes in a column of a row, or None for null.

        Raises KeyError if there is no such column.
        """
        if row < self._first_batch_rows:  # in most files, each group is one batch, so the search below is skipped
            first: Column = self._batches[0][name]
            return first.value(row)
        column, row = self._column(row, name)
        found: bytes | None = column.value(row)
        return found

    def read(self, row: int, extension: str) -> bytes:
        """Return the bytes of a part.

        Raises KeyError if the part is missing, and `NoBytesError` if the row names a file without its bytes.
        """
        if self._rejects_bare_path:
            self._raise_for_bare_path(row)
        if extension in self._names:
            in_first = row < self._first_batch_rows  # inlined from `value`, because a call is slow
            found: bytes | None = self._batches[0][extension].value(row) if in_first else self.value(row, extension)
            if found is not None:
                return found
        parts = dict(self.parts(row))
        location = parts[find_part(extension, parts)]
        data = self._constant_parts[location] if location in self._constant_parts else self._value_at(row, location)
        assert data is not None, location
        return data

    def numbers(self, row: int, extension: str) -> NDArray[Any] | TypeError | None:
        """Return the numbers of a part, an error for other values, or None.

        The result is None for strings, bytes and missing parts.
        """
        name = _equal_name(extension, self._names)
        column, position = self._column(row, name) if name in self._names and not self._rejects_bare_path else (None, 0)
        if not isinstance(column, NumberColumn | ValueColumn) or not column.has_part(position):
            return None
        try:
            return column.array(position)
        except TypeError as error:
            return TypeError(f"the part {name!r} is not an array of numbers: {error}. Use sample.json({name!r})")

    def extensions(self, row: int) -> list[str]:
        """Return the names of the parts that a row has. Raises `NoBytesError`."""
        if self._rejects_bare_path:
            self._raise_for_bare_path(row)
        return [part for part, _ in self.parts(row)]

    def parts(self, row: int) -> Iterator[tuple[str, PartLocation]]:
        """Yield the name and the location of each part of a row."""
        for name in self._names:
            column, position = self._column(row, name)
            if column.has_part(position):
                extension = column.extension(position) if name in self._media else ""
                yield (self._part_name(name, extension) if extension else name), name
            elif name in self._lists:
                yield from self._elements(row, name)
        for name in self._constant_parts:
            yield name, name

    def nulls(self, row: int) -> list[str]:
        """Return the columns in which a row has a null, or a list with a null.

        Media that name a file do not count as null.
        """
        return [name for name in self._names if self._is_null(row, name)]

    def named_files(self, row: int) -> list[NamedFile]:
        """Return the files that a row names without their bytes."""
        return [
            NamedFile(name, path, extension and self._part_name(name, extension, number))
            for name in self._path_counts
            for number, path in self._paths_without_bytes(row, name)
            for extension in [extension_of(path)]
        ]

    def values(self, row: int) -> dict[PartLocation, bytes]:
        """Return the bytes of the non-null parts of a row, by their location."""
        found: dict[PartLocation, bytes | None] = {name: self.value(row, name) for name in self._batches[0]}
        for name in self._lists:
            found |= {location: self._value_at(row, location) for _, location in self._elements(row, name)}
        found |= {name: value for name, value in self._constant_parts.items() if found.get(name) is None}
        return {location: value for location, value in found.items() if value is not None}

    def retain(self, row: int) -> RetainedRow:
        """Copy a row, to use it after these rows are evicted."""
        return RetainedRow(self, row)

    def fault(self, row: int) -> str:
        """Return why a row cannot be read: which column names a file without bytes.

        The result is "" for a row with all bytes.
        """
        for file in self.named_files(row) if self._rejects_bare_path else ():
            counts = f"{self._path_counts[file.column]:,} of {len(self):,} rows have a path and no bytes"
            return f"the column {file.column!r} holds {file.path[:200]!r} and no bytes ({counts})"
        return ""

    def _raise_for_bare_path(self, row: int) -> None:
        """Raise `NoBytesError` if a row names files without their bytes."""
        if fault := self.fault(row):
            raise NoBytesError(fault)

    def _value_at(self, row: int, location: PartLocation) -> bytes | None:
        """Return the bytes at a location in a row, or None for null."""
        if isinstance(location, str):
            return self.value(row, location)
        name, number = location
        column, elements = self._list_column(row, name)
        found: bytes | None = column.items.value(elements[number])
        return found

    def _column(self, row: int, name: str) -> tuple[Any, int]:
        """Return the column with a row, and the row's position in the column."""
        batch = bisect_right(self._batch_starts, row) - 1
        return self._batches[batch][name], row - self._batch_starts[batch]

    def _list_column(self, row: int, name: str) -> tuple[Any, range]:
        """Return the column of lists with a row, and the range of the row's elements."""
        column, row = self._column(row, name)
        return column, column.elements(row)

    def _is_null(self, row: int, name: str) -> bool:
        column, position = self._column(row, name)
        if isinstance(column, MediaListColumn):
            return column.is_null(position) or any(map(_is_absent, repeat(column.items), column.elements(position)))
        return _is_absent(column, position) if isinstance(column, MediaColumn) else column.value(position) is None

    def _elements(self, row: int, name: str) -> Iterator[tuple[str, PartLocation]]:
        """Yield `0.jpg`, `1.jpg`, … for the images in a list of a row, and the location of each."""
        column, elements = self._list_column(row, name)
        for i, element in enumerate(elements):
            if column.items.has_part(element):
                yield self._part_name(name, column.items.extension(element), i), (name, i)

    def _paths_without_bytes(self, row: int, name: str) -> list[tuple[int | None, str]]:
        """Return (number in a list or None, path) of the media without bytes in a column of a row."""
        found: list[tuple[int | None, str | None]]
        if name in self._media:
            column, position = self._column(row, name)
            found = [(None, column.file(position))]
        else:
            column, elements = self._list_column(row, name)
            found = [(i, column.items.file(element)) for i, element in enumerate(elements)]
        return [(number, path) for number, path in found if path is not None]

    def _part_name(self, column: str, extension: str, number: int | None = None) -> str:
        """Return `jpg` for the only column of images, `left.jpg` for one of several, `0.jpg` in a list."""
        columns = self._media if number is None else self._lists
        short = extension if number is None else f"{number}.{extension}"
        return short if columns == [column] and short not in self._names else f"{column}.{short}"


def _is_absent(column: MediaColumn, position: int) -> bool:
    return column.is_null(position) and column.file(position) is None


class RetainedRow:
    """Copy of a row, for use after its group is evicted: its parts and their bytes."""

    __slots__ = ("_fault", "_numbers", "_parts", "_values")

    def __init__(self, rows: ArrowRows, row: int) -> None:
        self._values, self._parts, self._fault = rows.values(row), dict(rows.parts(row)), rows.fault(row)
        found = {part: rows.numbers(row, part) for part in self._parts}
        self._numbers = {part: numbers for part, numbers in found.items() if numbers is not None}

    @property
    def size(self) -> int:
        """Return the approximate bytes in memory."""
        numbers = sum(each.nbytes for each in self._numbers.values() if not isinstance(each, TypeError))
        return 400 + sum(map(len, self._values.values())) + numbers

    def value(self, row: int, name: str) -> bytes | None:
        """See `ArrowRows.value`. `row` is ignored, because there is only one."""
        return self._values.get(name)

    def read(self, row: int, extension: str) -> bytes:
        """See `ArrowRows.read`."""
        self._raise_for_bare_path()
        found = self._values.get(extension) if extension in self._parts.values() else None
        return self._values[self._parts[find_part(extension, self._parts)]] if found is None else found

    def extensions(self, row: int) -> list[str]:
        """See `ArrowRows.extensions`."""
        self._raise_for_bare_path()
        return list(self._parts)

    def numbers(self, row: int, extension: str) -> NDArray[Any] | TypeError | None:
        """See `ArrowRows.numbers`."""
        return self._numbers.get(_equal_name(extension, self._numbers))

    def _raise_for_bare_path(self) -> None:
        if self._fault:
            raise NoBytesError(self._fault)


def _equal_name(extension: str, names: Collection[str]) -> str:
    """Return the name in `names` that equals `extension`, ignoring case, or else the extension."""
    if extension in names:
        return extension
    return next((name for name in names if name.lower() == extension.lower()), extension)


def partition_values(name: str) -> dict[str, bytes]:
    """Return the values in a path's Hive partition folders, without nulls.

    >>> from savable_pipeline.data.stores.arrow_columns import partition_values
    >>> partition_values("year=2024/lang=en/0.parquet")
    {'year': b'2024', 'lang': b'en'}
    """
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {
        unquote(column): unquote(value).encode()
        for column, equals, value in pairs
        if equals and column and value != _NULL
    }
