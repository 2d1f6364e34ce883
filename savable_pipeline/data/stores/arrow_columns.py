"""The values of Arrow columns as the bytes of parts. Buffers from files are not trusted: each access is bounded.

    string, binary                      their bytes
    numbers                             JSON, or an array of one number
    lists of numbers, of one length a dimension     JSON, or an array
    other lists, other structs, dates, …      JSON; moments and spans made from their integers, moments in UTC
    null                                the sample has no such part

Images, audio and films are as HF `datasets` writes them, structs of `bytes` and `path`, and lists of these:

    {bytes, path}                       the bytes; the part is named by the path's extension: png
    a list of them                      a part for each: 0.png, 1.png, …
    {bytes: null, path}                 the file lies elsewhere: a `NamedFile`, and no part
    bytes, in the column `image`        a part as if they had no path, if they begin as an image does; else as they are

Bytes and paths may be of Arrow's view types, as Polars writes them, and one of the two of none where all are null.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from struct import calcsize
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from savable_pipeline.core.file_heads import media_of
from savable_pipeline.data.shards.part_types import IMAGE_PARTS, as_part

OFFSETS = {"string": "i", "binary": "i", "large_string": "q", "large_binary": "q"}
NUMBERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float": "f", "double": "d"}
NUMBERS |= {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}
_LONGEST_EXTENSION = 8
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
T = TypeVar("T")
_BYTES = ("binary", "large_binary", "binary_view", "null")
_PATHS = ("string", "large_string", "string_view", "null")
_IMAGES = ("image", "img", "image_bytes")  # names of columns of bytes, in small letters
_MEDIA = frozenset(("jpg", "png", "gif", "bmp", "tiff", "flac", "ogg", "mp3", "webp", "wav"))  # that have no path


class BrokenColumnError(ValueError):
    """The buffers of a column do not hold what its type says."""


def _numbers(buffer: Any, kind: str) -> memoryview[Any]:
    """The whole numbers of a kind in a buffer; none where there is no buffer."""
    raw = memoryview(b"" if buffer is None else buffer).cast("B")
    found: memoryview[Any] = raw[: len(raw) // calcsize(kind) * calcsize(kind)].cast(kind)  # type: ignore[call-overload]
    return found


_JSON: Any = getattr(pa, "JsonType", ())  # pyarrow 19 and later


class Validity:
    """Which rows of an array are not null, read from its bits: Arrow's own look at a row follows its offsets too."""

    def __init__(self, array: Any) -> None:
        bits = array.buffers()[0]
        self._first, self._bits = array.offset, None if bits is None else memoryview(bits)

    @property
    def has_nulls(self) -> bool:
        """Whether a row may be null."""
        return self._bits is not None

    def of(self, row: int) -> bool:
        """Whether a row is not null. Raises `BrokenColumnError`."""
        if self._bits is None:
            return True
        row += self._first
        try:
            return bool(self._bits[row >> 3] >> (row & 7) & 1)
        except IndexError:
            raise BrokenColumnError(f"row {row} is outside its column") from None

    def nulls(self, count: int) -> NDArray[np.bool_]:
        """Which of the first `count` rows are null: bool (count,). Rows that have no bit are none."""
        found = np.zeros(count, np.bool_)
        if self._bits is not None:
            used = np.frombuffer(self._bits, np.uint8)[: (self._first + count + 7) // 8]
            bits = np.unpackbits(used, bitorder="little")[self._first : self._first + count]
            found[: len(bits)] = bits == 0
        return found


class Unread(Protocol):
    """Arrays whose values are partly not in memory."""

    def reader(self, buffer: Any, /) -> Callable[[int, int], bytes] | None:
        """What reads the bytes of a buffer from the first up to the second number; None if they are in memory."""

    def rows(self, array: Any, first: int, count: int, /) -> Any:
        """Rows of an array that is valid but for what is not read, with all that they hold. Raises `ShardError`."""


class BytesColumn:
    """A column of strings or bytes: views its buffers, and copies, or reads, one value when it is asked for.

    Raises `BrokenColumnError`.
    """

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        if array.type in (pa.string_view(), pa.binary_view()):
            try:
                array.validate(full=True)  # before Arrow follows the views, to wherever they point
            except pa.ArrowException as error:
                raise BrokenColumnError(str(error)) from error
            array = array.cast(pa.large_binary())
        _, offsets, data = array.buffers()
        self._first, self.validity = array.offset, Validity(array)
        self._has_nulls = self.validity.has_nulls
        self._offsets, self._data = _numbers(offsets, OFFSETS[str(array.type)]), _numbers(data, "B")
        self._read = None if unread is None else unread.reader(data)
        self.rows = max(0, len(self._offsets) - 1 - self._first)  # that lie in it

    def value(self, row: int) -> bytes | None:
        """The bytes of a row; None for null. Raises `BrokenColumnError`."""
        byte_range = self._byte_range(row)
        if byte_range is None:
            return None
        begin, end = byte_range
        return self._data[begin:end].tobytes() if self._read is None else self._read(begin, end)

    def head(self, row: int, size: int) -> bytes:
        """The first bytes of a row, at most `size`; none for null. Raises `BrokenColumnError`."""
        begin, end = self._byte_range(row) or (0, 0)
        end = min(end, begin + size)
        return self._data[begin:end].tobytes() if self._read is None else self._read(begin, end)

    def has_part(self, row: int) -> bool:
        """Whether `value` is not None, without its bytes. Raises `BrokenColumnError`."""
        return self._byte_range(row) is not None

    def _byte_range(self, row: int) -> tuple[int, int] | None:
        """Where the bytes of a row begin and end; None for null. Raises `BrokenColumnError`."""
        if self._has_nulls and not self.validity.of(row):
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
    """A column of integers or floats: views its buffer, and reads one value when it is asked for."""

    def __init__(self, array: Any) -> None:
        _, data = array.buffers()
        self._first, self._validity = array.offset, Validity(array)
        self._has_nulls = self._validity.has_nulls
        self._values = _numbers(data, NUMBERS[str(array.type)])

    def value(self, row: int) -> bytes | None:
        """The value of a row as JSON; None for null. Raises `BrokenColumnError`."""
        if self._has_nulls and not self._validity.of(row):
            return None
        row += self._first
        try:
            return as_part(self._values[row])
        except IndexError:
            raise BrokenColumnError(f"row {row} is outside its column") from None

    def array(self, row: int) -> NDArray[Any]:
        """The value of a row, which is not null: ()."""
        return np.array(self._values[self._first + row], self._values.format)

    def has_part(self, row: int) -> bool:
        """Whether `value` is not None. Raises `BrokenColumnError`."""
        return self.value(row) is not None


class ValueColumn:
    """A column of any other type, whose values become JSON."""

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        self._array, self._unread = array, unread
        self._checked = False
        self._converts = not isinstance(array.type, _JSON) and _needs_conversion(array.type)

    def value(self, row: int) -> bytes | None:
        """The value of a row as JSON, or as it is if it is text or bytes; None for null. Raises `BrokenColumnError`."""
        if not self._converts:
            return as_part(self._of_row(row, lambda rows: rows[0].as_py()))
        found = self._of_row(row, lambda rows: plain_value(rows[0]))
        return f'"{found}"'.encode() if isinstance(found, str) else as_part(found)

    def array(self, row: int) -> NDArray[Any]:
        """The numbers of a row, which is not null: (any, …) of their type. Raises `BrokenColumnError`, TypeError."""
        return self._of_row(row, _numbers_of)

    def _of_row(self, row: int, make: Callable[[Any], T]) -> T:
        """What is made of an array of this row alone."""
        try:
            if not self._checked:
                self._array.validate(full=True)
                self._checked = True
            if not 0 <= row < len(self._array):
                raise IndexError("outside its column")
            return make(self._array.slice(row, 1) if self._unread is None else self._unread.rows(self._array, row, 1))
        except (pa.ArrowException, IndexError, ValueError, OverflowError) as error:
            raise BrokenColumnError(f"row {row}: {error}") from error

    def has_part(self, row: int) -> bool:
        """Whether `value` is not None. Raises `BrokenColumnError`."""
        return self._of_row(row, lambda rows: not rows.null_count)


def _numbers_of(rows: Any) -> NDArray[Any]:
    """The numbers of an array of one row: of lists in it as many dimensions. Raises TypeError."""
    shape = [1]
    while _is_list(rows.type) and not rows.null_count:
        lengths = {len(each) for each in rows} or {0}
        if len(lengths) > 1:
            raise TypeError("lists of several lengths")
        rows = rows.flatten()
        shape += lengths
    kind = rows.type
    if rows.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise TypeError("a null among its numbers" if rows.null_count else f"of the type {kind}")
    found: NDArray[Any] = rows.to_numpy(zero_copy_only=False).reshape(shape)[0]
    return found


def _needs_conversion(kind: Any) -> bool:
    """Return whether a type contains times or JSON.

    pyarrow returns times as pandas objects, and JSON as text.
    """
    if kind.num_fields:
        return any(_needs_conversion(kind.field(i).type) for i in range(kind.num_fields))
    timed = pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind)
    return bool(timed or isinstance(kind, _JSON))


