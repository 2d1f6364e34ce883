"""`ArrowRows`: consecutive rows of a columnar file, decoded; its columns are the parts of its samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from savable_pipeline.shards.part_types import find_part
from savable_pipeline.stores.arrow_columns import Column, MediaColumn, column_of


class ArrowRows:
    """Rows in record batches of one schema. `hidden` names a column that is read, but is no part.

    `constants` are parts that all rows have, such as the values of partitions.
    """

    def __init__(self, batches: list[Any], *, constants: dict[str, bytes], hidden: str | None = None) -> None:
        self._batches = [dict(zip(b.schema.names, map(column_of, b.columns), strict=True)) for b in batches]
        self._firsts = [0]
        for batch in batches:
            self._firsts.append(self._firsts[-1] + batch.num_rows)
        names = [name for name in batches[0].schema.names if name != hidden] if batches else []
        self._names = names
        self._constants = {name: value for name, value in constants.items() if name not in names}
        media = [name for name in names if isinstance(self._batches[0][name], MediaColumn)]
        self._alone = media[0] if len(media) == 1 else None
        self._media = media

    def __len__(self) -> int:
        return self._firsts[-1]

    def value(self, row: int, name: str) -> bytes | None:
        """The bytes in a column of a row; None for null. Raises KeyError without the column."""
        if row < self._firsts[1]:  # in most files, each group is one batch
            first: Column = self._batches[0][name]
            return first.value(row)
        batch = bisect_right(self._firsts, row) - 1
        column: Column = self._batches[batch][name]
        return column.value(row - self._firsts[batch])

    def read(self, row: int, extension: str) -> bytes:
        """The bytes of a part. Raises KeyError without it."""
        if extension in self._names:
            found = self.value(row, extension)
            if found is not None:
                return found
        parts = dict(self.parts(row))
        column = parts[find_part(extension, parts)]
        data = self._constants[column] if column in self._constants else self.value(row, column)
        assert data is not None, column
        return data

    def extensions(self, row: int) -> list[str]:
        """The names of the parts that a row has."""
        return [part for part, _ in self.parts(row)]

    def parts(self, row: int) -> Iterator[tuple[str, str]]:
        """The parts of a row, and the column of each."""
        for name in self._names:
            if self.value(row, name) is not None:
                yield (self._media_name(row, name) if name in self._media else name), name
        for name in self._constants:
            yield name, name

    def columns(self, row: int) -> dict[str, bytes]:
        """The bytes in the columns of a row that are not null."""
        found = {name: self.value(row, name) for name in self._batches[0]}
        return {**self._constants, **{name: value for name, value in found.items() if value is not None}}

    def kept(self, row: int) -> KeptRow:
        """A row by itself, to be kept when these rows are given up."""
        return KeptRow(self, row)

    def _media_name(self, row: int, name: str) -> str:
        """`jpg` for the image in the only such column; `left.jpg` where there are several."""
        batch = bisect_right(self._firsts, row) - 1
        column: Column = self._batches[batch][name]
        assert isinstance(column, MediaColumn), name
        extension = column.extension(row - self._firsts[batch])
        return extension if self._alone and extension not in self._names else f"{name}.{extension}"


class KeptRow:
    """A row whose group was given up: its parts, and the bytes in its columns."""

    __slots__ = ("_columns", "_parts")

    def __init__(self, rows: ArrowRows, row: int) -> None:
        self._columns, self._parts = rows.columns(row), dict(rows.parts(row))

    @property
    def size(self) -> int:
        """The bytes that it takes in memory, about."""
        return 400 + sum(map(len, self._columns.values()))

    def value(self, row: int, name: str) -> bytes | None:
        """See `ArrowRows.value`; there is only this row."""
        return self._columns.get(name)

    def read(self, row: int, extension: str) -> bytes:
        """See `ArrowRows.read`."""
        found = self._columns.get(extension) if extension in self._parts.values() else None
        return self._columns[self._parts[find_part(extension, self._parts)]] if found is None else found

    def extensions(self, row: int) -> list[str]:
        """See `ArrowRows.extensions`."""
        return list(self._parts)


def partition_values(name: str) -> dict[str, bytes]:
    """The values in the folders of a file's name, as Hive writes them.

    >>> from savable_pipeline.stores.arrow_rows import partition_values
    >>> partition_values("year=2024/lang=en/0.parquet")
    {'year': b'2024', 'lang': b'en'}
    """
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {unquote(column): unquote(value).encode() for column, equals, value in pairs if equals and column}
