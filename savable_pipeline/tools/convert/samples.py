"""Samples of a source: the key and the parts of each, or why it is rejected.

source              parts                            key in the tar
folder              files, and `cls`                 path, with _ for dots after the first
table               `json`, files that fields name   number from 1, or a field
MDS, LitData        those of the store               number from 0, or a field
Parquet, Arrow      those of the store, and files    FILE/ROW, or a column
tars                those of the store               the same
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from savable_pipeline.core.file_heads import HEAD, text_error
from savable_pipeline.data.shards.byte_source import RecordError
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS
from savable_pipeline.data.stores.folder_store import CLASS, FOLDER, class_of, tar_key
from savable_pipeline.data.stores.jsonl import JSONL
from savable_pipeline.data.stores.sample_names import Reject, outside, parts_fault, printable
from savable_pipeline.data.stores.table_store import JSON, LINE
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.options import Options
from savable_pipeline.tools.convert.part_data import LongPart, PartData, data_fault, file_data, is_long
from savable_pipeline.tools.convert.source import RECORDS, TABLES, RowSpan, SourceFiles, changed

if TYPE_CHECKING:
    from savable_pipeline.data.dataset.dataset import Dataset

TEXT_FIELDS = ("caption", "text")
_MEDIA = frozenset((*IMAGE_PARTS, *AUDIO_PARTS, *VIDEO_PARTS))
_NUMBERED = re.compile(r"[0-9]+[.]")  # one of several files of one field: 0.jpg, 1.jpg
CHANGED = ("changed shard", "missing shard", "missing file")  # `reason` of a `ShardError` if the source has changed
_AHEAD = 4096  # number of rows that a store prefetches together
_MAX_FOLDERS = 100_000  # names of top folders beyond that are not collected


class Statistics(msgspec.Struct):
    """Counts and names over samples, which add up over ranges."""

    parts: dict[str, int] = {}  # number of samples with each part
    nulls: dict[str, int] = {}  # number of rows without a value, by column
    layouts: set[tuple[str, ...]] = set()  # sorted parts that samples have
    not_texts: set[str] = set()  # fields of `TEXT_FIELDS` that are missing or not strings in some row
    renamed: int = 0  # number of keys with dots, which a tar cannot have
    examples: set[str] = set()  # a few renamed keys, with their new names
    uses: int = 0  # number of times that records name a file
    used_bytes: int = 0  # bytes of files that records name, counted at each use
    files: int = 0  # number of different files that records name
    file_bytes: int = 0  # bytes of these files, each counted once
    named: int = 0  # number of files that rows of columns name without their bytes
    repeats: int = 0  # number of repeated keys
    repeated: set[str] = set()  # a few repeated keys
    others: int = 0  # number of ranges with a sample that is not a single image, audio or video in a folder
    folders: set[str] = set()  # names of top folders
    found: set[str] = set()  # requested keys that were found
    dropped: set[str] = set()  # names of parts that were not chosen

    def add(self, other: Statistics) -> None:
        """Add the statistics of other samples: sums of counts, and unions of names."""
        for name in self.__struct_fields__:
            own, added = getattr(self, name), getattr(other, name)
            if isinstance(own, dict):
                setattr(self, name, dict(Counter(own) + Counter(added)))
            else:
                setattr(self, name, own | added if isinstance(own, set) else own + added)


class Part(NamedTuple):
    """A part of a sample: its extension, its file as rejects name it, and its bytes."""

    extension: str
    file: str
    data: PartData


class TarSample(NamedTuple):
    """A sample: its key, its parts, and a function that returns its name in rejects."""

    key: str
    parts: list[Part]
    name: Callable[[], str]


class RejectedError(Exception):
    """Error: a sample is rejected.

    `fault` is `reason: detail`, and `file` names its file or row in the list of rejects.
    """

    def __init__(self, file: str, key: str, fault: str) -> None:
        self.reject = Reject.of(printable(file), key, fault)
        super().__init__(fault)


class SampleReader:
    """Reads the samples of a source that have the chosen `keys` (None: all).

    It adds to `statistics`, and puts bad samples into `rejected`.
    """

    def __init__(self, source: SourceFiles, dataset: Dataset, options: Options, keys: Collection[str] | None) -> None:
        self.statistics, self.rejected = Statistics(), list[Reject]()
        self._source, self._dataset, self._options, self._keys = source, dataset, options, keys
        self._store = cast("Any", dataset.store)
        self._only = frozenset(name.lower() for name in options.only)
        self._last_line = -1, 0, 1  # of the last reject: number of its file, offset and number of its line
        self._used: set[int] = set()  # hashes of the names of files that records name
        self._parsed: PartData = b""  # the JSON of the last row of a table, which is known to be valid
        self._layouts, self._nulls = Counter[tuple[str, ...]](), Counter[str]()
        self._may_name_files = source.form.name in ("parquet", "arrow")
        self._media: list[str] = self._store.media_named(self._only) if self._may_name_files and self._only else []

    def samples(self, span: RowSpan) -> Iterator[TarSample]:
        """Yield the samples of some rows. Raises `SavableError` if the source changed."""
        readers = {FOLDER: self._read_folder, **dict.fromkeys(TABLES, self._read_table)}
        # `read(file, row, number)` returns the sample, or None if its key is not chosen
        read: Callable[[int, int, int], TarSample | None] = readers.get(self._source.form, self._read_store)
        try:
            self._store.validate(span.file)
            first = int(self._dataset.firsts[span.file])
            for start in range(span.start, span.end, _AHEAD):
                indices = np.arange(first + start, first + min(start + _AHEAD, span.end))
                self._store.prefetch(indices)
                rows = self._dataset.locate(indices)[1]
                for number, row in enumerate(rows.tolist(), span.number + start - span.start):
                    try:
                        sample = read(span.file, row, number)
                        if sample is not None:
                            self._check(sample)
                            yield sample
                    except RejectedError as error:
                        self.rejected.append(error.reject)
            self._store.verify_yielded()
            self._source.check(span.file)
        except ShardError as error:
            if error.reason in CHANGED:
                file, _, fault = str(error).partition(": ")
                raise changed(file, fault.partition(". ")[0]) from error
            raise

    def finish(self) -> Statistics:
        """Return the statistics of all samples."""
        parts = Counter[str]()
        for layout, count in self._layouts.items():
            parts.update(dict.fromkeys(layout, count))
        self.statistics.parts, self.statistics.nulls = dict(parts), dict(self._nulls)
        self.statistics.layouts = {tuple(sorted(layout)) for layout in self._layouts}
        return self.statistics

    def _check(self, sample: TarSample) -> None:
        """Raise `RejectedError` for a part that does not fit its extension. Count the sample otherwise.

        A part without bytes fits any extension, as when it is read.
        """
        for part in sample.parts:
            if (
                part.data
                and part.data is not self._parsed
                and (fault := data_fault(part.extension, part.data, check_images=self._options.check_images))
            ):
                raise RejectedError(part.file, sample.key, fault)
        extensions = tuple([part.extension for part in sample.parts])
        self._layouts[extensions] += 1
        if not self.statistics.others:
            folder = class_of(sample.key)
            self.statistics.others = int(len(extensions) > 1 or extensions[0].lower() not in _MEDIA or not folder)
            if len(self.statistics.folders) < _MAX_FOLDERS:
                self.statistics.folders.add(folder)

    def _wants(self, key: str) -> bool:
        """Return whether a key is chosen. Add a chosen one to the statistics."""
        if self._keys is not None and key in self._keys:
            self.statistics.found.add(key)
        return self._keys is None or key in self._keys

    def _writes(self, extension: str) -> bool:
        """Return whether a part is chosen. Add one that is not to the statistics."""
        if is_named(extension, self._only):
            return True
        self.statistics.dropped.add(extension)
        return False

    def _sample_of(self, key: str, file: str, parts: list[Part], name: Callable[[], str]) -> TarSample:
        """Return the sample of these parts. Raises `RejectedError`, which names `file`, if there are none."""
        if not parts:
            raise RejectedError(file, key, "no chosen part")
        return TarSample(key, parts, name)

    def _read_part(self, file: int, row: int, extension: str, size: int | None, name: str) -> Part:
        """Return a part. Long audio and video are read in pieces later. `size` is in bytes, or None if unknown."""
        if size is None and is_long(extension):
            size = self._store.head(file, row, extension, 0)[1]
        if size is not None and is_long(extension, size):
            return Part(extension, name, LongPart(partial(self._store.open, file, row, extension), size, name))
        return Part(extension, name, self._store.read(file, row, extension))

    def _read_folder(self, file: int, row: int, number: int) -> TarSample | None:
        store, found = self._store, self.statistics
        path_key, files = store.key(file, row), store.files(row)
        key = tar_key(path_key)
        if not self._wants(key):
            return None
        first = store.path(next(iter(files.values())))
        if key != path_key:
            found.renamed, found.examples = found.renamed + 1, found.examples or {f"{path_key} is {key} there"}
        if self._options.classes:
            if not class_of(key):
                raise RejectedError(first, key, "no class: it is in no folder")
            if any(name.lower() == CLASS for name in files):
                raise RejectedError(first, key, f"two parts with one extension: {CLASS}, of a file and of the folder")
        parts = [
            self._read_part(file, row, name, store.size(each), store.path(each))
            for name, each in files.items()
            if self._writes(name)
        ]
        if self._options.classes:
            parts.append(Part(CLASS, first, store.read(file, row, CLASS)))
        return self._sample_of(key, first, parts, lambda: first)

    def _read_table(self, file: int, row: int, sample_number: int) -> TarSample | None:
        store, field, key = self._store, self._options.key_field, ""
        raw, start = store.raw(file, row)
        line_name = partial(self._line_of, file, start, row)
        try:
            fields, body = store.parsed(file, raw, start)
            key = f"{self._source.prefix}{sample_number + 1:09d}" if field is None else _key_in(fields, field)
            if not self._wants(key):
                return None
            files = store.files_of(file, fields)
            self._parsed, address = body, self._source.name or self._dataset.entries.names[file]
            if files or field is not None:
                _check_parts(
                    key, address, sorted([(LINE, address, len(body), ""), *((*each[:3], "") for each in files)])
                )
        except RecordError as error:
            raise RejectedError(line_name(), key, str(error)) from error
        if len(self.statistics.not_texts) < len(TEXT_FIELDS):
            self.statistics.not_texts.update(name for name in TEXT_FIELDS if not isinstance(fields.get(name), str))
        parts = [Part(LINE, address, body)] if self._writes(LINE) else []
        for each in files:
            if self._writes(each.part):
                parts.append(self._read_part(file, row, each.part, each.size, each.path))
                self._count_use(each.path, each.size)
        return self._sample_of(key, address, parts, line_name)

    def _count_use(self, path: str, size: int) -> None:
        """Count the use of a file that a record names."""
        found, path_hash = self.statistics, hash(path)
        found.uses, found.used_bytes = found.uses + 1, found.used_bytes + size
        if path_hash not in self._used:
            self._used.add(path_hash)
            found.files, found.file_bytes = found.files + 1, found.file_bytes + size

    def _line_of(self, file: int, start: int, row: int) -> str:
        """Return how the list of rejects names the row at byte `start`: FILE:LINE, or FILE:NUMBER in a JSON list."""
        name = self._source.name or self._dataset.entries.names[file]
        if self._source.form == JSON:
            return f"{name}:{row + 1}"
        _, last_start, last_line = self._last_line if self._last_line[0] == file else (file, 0, 1)
        line = last_line + lines_between(self._store, file, last_start, start)
        self._last_line = file, start, line
        return f"{name}:{line}"

    def _read_store(self, file: int, row: int, number: int) -> TarSample | None:
        store, shard = self._store, self._source.name or self._dataset.entries.names[file]
        name, key = f"{shard}, record {number}", f"{number:09d}"
        try:
            if self._source.form not in RECORDS or self._options.key_field is not None:
                key = store.key(file, row)
                key = key.removeprefix("./") if self._source.form == TARS else _tar_key_of_row(key, shard)
            if not self._wants(key):
                return None
            names = store.extensions(file, row)
            parts = [self._read_part(file, row, each, None, name) for each in names if self._writes(each)]
        except ShardError as error:
            if isinstance(error.__cause__, RecordError):
                raise RejectedError(name, key, str(error.__cause__)) from error
            if error.reason == "no key":
                raise RejectedError(name, "", f"no key: {str(error).partition(': ')[2]}") from error
            raise
        if self._may_name_files:
            parts += self._named_files(file, row, name, key)
        if not parts and not names:
            raise RejectedError(name, key, "no part: every field is null")
        # Pass size 1: an empty value is valid, but an empty file may be truncated.
        named = [(part.extension, part.extension, 1, "") for part in parts]
        # parts of a tar may differ in case alone, as when they are read
        groups = [[each] for each in named] if self._source.form == TARS else [named]
        if fault := next((found for group in groups if (found := parts_fault(key, group)[0])), ""):
            raise RejectedError(name, key, fault)
        return self._sample_of(key, shard, parts, lambda: name)

    def _named_files(self, file: int, row: int, name: str, key: str) -> list[Part]:
        """Return the files in the folder `files_from` that a row names without their bytes."""
        self._nulls.update(each for each in self._store.nulls(file, row) if self._writes(each) or each in self._media)
        found: list[Part] = []
        for each in self._store.named_files(file, row):
            if not self._writes(each.part or each.column):
                continue
            self.statistics.named += 1
            if not self._source.files_from:
                raise ValueError(
                    f"{self._dataset.address}: rows of the column {each.column!r} have a path and no bytes. Pass "
                    "--files-from FOLDER with the files, or --only for other parts"
                )
            found.append(_named_file(self._source, each, name, key))
        return found


def is_named(extension: str, only: Collection[str]) -> bool:
    """Return whether `only` has the part, with or without its number, or is empty.

    The names in `only` are in lower case.
    """
    extension = extension.lower()
    return not only or extension in only or plain_part(extension) in only


def plain_part(extension: str) -> str:
    """Return the name of a part without its number: `jpg` for `0.jpg`."""
    return _NUMBERED.sub("", extension, count=1)


def lines_between(store: Any, number: int, start: int, end: int) -> int:
    """Return how many lines of the file with this number end between two byte offsets."""
    lines = 0
    while start < end:
        block = store.files.read(number, start, min(end - start, 1 << 18))
        lines, start = lines + block.count(b"\n"), start + len(block)
    return lines


def line_fault(source: SourceFiles, store: Any, number: int) -> Reject:
    """Return the reject of the last line of a JSONL file, which was cut.

    Raises ValueError for other damaged tables.
    """
    fault, indexed = store.entries.faults[number], store.entries.names[number]
    name = source.name or indexed
    if source.form != JSONL or text_error(
        store.files.read(number, 0, min(HEAD, int(store.entries.sizes[number]))), name
    ):
        raise ValueError(fault.replace(indexed, name, 1))
    line = lines_between(store, number, 0, int(store.blob(number)[-1])) + 1
    return Reject.of(f"{name}:{line}", "", f"malformed JSON: {fault.partition(': ')[2]}")


def _check_parts(key: str, address: str, parts: list[tuple[str, str, int, str]]) -> None:
    """Raise `RecordError` for parts of a row that a tar cannot have. `parts` are those of `parts_fault`."""
    fault, path = parts_fault(key, parts)
    if fault and path != address:
        reason, _, detail = fault.partition(": ")
        fault = f"{reason}: {printable(path)}: {detail}".removesuffix(": ")
    if fault:
        raise RecordError(fault)


def _key_in(fields: dict[str, Any], field: str) -> str:
    """Return the key in a field of a row. Raises `RecordError` unless it is a string or a whole number."""
    value = fields.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RecordError(f"no key: the field {field!r} holds {value!r}")
    return str(value)


def _tar_key_of_row(key: str, shard: str) -> str:
    """Return the key of a row in a tar. "web/0.parquet:17", which has no key field, becomes "web/0/17"."""
    if key.startswith(f"{shard}:"):
        key = f"{PurePosixPath(shard).with_suffix('')}/{key[len(shard) + 1 :]}"
        return key.replace(".", "_")
    return key


def _named_file(source: SourceFiles, named: Any, name: str, key: str) -> Part:
    """Return a file below `source.files_from` that a row names. Nothing outside of it is read."""
    folder = source.files_from
    where = f"the column {named.column!r} names {named.path[:200]!r}"
    if "://" in named.path:
        raise RejectedError(name, key, f"a URL, not a file: {where}")
    if not named.part:
        raise RejectedError(name, key, f"no extension: {where}")
    path = str(PurePosixPath(folder, named.path))
    try:
        if ".." in PurePosixPath(named.path).parts or outside(folder, path):
            raise RejectedError(name, key, f"outside the folder of the files: {where}, and --files-from {folder}")
        status = os.stat(path)  # noqa: PTH116  # a Path for each sample is slow
    except (ValueError, OSError) as error:  # a path may be an invalid file name
        raise RejectedError(name, key, f"missing file: {where}, and there is no {path}"[:400]) from error
    if not stat.S_ISREG(status.st_mode):
        raise RejectedError(name, key, f"not a regular file: {where}")
    if min(status.st_mtime_ns, status.st_ctime_ns) > source.newest_ns:
        raise changed(path, "written since the start")
    return Part(named.part, path, file_data(Path(path), named.part, status.st_size))
