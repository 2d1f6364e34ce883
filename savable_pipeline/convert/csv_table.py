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
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from savable_pipeline.convert.jsonl import FILE_FIELDS, is_url

_SEPARATORS = ",;\t|"


def write_as_jsonl(table: IO[bytes], name: str, target: IO[bytes]) -> dict[str, str | None]:
    """Write the rows as lines, in their order; gives the first one.

    Raises ValueError for a table without a header or rows, or that is not UTF-8. A row with more or fewer cells than
    the header becomes a list, which is no sample.
    """
    first: dict[str, str | None] = {}
    with _wide_fields():
        try:
            rows = _rows(table, name)
            header = next(rows, [])
            if not header or len(set(header)) < len(header) or not all(header):
                raise ValueError(
                    f"{name}: expected a first line with a name of its own for each column, found {header}"
                )
            for row in filter(None, rows):
                record = dict(zip(header, (cell or None for cell in row), strict=False))
                first = first or record
                value = record if len(row) == len(header) else row
                target.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{name}: cannot be read as a table in UTF-8: {error}") from error
    if not first:
        raise ValueError(f"{name}: no row below the names of its columns")
    return first


def file_columns(first: dict[str, str | None], root: Path, name: str) -> list[str]:
    """The columns that name files, as `--file-field` would: judged by the first row.

    Those with one of the usual names, and those whose cell is the path of a file. Raises ValueError if there is none,
    and a cell is a URL.
    """
    found = [column for column, cell in first.items() if cell and _names_file(column, cell, root)]
    if not found and any(is_url(cell or "") for cell in first.values()):
        column = next(column for column, cell in first.items() if is_url(cell or ""))
        raise ValueError(
            f"{name}: the column {column!r} holds URLs, not files; download them first, into tars that are read as "
            "they are, with img2dataset: see docs/bring-your-data.md. With --no-files they stay what they are, text"
        )
    suffixes = [PurePosixPath(first[column] or "").suffix.lower() for column in found]
    return [
        column if suffixes.index(suffix) == i else f"{column}={column}"
        for i, (column, suffix) in enumerate(zip(found, suffixes, strict=True))
    ]


def _names_file(column: str, cell: str, root: Path) -> bool:
    if is_url(cell):
        return False
    with contextlib.suppress(ValueError, OSError):
        if len(PurePosixPath(cell).suffix) > 1 and Path(root, cell).is_file():
            return True
    return column in FILE_FIELDS


def _rows(table: IO[bytes], name: str) -> Iterator[list[str]]:
    text = io.TextIOWrapper(table, "utf-8-sig", newline="")
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
