"""`ArrowRows`: consecutive rows of a columnar file, decoded; its columns are the parts of its samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import repeat
from typing import Any, TypeAlias
from urllib.parse import unquote

from numpy.typing import NDArray

from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.stores.arrow_columns import (
    Column,
    MediaColumn,
    MediaListColumn,
    NamedFile,
    NumberColumn,
    Unread,
    ValueColumn,
    column_of,
    extension_of,
)

_NULL = "__HIVE_DEFAULT_PARTITION__"  # the folder of rows whose value is null
PartSource: TypeAlias = "str | tuple[str, int]"  # of a part in a row: a column, or an element of a list in one


class NoBytesError(ValueError):
    """A row names files, and does not hold their bytes."""


class ArrowRows:
    """Rows in record batches of one schema. `hidden` names a column that is read, but is no part.

    `constants` are parts that all rows have, such as the values of partitions. A row that names a file without its
    bytes raises `NoBytesError`; with `partial` it is given without that part, which `named_files` tells. Of the values
    some may be `unread`.
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
            {name: column_of(name, column, unread) for name, column in zip(b.schema.names, b.columns, strict=True)}
            for b in batches
        ]
        self._firsts = [0]
        for batch in batches:
            self._firsts.append(self._firsts[-1] + batch.num_rows)
        names = [name for name in batches[0].schema.names if name != hidden] if batches else []
        self._names = names
        self._constants = {name: value for name, value in constants.items() if name not in names}
        self._media = [name for name in names if isinstance(self._batches[0][name], MediaColumn)]
        self._lists = [name for name in names if isinstance(self._batches[0][name], MediaListColumn)]
        naming = {name: sum(len(b[name].named) for b in self._batches) for name in [*self._media, *self._lists]}
        self._naming = {name: rows for name, rows in naming.items() if rows}  # that name a file without its bytes
        self._refuses = bool(self._naming) and not partial

    def __len__(self) -> int:
        return self._firsts[-1]

    def value(self, row: int, name: str) -> bytes | None:
        """The bytes in a column of a row; None for null. Raises KeyError without the column."""
        if row < self._firsts[1]:  # in most files, each group is one batch
            first: Column = self._batches[0][name]
            return first.value(row)
        column, row = self._column(row, name)
        found: bytes | None = column.value(row)
        return found

    def read(self, row: int, extension: str) -> bytes:
        """The bytes of a part. Raises KeyError without it, `NoBytesError`."""
        if self._refuses:
            self._refuse(row)
        if extension in self._names:
            one = row < self._firsts[1]  # as in `value`, without a call
            found: bytes | None = self._batches[0][extension].value(row) if one else self.value(row, extension)
            if found is not None:
                return found
        parts = dict(self.parts(row))
        source = parts[find_part(extension, parts)]
        data = self._constants[source] if source in self._constants else self._at(row, source)
        assert data is not None, source
        return data

    def numbers(self, row: int, extension: str) -> NDArray[Any] | TypeError | None:
        """The numbers of a part; the error about one that has others; None of texts and bytes, and without it."""
        name = _named(extension, self._names)
        column, position = self._column(row, name) if name in self._names and not self._refuses else (None, 0)
        if not isinstance(column, NumberColumn | ValueColumn) or not column.has_part(position):
            return None
        try:
            return column.array(position)
        except TypeError as error:
            return TypeError(f"the part {name!r} is not an array of numbers: {error}. Use sample.json({name!r})")

    def extensions(self, row: int) -> list[str]:
        """The names of the parts that a row has. Raises `NoBytesError`."""
        if self._refuses:
            self._refuse(row)
        return [part for part, _ in self.parts(row)]

    def parts(self, row: int) -> Iterator[tuple[str, PartSource]]:
        """The parts of a row, and the source of each."""
        for name in self._names:
            column, position = self._column(row, name)
            if column.has_part(position):
                extension = column.extension(position) if name in self._media else ""
                yield (self._part_name(name, extension) if extension else name), name
            elif name in self._lists:
                yield from self._elements(row, name)
        for name in self._constants:
            yield name, name

    def nulls(self, row: int) -> list[str]:
        """The columns of a row that are null, or lists in which something is; without those that name a file."""
        return [name for name in self._names if self._is_null(row, name)]

    def named_files(self, row: int) -> list[NamedFile]:
        """The files that a row names without their bytes."""
        return [
            NamedFile(name, path, extension and self._part_name(name, extension, number))
            for name in self._naming
            for number, path in self._paths(row, name)
            for extension in [extension_of(path)]
        ]

    def values(self, row: int) -> dict[PartSource, bytes]:
        """The bytes of the parts of a row that are not null, by their source."""
        found: dict[PartSource, bytes | None] = {name: self.value(row, name) for name in self._batches[0]}
        for name in self._lists:
            found |= {source: self._at(row, source) for _, source in self._elements(row, name)}
        found |= {name: value for name, value in self._constants.items() if found.get(name) is None}
        return {source: value for source, value in found.items() if value is not None}

    def retain(self, row: int) -> RetainedRow:
        """A row by itself, to be kept when these rows are given up."""
        return RetainedRow(self, row)

    def fault(self, row: int) -> str:
        """Which column names a file without its bytes, and how many rows do; empty for a row that is whole."""
        for file in self.named_files(row) if self._refuses else ():
            some = f"{self._naming[file.column]:,} of {len(self):,} rows have a path and no bytes"
            return f"the column {file.column!r} holds {file.path[:200]!r} and no bytes ({some})"
        return ""

    def _refuse(self, row: int) -> None:
        if fault := self.fault(row):
            raise NoBytesError(fault)

    def _at(self, row: int, source: PartSource) -> bytes | None:
        """The bytes at a source of a row."""
        if isinstance(source, str):
            return self.value(row, source)
        column, elements = self._list(row, source[0])
        found: bytes | None = column.items.value(elements[source[1]])
        return found

    def _column(self, row: int, name: str) -> tuple[Any, int]:
        """The column with a row, and the row's position in it."""
        batch = bisect_right(self._firsts, row) - 1
        return self._batches[batch][name], row - self._firsts[batch]

    def _list(self, row: int, name: str) -> tuple[Any, range]:
        """The column of lists with a row, and where the row's elements lie."""
        column, row = self._column(row, name)
        return column, column.elements(row)

    def _is_null(self, row: int, name: str) -> bool:
        column, position = self._column(row, name)
        if isinstance(column, MediaListColumn):
            return column.is_null(position) or any(map(_holds_nothing, repeat(column.items), column.elements(position)))
        return _holds_nothing(column, position) if isinstance(column, MediaColumn) else column.value(position) is None

    def _elements(self, row: int, name: str) -> Iterator[tuple[str, PartSource]]:
        """`0.jpg`, `1.jpg`, … for what a list of images holds in a row, and the source of each."""
        column, elements = self._list(row, name)
        for i, element in enumerate(elements):
            if column.items.has_part(element):
                yield self._part_name(name, column.items.extension(element), i), (name, i)

    def _paths(self, row: int, name: str) -> list[tuple[int | None, str]]:
        """The paths in a column of a row that have no bytes; in a list, with the number of each."""
        found: list[tuple[int | None, str | None]]
        if name in self._media:
            column, position = self._column(row, name)
            found = [(None, column.file(position))]
        else:
            column, elements = self._list(row, name)
            found = [(i, column.items.file(element)) for i, element in enumerate(elements)]
        return [(number, path) for number, path in found if path is not None]

    def _part_name(self, column: str, extension: str, number: int | None = None) -> str:
        """`jpg` for the image in the only such column, `left.jpg` where there are several; in a list `0.jpg`."""
        alike = self._media if number is None else self._lists
        short = extension if number is None else f"{number}.{extension}"
        return short if alike == [column] and short not in self._names else f"{column}.{short}"