def plain_value(value: Any) -> Any:
    """A value as JSON has it: moments in UTC as ISO 8601, spans as seconds, parsed texts of JSON. Raises ValueError."""
    kind = value.type
    if not value.is_valid or not _needs_conversion(kind):
        return value.as_py()
    if isinstance(kind, _JSON):
        return json.loads(value.as_py())
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
        i = int(np.searchsorted(self.named, row))
        return self._path(row) if i < len(self.named) and self.named[i] == row else None

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
            self._offsets = _numbers(array.buffers()[1], "q" if pa.types.is_large_list(array.type) else "i")
        available = self._count // self._each if self._each else len(self._offsets) - 1
        self._rows = min(len(array), available - self._first)

    def value(self, row: int) -> None:
        """None: a list is no part by itself."""

    def has_part(self, row: int) -> bool:
        """False, for that."""
        return False

    def elements(self, row: int) -> range:
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
            raise BrokenColumnError(f"row {row} is outside its column") from None
        if not 0 <= begin <= end <= self._count:
            raise BrokenColumnError(f"row {row} spans elements {begin} to {end} of {self._count}")
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
            return any(self.items.file(item) is not None for item in self.elements(row))
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
    return _is_list(kind) and is_media(kind.value_type)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def extension_of(path: str) -> str:
    """The extension of a path; "" without one that could be the name of a part."""
    extension = path.rpartition(".")[2] if "." in path.rpartition("/")[2] else ""
    return extension if extension.isalnum() and len(extension) <= _LONGEST_EXTENSION else ""
