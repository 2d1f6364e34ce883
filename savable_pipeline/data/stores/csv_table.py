"""The format of CSV and TSV files, and its store: a row is a sample.

    image,caption
    a.jpg,a cat           →      {"image": "a.jpg", "caption": "a cat"}     strings; an empty cell is null

Blob of a file in the index: the offset of each non-blank row below the header, then the end of the file.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards.byte_source import ByteSource, RecordError, SourceFile
from savable_pipeline.data.shards.index import FileBlob
from savable_pipeline.data.shards.number_spool import NumberSpool
from savable_pipeline.data.stores.table_store import FILE_FIELDS, TableStore, folders_in, is_file, is_url, text_format

_SEPARATORS = ",;\t|"
_BLOCK = 1 << 20
_as_json = encode_basestring  # encodes a string as JSON
_WIDE = 1 << 17  # most bytes of a cell
_EXAMINED_ROWS = 1000  # rows that are inspected to find the columns that name files

Row: TypeAlias = list[str]


def _found_rows(file: ByteSource) -> tuple[str, FileBlob]:
    """Return what is wrong with a file, or "", and where its rows before that start.

    The offset of their end follows.
    """
    fault, begins = "", NumberSpool()
    try:
        with _wide_fields():
            for begin in _row_begins(file):
                begins.append(begin)
    except ValueError as error:
        fault = str(error)
    if not (fault and len(begins.numbers())):  # otherwise the last row may end after the fault
        begins.append(file.size)
    return fault, begins.numbers()


def _row_begins(file: ByteSource) -> Iterator[int]:
    """Yield where the rows below the header start. Raises ValueError, which starts with `:LINE`, for invalid rows."""
    rows = _rows(io.BufferedReader(SourceFile(file), _BLOCK), file.name)
    _, _, header = next(rows, (0, 1, []))
    if not any(header):
        raise ValueError(f": expected a first line with column names, found {header}")
    if re.fullmatch(r"sep=\W?", "".join(header)):
        raise ValueError(": the first line is Excel's mark of the separator, not column names. Remove this line")
    header = named(header)
    twice = next((column for column, count in Counter(header).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f": {header.count(twice)} columns are named {twice!r}. Give each its own name")
    reject_row("", (cell for cell in header if is_url(cell)))
    any_row = False
    for begin, _, _ in rows:
        any_row = True
        yield begin
    if not any_row:
        raise ValueError(": no row below the column names")


def named(header: Row) -> Row:
    """Return the names of columns, as pandas names them.

    A column without a name is called as pandas does, because pandas has often written it.

    >>> from savable_pipeline.data.stores.csv_table import named
    >>> named(["", "image"])
    ['Unnamed: 0', 'image']
    """
    return [name or f"Unnamed: {number}" for number, name in enumerate(header)]


def reject_row(name: str, values: Iterable[str]) -> None:
    """Raise ValueError if the first line is a row instead of the names of columns."""
    if value := next(iter(values), None):
        raise ValueError(
            f"{name}: the first line has {value!r}, not column names. Put a line such as image,caption before it"
        )


def _rows(file: Any, name: str) -> Iterator[tuple[int, int, Row]]:
    """Yield the rows that are not blank, each with its first byte and line. Raises ValueError."""
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    lines = _Counted(text)
    begin, line = 0, 1
    try:
        head = next(lines, "")
        rows = csv.reader(
            itertools.chain([head.removeprefix("\ufeff")], lines), delimiter=separator_of(head, name), strict=True
        )
        for row in rows:
            "".join(row).encode()
            if row:
                yield begin, line, row
            begin, line = lines.bytes, rows.line_num + 1
    except UnicodeEncodeError as error:
        fault = f"it holds the byte 0x{ord(error.object[error.start]) & 0xFF:02x}"
    except csv.Error as error:
        fault = f"{error}. Write it again with Python's csv.writer, which doubles quotes in cells"
    else:
        return
    raise ValueError(f":{line}: cannot be read as a table in UTF-8: {fault}")


class _Counted(Iterator[str]):
    """Lines of a text, with the number of bytes of those that were yielded."""

    def __init__(self, text: Iterable[str]) -> None:
        self._text, self.bytes = iter(text), 0

    def __next__(self) -> str:
        line = next(self._text)
        self.bytes += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
        return line


def separator_of(head: str, name: str) -> str:
    """Return the separator of a file `name` whose first line is `head`."""
    return "\t" if ".tsv" in name.lower() else max(_SEPARATORS, key=head.count)


@contextlib.contextmanager
def _wide_fields() -> Iterator[None]:
    """Allow cells of any length. Python's limit is 131,072 characters."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


@dataclass(frozen=True, slots=True)
class _Header:
    """First row of a file: its columns, their names as JSON, and the separator of cells."""

    columns: Row
    names: list[str]
    separator: str


