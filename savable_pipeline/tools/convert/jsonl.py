"""Reading JSONL: each line is a sample, and its object the part `json`, byte for byte.

Some fields name files, relative to the folder of the JSONL or another; these become parts of their own:

    {"image": "img/cat.jpg", "text": "a cat"}      →      000000001: jpg, json
    {"image": ["a.jpg", "b.jpg"]}                  →      000000002: 0.jpg, 1.jpg, json
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.tools.convert.file_reader import FileReader
from savable_pipeline.tools.convert.folder import add_sample
from savable_pipeline.tools.convert.model import Input, Options, Part, Reject
from savable_pipeline.tools.convert.names import outside, printable
from savable_pipeline.tools.convert.source_file import open_source, stamp_of
from savable_pipeline.tools.convert.source_words import FILE_FIELDS
from savable_pipeline.tools.convert.stretches import RecordFile

TEXT_FIELDS = ("caption", "text")
BOM = b"\xef\xbb\xbf"
_URL = "a URL, not a file"
_SHARED = 1.1  # times the bytes of the files


def is_url(text: str) -> bool:
    """Whether a field holds an address of the web."""
    return text.startswith(("http://", "https://", "s3://", "gs://", "ftp://"))


class _FaultError(Exception):
    """Why a line is no sample: `reason: detail`."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Where records lie, and how they are read."""

    path: Path | str  # of the file that holds them, or its URL
    file: RecordFile | None  # the same, as it was before it was read; None behind a URL
    name: str  # by which rejects call that file
    root: str  # a real path: of the files that fields name; "" where there can be none
    options: Options
    fields: list[tuple[str, str]]  # name in the object, name of the part or ""
    keys: dict[str, int]  # seen so far, with their lines; only with a key field: the numbers of lines are unique
    begins: Sequence[int] | None = None  # the line at which each record begins; None: its own number

    def line(self, number: int) -> int:
        """The line at which a record begins, counted from 1 as the records are."""
        return number if self.begins is None else self.begins[number - 1]

    @property
    def address(self) -> str:
        """The file that holds the records, as parts name it."""
        return str(self.path.absolute()) if isinstance(self.path, Path) else self.path

    def place(self, number: int) -> str:
        """A record as rejects name it: file and line."""
        return f"{self.name}:{self.line(number)}"


def lines_of(
    path: Path | str,
    name: str,
    root: Path | None,
    options: Options,
    fields: Iterable[str] | None = None,
    begins: Sequence[int] | None = None,
) -> Lines:
    """The settings for reading the records in `path`, which rejects call `name`; `fields` name files.

    (None: those of the options, or the usual ones.) Raises OSError.
    """
    if fields is None:
        fields = FILE_FIELDS if options.file_fields is None else options.file_fields
    pairs = [field.partition("=") for field in fields]
    named = [(field, part) for field, _, part in pairs]
    real = "" if root is None else os.path.realpath(root)
    file = RecordFile.at(path.absolute()) if isinstance(path, Path) else None
    return Lines(path, file, name, real, options, named, {}, begins)


def read_jsonl(lines: Lines) -> Input:
    """The samples of a JSONL file, in its order. Raises OSError."""
    digest = hashlib.sha256()
    found = read_records(lines, _lines(lines.path, digest.update))
    found.digest = digest.hexdigest()
    return found


def read_records(lines: Lines, records: Iterable[tuple[int, bytes, int]]) -> Input:
    """The samples of records: number, JSON, and where it begins in the file."""
    found = Input(lines.root, FileReader(lines.root, lines.file))
    if isinstance(lines.path, str):
        found.reader = FileReader(lines.root, None, lines.path, stamp_of(lines.path))
    texts = set(TEXT_FIELDS)
    for number, raw, start in records:
        texts &= _add_line(found, lines, number, raw, start)
    found.texts = frozenset(texts) if found.samples else frozenset()
    found.warnings += _shared(found)
    _refuse_urls(lines, found)
    return found


def _lines(path: Path | str, update: Callable[[bytes], None]) -> Iterator[tuple[int, bytes, int]]:
    """The lines that are not blank, each with its number and offset; `update` is given every byte."""
    offset = 0
    with open_source(path) as file:
        for number, line in enumerate(file, 1):
            update(line)
            mark = len(BOM) if number == 1 and line.startswith(BOM) else 0
            if line[mark:].strip():
                yield number, line[mark:], offset + mark
            offset += len(line)


