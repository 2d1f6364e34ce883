"""Folders of files with numbered records, MDS and LitData: the samples that they hold, and how they are read.

Both formats begin a file with the number of its records, then where each begins and where the last one ends:

    count uint32 │ offsets uint32 (count + 1,) │ … │ record │ record │ …
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.fields import Blob, Value, parts_of
from savable_pipeline.tools.convert.folder import add_sample
from savable_pipeline.tools.convert.model import Files, Input, Options, Part, Reject
from savable_pipeline.tools.convert.names import printable
from savable_pipeline.tools.convert.stretches import RecordError, RecordFile, Stretch

_FEW = 4  # one sample in so many of a file, and more, are worth all of it


class Schema(Protocol):
    """The fields of the records of a source; pickled into the processes that write shards."""

    def fields(self, record: Stretch, /) -> list[Value | Blob]:
        """The fields of a record. Raises `RecordError`."""


class Records(Protocol):
    """A file of records, and the number of its first one; pickled into the processes that write shards."""

    @property
    def file(self) -> RecordFile:
        """The file that holds them."""

    @property
    def first(self) -> int:
        """The number of the first one in the source."""

    @property
    def count(self) -> int:
        """How many they are."""

    def check(self) -> None:
        """Raises ValueError if the file is not what the index says, or cannot be read at all."""

    def fields(self, number: int, /) -> list[Value | Blob]:
        """The fields of a record by its number in the source. Raises `RecordError`, `SavableError` if it changed."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """Records that offsets tell, and their schema; `packed` is the compression of each by itself: zst, or none."""

    file: RecordFile
    schema: Schema
    first: int
    count: int
    packed: str = ""

    def check(self) -> None:
        """See `Records.check`."""
        check_count(self.file, number_at(self.file, 0), self.count)

    def fields(self, number: int) -> list[Value | Blob]:
        """See `Records.fields`."""
        content = self.file.content()
        begin, end = content.uint32s(4 + 4 * (number - self.first), 2)
        record = content.part(begin, end - begin)
        return self.schema.fields(record.inflated(self.packed) if self.packed else record)


def number_at(file: RecordFile, offset: int) -> int:
    """A number of 32 bits in a file. Raises ValueError if it is too short."""
    try:
        return file.content().uint32s(offset, 1)[0]
    except RecordError as error:
        raise ValueError(f"{file.path}: too short to hold records; copy it again") from error


def check_count(file: RecordFile, there: int, count: int) -> None:
    """Raises ValueError if a file holds another number of records than the index says."""
    if there != count:
        raise ValueError(f"{file.path}: holds {there} records, but {count} by the index; copy it again")


@dataclass(frozen=True, slots=True)
class RecordReader:
    """A `SampleReader` of numbered records."""

    files: tuple[Records, ...]

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`; of files with few of these samples nothing is announced."""
        for place, count in sorted(Counter(self._place(sample) for sample in samples).items()):
            if count * _FEW >= self.files[place].count:
                self.files[place].file.expect()

    def elsewhere(self, samples: list[Files]) -> RecordReader:
        """See `SampleReader.elsewhere`."""
        return self

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `SavableError` if its file changed."""
        records = self.files[self._place(sample)]
        try:
            parts = parts_of(records.fields(sample.record))
            return {part.extension: parts[part.extension].load() for part in sample.parts}
        except (RecordError, KeyError) as error:
            raise SavableError(f"{records.file.path}, record {sample.record}: cannot be read again: {error}") from error

    def _place(self, sample: Files) -> int:
        """The number of the file that a sample lies in."""
        return bisect.bisect(self.files, sample.record, key=lambda file: file.first) - 1


def read_numbered(root: str, index: bytes, files: Iterable[Records], options: Options) -> Input:
    """The samples of files of records, in their order. Raises ValueError for a file that cannot be read at all."""
    digest = hashlib.sha256(index)
    seen: set[str] = set()
    taken: list[Records] = []
    found = Input(root, RecordReader(()))
    for records in files:
        path = records.file.path.removeprefix(f"{root.rstrip('/')}/")
        records.check()
        taken.append(records)
        digest.update(f"{path.rpartition('/')[2]}\0{records.file.size}\n".encode())
        for number in range(records.first, records.first + records.count):
            _add(found, path, records, number, options.key_field, seen)
    found.reader = RecordReader(tuple(taken))
    found.digest = digest.hexdigest()
    return found


def _add(found: Input, path: str, records: Records, number: int, key_field: str | None, seen: set[str]) -> None:
    """Add the sample of a record of the file at `path`, or its reject."""
    key, place = f"{number:09d}", f"{path}, record {number}"
    try:
        fields = records.fields(number)
        if key_field is not None:
            key = _key(fields, key_field, seen)
        parts = [(Part(extension, path, blob.size), "") for extension, blob in parts_of(fields).items()]
        if not parts:
            raise RecordError("no field: a record without any")
    except RecordError as error:
        reason, _, detail = str(error).partition(": ")
        found.rejected.append(Reject(place, printable(key), reason, printable(detail)))
        return
    if add_sample(found, key, parts, number):
        seen.add(key)
    else:
        last = found.rejected[-1]
        found.rejected[-1] = Reject(place, last.key, last.reason, last.detail)


def _key(fields: list[Value | Blob], name: str, seen: set[str]) -> str:
    value: Any = next((field.value for field in fields if isinstance(field, Value) and field.name == name), None)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RecordError(f"no key: the field {name!r} holds {value!r}")
    if str(value) in seen:
        raise RecordError(f"duplicate key: {value!r} is the key of a record before it")
    return str(value)