class CsvStore(TableStore):
    """Rows of CSV and TSV files. Their part `json` has the cells as strings."""

    def usual_fields(self) -> Iterable[str]:
        """Return the columns that `file_columns` finds in the first file."""
        self.name_files(())
        name = self.entries.names[0].rpartition("/")[2]
        return file_columns(self, name)[0] if self.entries.samples[0] else ()

    def header(self, shard: int) -> Row:
        """Return the names of the columns of a file."""
        return self._headers(shard).columns

    def body(self, shard: int, raw: bytes, begin: int) -> bytes:
        """See `TableStore.body`."""
        return self._cells(shard, raw, begin)[1]

    def parsed(self, shard: int, raw: bytes, begin: int) -> tuple[dict[str, Any], bytes]:
        """See `TableStore.parsed`."""
        row, body = self._cells(shard, raw, begin)
        return dict(zip(self._headers(shard).columns, (cell or None for cell in row), strict=True)), body

    def _cells(self, shard: int, raw: bytes, begin: int) -> tuple[Row, bytes]:
        """Return the cells of a row and its JSON. Raises `RecordError`, `ShardError`."""
        header = self._known.get(shard) or self._headers(shard)
        try:
            with _wide_fields() if len(raw) > _WIDE else contextlib.nullcontext():
                (row,) = csv.reader([raw.decode().rstrip("\r\n")], delimiter=header.separator, strict=True)
        except (ValueError, csv.Error) as error:
            raise self.damaged(shard, f"byte {begin}", f"no row now: {error}", reason="changed shard") from error
        if len(row) != len(header.columns):
            width = f"{counted(len(row), 'cell')}, where it has {counted(len(header.columns), 'column')}"
            raise RecordError(f"not as wide as the header: {width}")
        cells = [
            name + encode_basestring(cell) if cell else f"{name}null"
            for name, cell in zip(header.names, row, strict=True)
        ]
        return row, f"{{{', '.join(cells)}}}".encode()

    def _headers(self, shard: int) -> _Header:
        found = self._known.get(shard)
        if found is None:
            head = self.files.read(shard, 0, int(self.blob(shard)[0])).removeprefix(codecs.BOM_UTF8)
            lines = list(io.StringIO(head.decode(), newline=""))
            separator = separator_of(lines[0], self.entries.names[shard])
            with _wide_fields():
                columns = named(next(row for row in csv.reader(lines, delimiter=separator, strict=True) if row))
            found = self._known[shard] = _Header(columns, [f"{_as_json(name)}: " for name in columns], separator)
        return found

    @cached_property
    def _known(self) -> dict[int, _Header]:
        return {}


@dataclass(frozen=True, slots=True)
class _Column:
    """Statistics of a column in the first rows."""

    name: str
    cells: int  # that are not empty
    paths: list[str]  # those of them that are no URLs
    existing: int  # those of them that are files

    @property
    def names_files(self) -> bool:
        return bool(self.name in FILE_FIELDS and self.paths) or (self.existing > 0 and 2 * self.existing >= self.cells)

    @property
    def endings(self) -> set[str]:
        return {PurePosixPath(path).suffix.lower() for path in self.paths}


def file_columns(store: CsvStore, name: str) -> tuple[list[str], list[str], str]:
    """Return the columns that name files, warnings, and a column of URLs.

    The column of URLs is only searched for if no column names files.

    The first rows of the first file decide. A column names files if it has one of the usual names, or if at least half
    of its non-empty cells are paths of files. Messages call the table `name`. Raises ValueError if the name of a column
    is the path of a file.
    """
    root, head = store.root_of(0), list(_first_rows(store))
    if not root:
        return [*FILE_FIELDS], [], ""
    reject_row(name, (cell for cell in store.header(0) if is_file(root, cell)))
    columns = [_examined(column, head, root) for column in store.header(0)]
    found = [column for column in columns if column.names_files]
    if not found:  # as the `clips/` of Common Voice
        few = [[_examined(column, head[:16], each) for column in store.header(0)] for each in folders_in(root)]
        below = [naming for each in few if (naming := [column for column in each if column.names_files])]
        found = below[0] if len(below) == 1 else []
    urls = next((column.name for column in columns if column.cells and 2 * len(column.paths) <= column.cells), "")
    fields = _as_fields(found)
    warnings = [
        f"{name}: the column {column.name!r} names {counted(column.existing, 'file')} in {counted(len(head), 'row')} "
        "and is taken for text; if it names files, give "
        + " ".join(f"--file-field {each}" for each in [*fields, column.name])
        for column in columns
        if column.existing and column not in found
    ]
    return fields, warnings, "" if found else urls


def _first_rows(store: CsvStore) -> Iterator[dict[str, str | None]]:
    """Yield the first rows that are samples, at most 1,000."""
    count, begins = 0, store.blob(0).tolist()
    for begin, raw in zip(begins, store.rows_in_order(0), strict=True):
        if raw and begin < begins[-1]:
            with contextlib.suppress(RecordError):
                yield store.parsed(0, raw, begin)[0]
                count += 1
        if count == _EXAMINED_ROWS:
            return


def _examined(column: str, head: list[dict[str, str | None]], root: str) -> _Column:
    cells = [cell for row in head if (cell := row[column])]
    paths = [cell for cell in cells if not is_url(cell)]
    return _Column(column, len(cells), paths, sum(is_file(root, path) for path in paths))


def _as_fields(columns: list[_Column]) -> list[str]:
    """Return the columns as `file_fields`.

    If two columns have the same extensions, the parts of the second have the column's name.
    """
    fields, taken = [], set[str]()
    for column in columns:
        fields.append(column.name if taken.isdisjoint(column.endings) else f"{column.name}={column.name}")
        taken |= column.endings
    return fields


CSV = text_format("csv", (".csv", ".tsv"), _found_rows, CsvStore, (".csv", ".tsv"))
