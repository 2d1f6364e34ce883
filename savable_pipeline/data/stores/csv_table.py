"""The format of CSV and TSV files, and its store: a row is a sample.

    image,caption
    a.jpg,a cat           →      {"image": "a.jpg", "caption": "a cat"}     strings; an empty cell is null

Some programs never quote the cells of a TSV file, such as those of Common Voice. Quotes are then text, which is decided
when the file is indexed: see `quotes_are_text`.

Blob of a file in the index: the offset of each non-blank row below the header, then the end of the file, which is
repeated if quotes are text.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from json.encoder import encode_basestring
from typing import Any, TypeAlias

from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards.byte_source import ByteSource, RecordError, SourceFile
from savable_pipeline.data.shards.index import FileBlob
from savable_pipeline.data.shards.number_spool import NumberSpool
from savable_pipeline.data.stores.sample_names import is_media_file, suffix_of
from savable_pipeline.data.stores.table_store import FILE_FIELDS, TableStore, folders_in, is_file, is_url, text_format

_SEPARATORS = ",;\t|"
_BLOCK = 1 << 20
_WIDE = 1 << 17  # the default limit of Python's csv for the characters of a cell
_EXAMINED_ROWS = 1000  # rows that are inspected to find the columns that name files
_QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell with quotes as a CSV writer writes them
_COMPARED_CELLS = 16  # most quoted cells of a column that are compared with unquoted ones
_SOLUTION = "Write it again as JSONL"

Row: TypeAlias = list[str]


def _find_rows(file: ByteSource) -> tuple[str, FileBlob]:
    """Return the fault of a file, or "", and the blob with the offsets of the rows before the fault."""
    fault, begins = "", NumberSpool()
    lines = partial(_lines_of, file)
    plain = quotes_are_text(lines, file.name)
    try:
        with _any_cell_length():
            for begin in _row_begins(_rows(lines(), file.name, plain=plain)):
                begins.append(begin)
    except ValueError as error:
        fault = str(error)
        if fault.endswith(_SOLUTION) and ".tsv" in file.name.lower() and (number := _shape(lines())[1]):
            fault += f", or give line {number} as many cells as the first line, so that quotes can be text"
    if not (fault and len(begins.numbers())):  # otherwise the last row may end after the fault
        begins.append(file.size)
    if plain:
        begins.append(int(begins.numbers()[-1]))
    return fault, begins.numbers()


def _lines_of(file: ByteSource) -> Iterator[str]:
    binary: Any = io.BufferedReader(SourceFile(file), _BLOCK)
    return io.TextIOWrapper(binary, "utf-8", errors="surrogateescape", newline="")


def quotes_are_text(lines: Callable[[], Iterable[str]], name: str) -> bool:
    """Return whether the quotes in a TSV file are a part of its text.

        id  sentence
        1   "Hello," she said     a CSV writer quotes whole cells, and doubles the quotes in them
        2   "Bye."                and it would quote both of these or neither, as each has a dot at its end
        3   Goodbye.

    One such cell suffices, if each line has as many cells as the first, which has several and no quotes. A quoted cell
    of only letters and digits, such as "007", shows nothing, because some programs quote it to keep it text.

    Args:
        lines: Returns the lines of the file, with their ends.
        name: The name of the file.
    """
    header, uneven = _shape(lines()) if ".tsv" in name.lower() else ("", 0)
    if uneven or "\t" not in header or '"' in header:
        return False
    quoted: dict[int, list[set[str]]] = {}
    for _, line in _with_text(lines()):
        for column, cell in enumerate(line.rstrip("\r\n").split("\t") if '"' in line else ()):
            is_quoted = _QUOTED.fullmatch(cell)
            if '"' in cell and not is_quoted and line[-1] in "\r\n":  # another last line may have been cut
                return True
            signs = _signs_of(cell[1:-1]) if is_quoted and '""' not in cell else set[str]()
            if signs and len(found := quoted.setdefault(column, [])) < _COMPARED_CELLS:
                found.append(signs)
    rows = (row.strip("\r\n").split("\t") for _, row in itertools.islice(_with_text(lines()), 1, None if quoted else 1))
    cells = ((row[column], found) for row in rows for column, found in quoted.items() if '"' not in row[column])
    return any(each <= _signs_of(cell) for cell, found in cells if cell for each in found)


def _signs_of(cell: str) -> set[str]:
    """Return signs of a cell for which a CSV writer may quote it, also as "first SIGN" and "last SIGN"."""
    return {sign for sign in (*cell, f"first {cell[0]}", f"last {cell[-1]}") if not sign[-1].isalnum()}


def _shape(lines: Iterable[str]) -> tuple[str, int]:
    """Return the first line that is not blank, and the number of the first line with another number of tabs, or 0."""
    rows = _with_text(lines)
    _, header = next(rows, (0, ""))
    return header, next((number for number, line in rows if line.count("\t") != header.count("\t")), 0)


def _with_text(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip("\r\n"))


def _row_begins(rows: Iterator[tuple[int, int, Row]]) -> Iterator[int]:
    """Yield where the rows below the header start. Raises ValueError, which starts with `:LINE`, for invalid rows."""
    _, _, header = next(rows, (0, 1, []))
    if not any(header):
        raise ValueError(f": expected a first line with column names, found {header}")
    if re.fullmatch(r"sep=\W?", "".join(header)):
        raise ValueError(": the first line is Excel's mark of the separator, not column names. Remove this line")
    header = column_names(header)
    repeated = next((column for column, count in Counter(header).items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f": {header.count(repeated)} columns are named {repeated!r}. Give each its own name")
    reject_row("", (cell for cell in header if is_url(cell)))
    any_row = False
    for begin, _, _ in rows:
        any_row = True
        yield begin
    if not any_row:
        raise ValueError(": no row below the column names")


def column_names(header: Row) -> Row:
    """Return the names of columns by the header of a table.

    A column without a name is named as pandas names it, because pandas often wrote the file.

    >>> from savable_pipeline.data.stores.csv_table import column_names
    >>> column_names(["", "image"])
    ['Unnamed: 0', 'image']
    """
    return [name or f"Unnamed: {number}" for number, name in enumerate(header)]


def reject_row(name: str, values: Iterable[str]) -> None:
    """Raise ValueError if there are `values` that only a row has in the first line."""
    if value := next(iter(values), None):
        raise ValueError(f"{name}: the first line has {value!r}, not column names. Add a line such as image,caption")


def _rows(text: Iterable[str], name: str, *, plain: bool) -> Iterator[tuple[int, int, Row]]:
    """Yield (first byte, first line, cells) of the rows that are not blank. Raises ValueError."""
    source, lines = iter(text), list[str]()  # the lines of the current row
    begin, number, tabs = 0, 1, -1
    head = next(source, "")

    def next_lines() -> Iterator[str]:
        for line in itertools.chain([head], source):
            lines.append(line)
            yield line if begin else line.removeprefix("\ufeff")

    separator = separator_of(head, name)
    rows = csv_rows(next_lines(), separator, plain=plain)
    try:
        for row in rows:
            "".join(row).encode()
            if len(lines) > 1 and separator == "\t" and lines[0].count("\t") == lines[-1].count("\t") == tabs:
                raise csv.Error(f"quotes join the lines to {rows.line_num} into one row, but each has all cells")
            if row:
                tabs = len(row) - 1 if tabs < 0 else tabs
                yield begin, number, row
            begin += sum(len(line) if line.isascii() else len(line.encode("utf8", "surrogateescape")) for line in lines)
            number += len(lines)
            lines.clear()
    except UnicodeEncodeError as error:
        fault = f"it holds the byte 0x{ord(error.object[error.start]) & 0xFF:02x}"
    except csv.Error as error:
        fault = f"{error}. {_SOLUTION}"
    else:
        return
    raise ValueError(f":{number}: cannot be read as a table in UTF-8: {fault}")


def csv_rows(lines: Iterable[str], separator: str, *, plain: bool) -> Any:
    """Return Python's reader of the rows in lines. With `plain`, quotes are text."""
    if plain:
        return csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE, strict=True)
    return csv.reader(lines, delimiter=separator, strict=True)