def _shared(found: Input) -> list[str]:
    """A warning if files are named by several records, since each gets their bytes."""
    sizes: dict[str, int] = {}
    uses, total = 0, 0
    for sample in found.samples:
        for part in sample.parts:
            if part.offset is None:
                uses += 1
                total += part.size
                sizes[part.path] = part.size
    factor = total / max(1, sum(sizes.values()))
    if factor < _SHARED:
        return []
    return [
        f"{uses:,} uses of {len(sizes):,} files: those that several records name are stored with each, which takes "
        f"{factor:.1f} times their {human_bytes(sum(sizes.values()))}; put what belongs to one file into one record to "
        "store it once"
    ]


def _refuse_urls(lines: Lines, found: Input) -> None:
    named = next((reject.detail for reject in found.rejected if reject.reason == _URL), None)
    if found.samples or named is None:
        return
    raise ValueError(
        f"{lines.name}: its records name URLs, not files, such as {named}; download them first, "
        "into tars that are read as they are, with img2dataset: see docs/bring-your-data.md. With --no-files they "
        "stay what they are, text"
    )


def _add_line(found: Input, lines: Lines, number: int, raw: bytes, start: int) -> set[str]:
    """Add the sample of one line, or its reject; gives the text fields that may hold text in every line."""
    key = ""
    try:
        value = _object(raw)
        key = _key(lines, number, value)
        parts = _file_parts(lines, value)
    except _FaultError as fault:
        reason, _, detail = str(fault).partition(": ")
        found.rejected.append(Reject(lines.place(number), printable(key), reason, printable(detail)))
        return set(TEXT_FIELDS)
    body = raw.strip()
    offset = start + len(raw) - len(raw.lstrip())
    parts.append((Part("json", lines.address, len(body), offset), ""))
    if not add_sample(found, key, sorted(parts, key=lambda pair: pair[0].extension)):
        found.rejected[-1] = _at_line(found.rejected[-1], lines, number)
        return set(TEXT_FIELDS)
    if lines.options.key_field is not None:
        lines.keys[key] = lines.line(number)
    return {name for name in TEXT_FIELDS if isinstance(value.get(name), str)}


def _at_line(reject: Reject, lines: Lines, number: int) -> Reject:
    """The same reject with its line in the place of the file, which may be right for another line."""
    detail = reject.detail if reject.file == lines.address else f"{reject.file}: {reject.detail}"
    return Reject(lines.place(number), reject.key, reject.reason, detail.removesuffix(": "))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise _FaultError(f"malformed JSON: {error}") from error
    if not isinstance(value, dict):
        raise _FaultError(f"not a JSON object: the line holds {type(value).__name__}")
    return value


def _key(lines: Lines, number: int, value: dict[str, Any]) -> str:
    name = lines.options.key_field
    if name is None:
        return f"{number:09d}"
    key = value.get(name)
    if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
        raise _FaultError(f"no key: the field {name!r} holds {key!r}")
    if str(key) in lines.keys:
        raise _FaultError(f"duplicate key: {key!r} is the key of line {lines.keys[str(key)]} already")
    return str(key)


def _file_parts(lines: Lines, value: dict[str, Any]) -> list[tuple[Part, str]]:
    parts = []
    for name, prefix in lines.fields:
        paths = value.get(name)
        if paths is None:
            continue
        if isinstance(paths, str):
            parts.append(_file_part(lines, name, paths, prefix))
        elif isinstance(paths, list) and all(isinstance(path, str) for path in paths):
            for i, path in enumerate(paths):
                parts.append(_file_part(lines, name, path, f"{prefix}.{i}" if prefix else str(i)))
        else:
            raise _FaultError(f"not a file's name: the field {name!r} holds {paths!r}"[:200])
    return parts


def _file_part(lines: Lines, field: str, name: str, prefix: str) -> tuple[Part, str]:
    where = f"the field {field!r} names {name[:200]!r}"
    if is_url(name):
        raise _FaultError(f"{_URL}: {where}")
    if not lines.root:
        raise ValueError(
            f"{lines.name}: {where}, and files beside a URL are not read: copy them to a disk and give --files-from "
            "FOLDER; with --no-files the fields stay what they are, text"
        )
    path = PurePosixPath(name)
    if len(path.suffix) < 2:
        raise _FaultError(f"no extension: {where}")
    try:
        leaves = path.is_absolute() or ".." in path.parts or outside(lines.root, f"{lines.root}/{name}")
        if leaves and not lines.options.allow_outside:
            raise _FaultError(f"outside the source: {where}; --allow-outside takes it")
        status = Path(lines.root, name).stat()
    except (ValueError, OSError) as error:  # not there, or no name for a file: too long, or with a NUL
        raise _FaultError(f"missing file: {where}") from error
    if not stat.S_ISREG(status.st_mode):
        raise _FaultError(f"not a regular file: {where}")
    suffix = path.suffix.removeprefix(".")
    return Part(f"{prefix}.{suffix}" if prefix else suffix, name, status.st_size), ""
