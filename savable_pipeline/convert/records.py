"""Folders of files with numbered records, MDS and LitData: the samples that they hold, and how they are read.

Both formats begin a file with the number of its records, then where each begins and where the last one ends:

    count uint32 │ offsets uint32 (count + 1,) │ … │ record │ record │ …
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from savable_pipeline.convert.fields import Blob, Value, parts_of
from savable_pipeline.convert.folder import add_sample
from savable_pipeline.convert.model import Files, Input, Options, Part, Reject
from savable_pipeline.convert.names import printable
from savable_pipeline.convert.stretches import RecordError, RecordFile, Stretch
from savable_pipeline.errors import SavableError


class Schema(Protocol):
    """The fields of the records of a source; pickled into the processes that write shards."""

    def fields(self, record: Stretch, /) -> list[Value | Blob]:
        """The fields of a record. Raises `RecordError`."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A file of records, its schema, and the number of its first record."""

    file: RecordFile
    schema: Schema
    first: int
    count: int

    def record(self, number: int) -> Stretch:
        """A record by its number in the source."""
        content = self.file.content()
        begin, end = content.uint32s(4 + 4 * (number - self.first), 2)
        return content.part(begin, end - begin)


@dataclass(frozen=True, slots=True)
class RecordReader:
    """A `SampleReader` of numbered records."""

    files: tuple[Numbered, ...]

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `SavableError` if its file changed."""
        place = bisect.bisect(self.files, sample.record, key=lambda file: file.first) - 1
        numbered = self.files[place]
        try:
            parts = parts_of(numbered.schema.fields(numbered.record(sample.record)))
            return {part.extension: parts[part.extension].load() for part in sample.parts}
        except (RecordError, KeyError) as error:
            raise SavableError(
                f"{numbered.file.path}, record {sample.record}: cannot be read again: {error}"
            ) from error


def read_numbered(
    root: Path, index: bytes, files: list[Numbered], options: Options, check: Callable[[Numbered], None]
) -> Input:
    """The samples of files of records; `check` raises ValueError for a file that cannot be read at all."""
    found = Input(str(root), RecordReader(tuple(files)))
    digest = hashlib.sha256(index)
    seen: set[str] = set()
    for numbered in files:
        path = Path(numbered.file.path)
        (count,) = numbered.file.content().uint32s(0, 1)
        if count != numbered.count:
            raise ValueError(f"{path}: holds {count} records, but {numbered.count} by the index; copy it again")
        check(numbered)
        digest.update(f"{path.name}\0{numbered.file.size}\n".encode())
        for number, stretch in _records(numbered):
            record = _Record(path.relative_to(root).as_posix(), number, stretch)
            _add(found, record, numbered.schema, options.key_field, seen)
    found.digest = digest.hexdigest()
    return found


def _records(numbered: Numbered) -> Iterator[tuple[int, Stretch | RecordError]]:
    content = numbered.file.content()
    for i, (begin, end) in enumerate(pairwise(content.uint32s(4, numbered.count + 1))):
        try:
            yield numbered.first + i, content.part(begin, end - begin)
        except RecordError as error:
            yield numbered.first + i, error


@dataclass(frozen=True, slots=True)
class _Record:
    """A record, or why it has none, the file that it is in, and its number."""

    path: str
    number: int
    stretch: Stretch | RecordError

    @property
    def place(self) -> str:
        return f"{self.path}, record {self.number}"


def _add(found: Input, record: _Record, schema: Schema, key_field: str | None, seen: set[str]) -> None:
    """Add the sample of a record, or its reject."""
    key = f"{record.number:09d}"
    try:
        if isinstance(record.stretch, RecordError):
            raise record.stretch
        fields = schema.fields(record.stretch)
        if key_field is not None:
            key = _key(fields, key_field, seen)
        parts = [(Part(extension, record.path, blob.size), "") for extension, blob in parts_of(fields).items()]
        if not parts:
            raise RecordError("no field: a record without any")
    except RecordError as error:
        reason, _, detail = str(error).partition(": ")
        found.rejected.append(Reject(record.place, printable(key), reason, printable(detail)))
        return
    if add_sample(found, key, parts, record.number):
        seen.add(key)
    else:
        last = found.rejected[-1]
        found.rejected[-1] = Reject(record.place, last.key, last.reason, last.detail)


def _key(fields: list[Value | Blob], name: str, seen: set[str]) -> str:
    value: Any = next((field.value for field in fields if isinstance(field, Value) and field.name == name), None)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RecordError(f"no key: the field {name!r} holds {value!r}")
    if str(value) in seen:
        raise RecordError(f"duplicate key: {value!r} is the key of a record before it")
    return str(value)