def separator_of(head: str, name: str) -> str:
    """Return the separator of a file `name` whose first line is `head`."""
    return "\t" if ".tsv" in name.lower() else max(_SEPARATORS, key=head.count)


@contextlib.contextmanager
def _any_cell_length() -> Iterator[None]:
    """Allow cells of any length. Python's limit is 131,072 characters."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


@dataclass(frozen=True, slots=True)
class _Header:
    """First row of a file."""

    columns: Row
    names: list[str]  # of the columns, as JSON with a colon
    separator: str  # of cells
    plain: bool  # whether quotes are text


class CsvStore(TableStore):
    """Rows of CSV and TSV files. Their part `json` has the cells as strings."""

    def usual_fields(self) -> Iterable[str]:
        """Return the columns that `file_columns` finds in the first file."""
        self.name_files(())  # until the columns are known, no column names files
        name = self.entries.names[0].rpartition("/")[2]
        fields, _, _ = file_columns(self, name) if self.entries.samples[0] else ([], [], "")
        return fields

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
        header = self._known_headers.get(shard) or self._headers(shard)
        try:
            with _any_cell_length() if len(raw) > _WIDE else contextlib.nullcontext():
                (row,) = csv_rows([raw.decode().rstrip("\r\n")], header.separator, plain=header.plain)
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
        if (found := self._known_headers.get(shard)) is None:
            head = self.files.read(shard, 0, int(self.blob(shard)[0])).removeprefix(codecs.BOM_UTF8)
            lines = list(io.StringIO(head.decode(), newline=""))
            separator = separator_of(lines[0], self.entries.names[shard])
            plain = len(self.blob(shard)) > self.entries.samples[shard] + 1
            with _any_cell_length():
                columns = column_names(next(row for row in csv_rows(lines, separator, plain=plain) if row))
            names = [f"{encode_basestring(name)}: " for name in columns]
            found = self._known_headers[shard] = _Header(columns, names, separator, plain)
        return found

    @cached_property
    def _known_headers(self) -> dict[int, _Header]:
        return {}


def file_columns(store: CsvStore, name: str) -> tuple[list[str], list[str], str]:
    """Return the columns that name files, warnings, and a column of URLs, or "".

    The column of URLs is only searched for if no column names files.

    The first rows of the first file decide. A column names files if it has one of the usual names, or if at least half
    of its non-empty cells are paths of files. Messages call the table `name`. Raises ValueError if the name of a column
    is the path of a file.
    """
    root, rows, header = store.root_of(0), list(_first_rows(store)), store.header(0)
    if not root:  # a remote table: a row that names media is an error, because they are not read
        texts = [(c, row[c] or "") for row in rows[:16] for c in header]
        return [*dict.fromkeys([*FILE_FIELDS, *(c for c, t in texts if is_media_file(t) and not is_url(t))])], [], ""
    reject_row(name, (cell for cell in header if is_file(root, cell)))
    cells = {column: [cell for row in rows if (cell := row[column])] for column in header}
    paths = {column: [cell for cell in cells[column] if not is_url(cell)] for column in header}
    files = {column: _count_files(root, paths[column]) for column in header}
    naming = [c for c in header if (c in FILE_FIELDS and paths[c]) or 0 < len(cells[c]) <= 2 * files[c]]
    if not naming:  # the files may be in a folder beside the table, such as the `clips/` of Common Voice
        few = {column: cells[column][:16] for column in header if cells[column]}
        below = [[c for c in few if len(few[c]) <= 2 * _count_files(folder, few[c])] for folder in folders_in(root)]
        naming = found[0] if len(found := [*filter(None, below)]) == 1 else []
    fields = as_fields({column: paths[column] for column in naming})
    warnings = [
        f"{name}: the column {column!r} names {counted(count, 'file')} in {counted(len(rows), 'row')} "
        "and is taken for text; if it names files, give "
        + " ".join(f"--file-field {each}" for each in [*fields, column])
        for column, count in files.items()
        if count and column not in naming
    ]
    urls = next((c for c in header if cells[c] and 2 * len(paths[c]) <= len(cells[c])), "")
    return fields, warnings, "" if naming else urls


def _first_rows(store: CsvStore) -> Iterator[dict[str, str | None]]:
    """Yield the samples in the first 1,000 rows."""
    for row in range(min(_EXAMINED_ROWS, int(store.entries.samples[0]))):
        with contextlib.suppress(RecordError):
            yield store.row_of(0, row)[0]


def _count_files(folder: str, cells: list[str]) -> int:
    return sum(is_file(folder, cell) for cell in cells)


def as_fields(named: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the setting `file_fields` for columns with these paths.

    If two columns have the same suffixes, the second gives its name to its parts.
    """
    fields, taken = [], set[str]()
    for column, paths in named.items():
        suffixes = {suffix_of(path) for path in paths}
        fields.append(column if taken.isdisjoint(suffixes) else f"{column}={column}")
        taken |= suffixes
    return fields


CSV = text_format("csv", (".csv", ".tsv"), _find_rows, CsvStore, (".csv", ".tsv"))
