"""The values of Arrow columns as the bytes of parts. Buffers from files are not trusted: each access is bounded.

string, binary                      their bytes
numbers                             JSON
struct of bytes and path, and lists of these: see media_columns.py
other lists, other structs, dates, …      JSON
null                                the sample has no such part
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from struct import calcsize
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from savable_pipeline.core.wording import listed
from savable_pipeline.data.stores.plain_values import as_part
from savable_pipeline.errors import ShardError

OFFSETS = {"string": "i", "binary": "i", "large_string": "q", "large_binary": "q"}
NUMBERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float": "f", "double": "d"}
NUMBERS |= {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}


class BrokenColumnError(ValueError):
    """The buffers of a column do not hold what its type says."""


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
            raise BrokenColumnError(f"row {row} lies outside of its column") from None

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
        kind = OFFSETS[str(array.type)]
        self._first = array.offset
        self.validity = Validity(array)
        self._has_nulls = self.validity.has_nulls
        self._offsets = memoryview(b"" if offsets is None else offsets).cast("B")
        usable = len(self._offsets) // (4 if kind == "i" else 8) * (4 if kind == "i" else 8)
        self._offsets = self._offsets[:usable].cast(kind)  # type: ignore[call-overload]
        self._data = memoryview(b"" if data is None else data).cast("B")
        self._read = None if unread is None else unread.reader(data)
        self.rows = max(0, len(self._offsets) - 1 - self._first)  # that lie in it

    def value(self, row: int) -> bytes | None:
        """The bytes of a row; None for null. Raises `BrokenColumnError`."""
        place = self._place(row)
        if place is None:
            return None
        begin, end = place
        return self._data[begin:end].tobytes() if self._read is None else self._read(begin, end)

    def head(self, row: int, size: int) -> bytes:
        """The first bytes of a row, at most `size`; none for null. Raises `BrokenColumnError`."""
        begin, end = self._place(row) or (0, 0)
        end = min(end, begin + size)
        return self._data[begin:end].tobytes() if self._read is None else self._read(begin, end)

    def has_part(self, row: int) -> bool:
        """Whether `value` is not None, without its bytes. Raises `BrokenColumnError`."""
        return self._place(row) is not None

    def _place(self, row: int) -> tuple[int, int] | None:
        """Where the bytes of a row begin and end; None for null. Raises `BrokenColumnError`."""
        if self._has_nulls and not self.validity.of(row):
            return None
        row += self._first
        try:
            begin, end = self._offsets[row], self._offsets[row + 1]
        except IndexError:
            raise BrokenColumnError(f"row {row} lies outside of its column") from None
        if not 0 <= begin <= end <= len(self._data):
            raise BrokenColumnError(f"row {row} is said to lie at the bytes {begin} to {end} of {len(self._data)}")
        return begin, end


class NumberColumn:
    """A column of integers or floats: views its buffer, and reads one value when it is asked for."""

    def __init__(self, array: Any) -> None:
        _, data = array.buffers()
        kind = NUMBERS[str(array.type)]
        self._first, self._validity = array.offset, Validity(array)
        self._has_nulls = self._validity.has_nulls
        usable = memoryview(b"" if data is None else data).cast("B")
        size = calcsize(kind)
        self._values = usable[: len(usable) // size * size].cast(kind)  # type: ignore[call-overload]

    def value(self, row: int) -> bytes | None:
        """The value of a row as JSON; None for null. Raises `BrokenColumnError`."""
        if self._has_nulls and not self._validity.of(row):
            return None
        row += self._first
        try:
            return as_part(self._values[row])
        except IndexError:
            raise BrokenColumnError(f"row {row} lies outside of its column") from None

    def has_part(self, row: int) -> bool:
        """Whether `value` is not None. Raises `BrokenColumnError`."""
        return self.value(row) is not None


class ValueColumn:
    """A column of any other type, whose values become JSON."""

    def __init__(self, array: Any, unread: Unread | None = None) -> None:
        self._array, self._unread = array, unread
        self._checked = False

    def value(self, row: int) -> bytes | None:
        """The value of a row as JSON, or as it is if it is text or bytes; None for null. Raises `BrokenColumnError`."""
        try:
            if not self._checked:
                self._array.validate(full=True)
                self._checked = True
            if self._unread is None or not 0 <= row < len(self._array):
                return as_part(self._array[row].as_py())
            return as_part(self._unread.rows(self._array, row, 1)[0].as_py())
        except (pa.ArrowException, IndexError, ValueError, OverflowError) as error:
            raise BrokenColumnError(f"row {row}: {error}") from error

    def has_part(self, row: int) -> bool:
        """Whether `value` is not None. Raises `BrokenColumnError`."""
        return self.value(row) is not None


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
