"""Tables as JSONL: a row of a CSV or TSV file becomes an object of texts, an empty cell null.

image,caption
a.jpg,a cat           →      {"image": "a.jpg", "caption": "a cat"}
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias

from savable_pipeline.core.wording import counted
from savable_pipeline.tools.convert.jsonl import is_url
from savable_pipeline.tools.convert.model import Reject
from savable_pipeline.tools.convert.source_words import FILE_FIELDS

_SEPARATORS = ",;\t|"
_LOOKED_AT = 1000  # rows by which columns that name files are told

Row: TypeAlias = dict[str, str | None]


@dataclass(slots=True)
class Table:
    """What was found in a table on the way."""

    head: list[Row] = field(default_factory=list)  # the first rows that are samples, at most 1,000
    begins: array[int] = field(default_factory=lambda: array("Q"))  # the line at which each row begins
    rejected: list[Reject] = field(default_factory=list)


def write_as_jsonl(file: IO[bytes], name: str, target: IO[bytes]) -> Table:
    """Write the rows as lines, in their order. A row with more or fewer cells than the header is rejected.

    Raises ValueError, with the line, for a table without a header or rows, or that is not UTF-8.
    """
    table = Table()
    with _wide_fields():
        rows = _rows(file, name)
        _, header = next(rows, (1, []))
        twice = next((column for column, count in Counter(header).items() if column and count > 1), None)
        if twice is not None:
            raise ValueError(f"{name}: {header.count(twice)} columns are named {twice!r}: give each a name of its own")
        if not header or not all(header):
            raise ValueError(f"{name}: expected a first line with a name of its own for each column, found {header}")
        _refuse_row(name, (cell for cell in header if is_url(cell)))
        for line, row in rows:
            table.begins.append(line)
            target.write(_as_json(table, header, row, f"{name}:{line}") + b"\n")
    if not table.begins:
        raise ValueError(f"{name}: no row below the names of its columns")
    return table


def _as_json(table: Table, header: list[str], row: list[str], place: str) -> bytes:
    """The object of a row; nothing for one that is rejected, so that those after it keep their numbers."""
    if len(row) != len(header):
        width = f"{counted(len(row), 'cell')}, where it has {counted(len(header), 'column')}"
        table.rejected.append(Reject(place, "", "not as wide as the header", width))
        return b""
    record = dict(zip(header, (cell or None for cell in row), strict=True))
    if len(table.head) < _LOOKED_AT:
        table.head.append(record)
    return json.dumps(record, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class _Column:
    """What the first rows hold in a column."""

    name: str
    cells: int  # that are not empty
    paths: list[str]  # those of them that are no URLs
    there: int  # those of them that are files

    @property
    def names_files(self) -> bool:
        return bool(self.name in FILE_FIELDS and self.paths) or (self.there > 0 and 2 * self.there >= self.cells)

    @property
    def holds_urls(self) -> bool:
        return self.cells > 0 and 2 * len(self.paths) <= self.cells

    @property
    def endings(self) -> set[str]:
        return {PurePosixPath(path).suffix.lower() for path in self.paths}


def file_columns(head: list[Row], root: Path, name: str) -> tuple[list[str], list[str]]:
    """The columns that name files, as `--file-field` would, and warnings: judged by the first rows.

    Those with one of the usual names, and those where half of the cells that are not empty are paths of files, or more.
    Raises ValueError if there is none, and a column holds URLs; and if a name of a column is the path of a file.
    """
    header = list(head[0]) if head else []
    _refuse_row(name, (cell for cell in header if _is_file(root, cell)))
    columns = [_look(column, head, root) for column in header]
    found = [column for column in columns if column.names_files]
    urls = next((column.name for column in columns if column.holds_urls), None)
    if not found and urls is not None:
        raise ValueError(
            f"{name}: the column {urls!r} holds URLs, not files; download them first, into tars that are read as "
            "they are, with img2dataset: see docs/bring-your-data.md. With --no-files they stay what they are, text"
        )
    fields = _as_fields(found)
    warnings = [
        f"{name}: the column {column.name!r} names {counted(column.there, 'file')} in {counted(len(head), 'row')} and "
        "is taken for text; if it names files, give "
        + " ".join(f"--file-field {each}" for each in [*fields, column.name])
        for column in columns
        if column.there and column not in found
    ]
    return fields, warnings


def _refuse_row(name: str, values: Iterable[str]) -> None:
    """Raises ValueError for a first line that is a row: it would be lost, and its cells be names of columns."""
    if value := next(iter(values), None):
        raise ValueError(
            f"{name}: the first line should name the columns, but has {value!r}, as a row has; put a line such as "
            "image,caption before it"
        )


def _look(column: str, head: list[Row], root: Path) -> _Column:
    cells = [cell for row in head if (cell := row[column])]
    paths = [cell for cell in cells if not is_url(cell)]
    return _Column(column, len(cells), paths, sum(_is_file(root, path) for path in paths))


def _is_file(root: Path, cell: str) -> bool:
    with contextlib.suppress(ValueError, OSError):
        return len(PurePosixPath(cell).suffix) > 1 and Path(root, cell).is_file()
    return False


def _as_fields(columns: list[_Column]) -> list[str]:
    """The columns as `--file-field` has them: their parts are named after a column whose endings one before it has."""
    fields, taken = [], set[str]()
    for column in columns:
        fields.append(column.name if taken.isdisjoint(column.endings) else f"{column.name}={column.name}")
        taken |= column.endings
    return fields


def _rows(file: IO[bytes], name: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line at which it begins. Raises ValueError, with the line."""
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    rows, begin = _reader(text, name), 1
    try:
        for row in rows:
            "".join(row).encode()
            if row:
                yield begin, row
            begin = rows.line_num + 1
    except UnicodeEncodeError as error:
        fault = f"it holds the byte 0x{ord(error.object[error.start]) & 0xFF:02x}"
    except csv.Error as error:
        fault = str(error)
    else:
        return
    raise ValueError(f"{name}:{begin}: cannot be read as a table in UTF-8: {fault}")


def _reader(text: io.TextIOWrapper, name: str) -> Any:
    if ".tsv" in name.lower():
        return csv.reader(text, delimiter="\t", strict=True)
    head = text.readline()
    separator = max(_SEPARATORS, key=head.count)
    return csv.reader(_with(head, text), delimiter=separator, strict=True)


def _with(head: str, text: io.TextIOWrapper) -> Iterator[str]:
    yield head
    yield from text


@contextlib.contextmanager
def _wide_fields() -> Iterator[None]:
    """Cells of any length, where Python reads 131,072 characters."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)