def _holds_nothing(column: MediaColumn, position: int) -> bool:
    return column.is_null(position) and column.file(position) is None


class RetainedRow:
    """A row whose group was given up: its parts, and their bytes."""

    __slots__ = ("_fault", "_numbers", "_parts", "_values")

    def __init__(self, rows: ArrowRows, row: int) -> None:
        self._values, self._parts, self._fault = rows.values(row), dict(rows.parts(row)), rows.fault(row)
        found = {part: rows.numbers(row, part) for part in self._parts}
        self._numbers = {part: numbers for part, numbers in found.items() if numbers is not None}

    @property
    def size(self) -> int:
        """The bytes that it takes in memory, about."""
        numbers = sum(each.nbytes for each in self._numbers.values() if not isinstance(each, TypeError))
        return 400 + sum(map(len, self._values.values())) + numbers

    def value(self, row: int, name: str) -> bytes | None:
        """See `ArrowRows.value`; there is only this row."""
        return self._values.get(name)

    def read(self, row: int, extension: str) -> bytes:
        """See `ArrowRows.read`."""
        self._refuse()
        found = self._values.get(extension) if extension in self._parts.values() else None
        return self._values[self._parts[find_part(extension, self._parts)]] if found is None else found

    def extensions(self, row: int) -> list[str]:
        """See `ArrowRows.extensions`."""
        self._refuse()
        return list(self._parts)

    def numbers(self, row: int, extension: str) -> NDArray[Any] | TypeError | None:
        """See `ArrowRows.numbers`."""
        return self._numbers.get(_named(extension, self._numbers))

    def _refuse(self) -> None:
        if self._fault:
            raise NoBytesError(self._fault)


def _named(extension: str, names: Collection[str]) -> str:
    """The one of `names` that equals `extension`, or does but for case; else the extension."""
    if extension in names:
        return extension
    return next((name for name in names if name.lower() == extension.lower()), extension)


def partition_values(name: str) -> dict[str, bytes]:
    """The values in the folders of a file's name, as Hive writes them, but no null.

    >>> from savable_pipeline.data.stores.arrow_rows import partition_values
    >>> partition_values("year=2024/lang=en/0.parquet")
    {'year': b'2024', 'lang': b'en'}
    """
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {
        unquote(column): unquote(value).encode()
        for column, equals, value in pairs
        if equals and column and value != _NULL
    }
