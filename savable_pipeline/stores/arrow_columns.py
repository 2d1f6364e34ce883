"""The values of Arrow columns as the bytes of parts. Buffers from files are not trusted: each access is bounded.

string, binary                      their bytes
struct of bytes and path            the bytes; the part is named by the path's extension (HF's images and audio)
numbers                             JSON
lists, other structs, dates, …      JSON
null                                the sample has no such part
"""

from __future__ import annotations

from collections import Counter
from struct import calcsize
from typing import Any

import pyarrow as pa

from savable_pipeline.core.wording import listed
from savable_pipeline.errors import ShardError
from savable_pipeline.stores.plain_values import as_part

_OFFSETS = {"string": "i", "binary": "i", "large_string": "q", "large_binary": "q"}
_NUMBERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float": "f", "double": "d"}
_NUMBERS |= {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}
_LONGEST_EXTENSION = 8
_BEGINNINGS = {  # of files whose path says nothing
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"ID3": "mp3",
}


class BrokenColumnError(ValueError):
    """The buffers of a column do not hold what its type says."""


class Validity:
    """Which rows of an array are not null, read from its bits: Arrow's own look at a row follows its offsets too."""

    def __init__(self, array: Any) -> None:
        bits = array.buffers()[0]
        self._first, self._bits = array.offset, None if bits is None else memoryview(bits)

    def of(self, row: int) -> bool:
        """Whether a row is not null. Raises `BrokenColumnError`."""
        if self._bits is None:
            return True
        row += self._first
        try:
            return bool(self._bits[row >> 3] >> (row & 7) & 1)
        except IndexError:
            raise BrokenColumnError(f"row {row} lies outside of its column") from None


class BytesColumn:
    """A column of strings or bytes: views its buffers, and copies one value when it is asked for.

    Raises `BrokenColumnError`.
    """

    def __init__(self, array: Any) -> None:
        if array.type in (pa.string_view(), pa.binary_view()):
            try:
                array.validate(full=True)  # before Arrow follows the views, to wherever they point
            except pa.ArrowException as error:
                raise BrokenColumnError(str(error)) from error
            array = array.cast(pa.large_binary())
        _, offsets, data = array.buffers()
        kind = _OFFSETS[str(array.type)]
        self._first = array.offset
        self._validity = Validity(array)
        self._offsets = memoryview(b"" if offsets is None else offsets).cast("B")
        usable = len(self._offsets) // (4 if kind == "i" else 8) * (4 if kind == "i" else 8)
        self._offsets = self._offsets[:usable].cast(kind)  # type: ignore[call-overload]
        self._data = memoryview(b"" if data is None else data).cast("B")

    def value(self, row: int) -> bytes | None:
        """The bytes of a row; None for null. Raises `BrokenColumnError`."""
        if not self._validity.of(row):
            return None
        row += self._first
        try:
            begin, end = self._offsets[row], self._offsets[row + 1]
        except IndexError:
            raise BrokenColumnError(f"row {row} lies outside of its column") from None
        if not 0 <= begin <= end <= len(self._data):
            raise BrokenColumnError(f"row {row} is said to lie at the bytes {begin} to {end} of {len(self._data)}")
        return self._data[begin:end].tobytes()


class NumberColumn:
    """A column of integers or floats: views its buffer, and reads one value when it is asked for."""

    def __init__(self, array: Any) -> None:
        _, data = array.buffers()
        kind = _NUMBERS[str(array.type)]
        self._first, self._validity = array.offset, Validity(array)
        usable = memoryview(b"" if data is None else data).cast("B")
        size = calcsize(kind)
        self._values = usable[: len(usable) // size * size].cast(kind)  # type: ignore[call-overload]

    def value(self, row: int) -> bytes | None:
        """The value of a row as JSON; None for null. Raises `BrokenColumnError`."""
        if not self._validity.of(row):
            return None
        row += self._first
        try:
            return as_part(self._values[row])
        except IndexError:
            raise BrokenColumnError(f"row {row} lies outside of its column") from None


class ValueColumn:
    """A column of any other type, whose values become JSON."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._checked = False

    def value(self, row: int) -> bytes | None:
        """The value of a row as JSON, or as it is if it is text or bytes; None for null. Raises `BrokenColumnError`."""
        try:
            if not self._checked:
                self._array.validate(full=True)
                self._checked = True
            return as_part(self._array[row].as_py())
        except (pa.ArrowException, IndexError, ValueError, OverflowError) as error:
            raise BrokenColumnError(f"row {row}: {error}") from error


class MediaColumn:
    """A column of structs of `bytes` and `path`, such as images."""

    def __init__(self, array: Any) -> None:
        self._validity = Validity(array)
        self._bytes, self._paths = BytesColumn(array.field("bytes")), BytesColumn(array.field("path"))

    def value(self, row: int) -> bytes | None:
        """The bytes of a row; None for null. Raises `BrokenColumnError`."""
        return self._bytes.value(row) if self._validity.of(row) else None

    def extension(self, row: int) -> str:
        """The extension of a row's path, or what the bytes begin like; "bin" if neither says it."""
        path = (self._paths.value(row) or b"").decode(errors="replace")
        extension = path.rpartition(".")[2] if "." in path.rpartition("/")[2] else ""
        if extension.isalnum() and len(extension) <= _LONGEST_EXTENSION:
            return extension
        data = (self._bytes.value(row) or b"")[:12]
        if data[:4] == b"RIFF":
            return {b"WEBP": "webp", b"WAVE": "wav"}.get(data[8:], "bin")
        return next((name for beginning, name in _BEGINNINGS.items() if data.startswith(beginning)), "bin")


Column = BytesColumn | NumberColumn | ValueColumn | MediaColumn


def column_of(array: Any) -> Column:
    """The column that reads this array."""
    if str(array.type) in _OFFSETS or array.type in (pa.string_view(), pa.binary_view()):
        return BytesColumn(array)
    if str(array.type) in _NUMBERS:
        return NumberColumn(array)
    return MediaColumn(array) if is_media(array.type) else ValueColumn(array)


def is_media(kind: Any) -> bool:
    """Whether a type is a struct of `bytes` and `path`, and of nothing else."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    fields = {kind.field(i).name: str(kind.field(i).type) for i in range(2)}
    return fields.get("bytes") in ("binary", "large_binary") and fields.get("path") in ("string", "large_string")


def check_columns(place: str, wanted: tuple[str, ...], known: list[str]) -> None:
    """Raises ValueError that names the columns which are not among the `known` ones."""
    absent = [name for name in wanted if name not in known]
    if absent:
        raise ValueError(f"{place}: no column {listed(absent)}; it has {listed(known)}")


def check_names(place: str, used: list[str], known: list[str]) -> None:
    """Raises `ShardError` for a column that is used, and whose name another one has too: either could be meant."""
    counts = Counter(known)
    twice = next((name for name in used if counts[name] > 1), None)
    if twice is not None:
        raise ShardError(
            f"{place}: {counts[twice]} columns are named {twice!r}, so that it is not known which is meant: write each "
            "under a name of its own (`table.rename_columns([...])` of pyarrow), or take others with columns=",
            reason="columns of one name",
        )
