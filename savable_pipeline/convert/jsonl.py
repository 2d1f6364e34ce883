"""What a conversion reads from JSONL: each line is a sample, its object the `json` part, byte for byte.

Some fields name files, relative to the folder of the JSONL or another; these become parts of their own:

    {"image": "img/cat.jpg", "text": "a cat"}      →      000000001: jpg, json
    {"image": ["a.jpg", "b.jpg"]}                  →      000000002: 0.jpg, 1.jpg, json
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from savable_pipeline.convert.source import Input, Options, Part, Reject, add_sample, outside, printable

FILE_FIELDS = ("image", "audio", "video", "file", "file_name")
TEXT_FIELDS = ("caption", "text")
_BOM = b"\xef\xbb\xbf"


class _FaultError(Exception):
    """Why a line is no sample: `reason: detail`."""


@dataclass(slots=True)
class _Lines:
    """What reading the lines needs to know, and the keys seen so far with their lines."""

    path: Path
    root: str
    options: Options
    fields: list[tuple[str, str]]  # name in the object, name of the part or ""
    keys: dict[str, int]  # only with a key field: the numbers of lines are unique


def read_jsonl(path: Path, files_from: Path | None, options: Options) -> Input:
    """The samples of a JSONL file, in its order. Raises OSError."""
    found = Input(os.path.realpath(files_from or path.parent))
    lines = _Lines(path, found.root, options, _file_fields(options), {})
    digest = hashlib.sha256()
    texts = set(TEXT_FIELDS)
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            mark = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            if line[mark:].strip():
                texts &= _add_line(found, lines, number, line[mark:], offset + mark)
            offset += len(line)
    found.digest = digest.hexdigest()
    found.texts = frozenset(texts) if found.samples else frozenset()
    return found


def _add_line(found: Input, lines: _Lines, number: int, raw: bytes, start: int) -> set[str]:
    """Add the sample of one line, or its reject; gives the text fields that it does not rule out."""
    key = ""
    try:
        value = _object(raw)
        key = _key(lines, number, value)
        parts = _file_parts(lines, value)
    except _FaultError as fault:
        reason, _, detail = str(fault).partition(": ")
        found.rejected.append(Reject(f"{lines.path.name}:{number}", printable(key), reason, printable(detail)))
        return set(TEXT_FIELDS)
    body = raw.strip()
    offset = start + len(raw) - len(raw.lstrip())
    parts.append((Part("json", str(lines.path.absolute()), len(body), offset), ""))
    if not add_sample(found, key, sorted(parts, key=lambda pair: pair[0].extension)):
        found.rejected[-1] = _at_line(found.rejected[-1], lines.path, number)
        return set(TEXT_FIELDS)
    if lines.options.key_field is not None:
        lines.keys[key] = number
    return {name for name in TEXT_FIELDS if isinstance(value.get(name), str)}


def _at_line(reject: Reject, path: Path, number: int) -> Reject:
    """The same reject, told by its line: the file that it names may be right for another line."""
    detail = reject.detail if reject.file == str(path.absolute()) else f"{reject.file}: {reject.detail}"
    return Reject(f"{path.name}:{number}", reject.key, reject.reason, detail.removesuffix(": "))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise _FaultError(f"malformed JSON: {error}") from error
    if not isinstance(value, dict):
        raise _FaultError(f"not a JSON object: the line holds {type(value).__name__}")
    return value


def _key(lines: _Lines, number: int, value: dict[str, Any]) -> str:
    name = lines.options.key_field
    if name is None:
        return f"{number:09d}"
    key = value.get(name)
    if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
        raise _FaultError(f"no key: the field {name!r} holds {key!r}")
    if str(key) in lines.keys:
        raise _FaultError(f"duplicate key: {key!r} is the key of line {lines.keys[str(key)]} already")
    return str(key)


def _file_fields(options: Options) -> list[tuple[str, str]]:
    pairs = [name.partition("=") for name in (FILE_FIELDS if options.file_fields is None else options.file_fields)]
    return [(name, part) for name, _, part in pairs]


def _file_parts(lines: _Lines, value: dict[str, Any]) -> list[tuple[Part, str]]:
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


def _file_part(lines: _Lines, field: str, name: str, prefix: str) -> tuple[Part, str]:
    where = f"the field {field!r} names {name[:200]!r}"
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
