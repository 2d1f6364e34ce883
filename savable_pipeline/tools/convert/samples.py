"""Samples of a source, one after another: key and parts of each in a tar, or the reason why it is rejected.

source              parts                            key in the tar
folder              files, and `cls`                 path, with _ for dots after the first
table               `json`, files that fields name   number from 1, or a field
MDS, LitData        those of the store               number from 0, or a field
Parquet, Arrow      those of the store, and files    FILE/ROW
tars                those of the store               the same
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from savable_pipeline.data.shards.byte_source import RecordError
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS
from savable_pipeline.data.stores.folder_store import CLASS, class_of, tar_key
from savable_pipeline.data.stores.sample_names import Reject, name_fault, outside, parts_fault, printable
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.options import Options
from savable_pipeline.tools.convert.part_data import LongPart, PartData, data_fault, file_data, is_long, may_be_long
from savable_pipeline.tools.convert.source import COLUMN_KINDS, RECORD_KINDS, TABLE_KINDS, RowSpan, SourceFiles, changed

if TYPE_CHECKING:
    from savable_pipeline.data.dataset.dataset import Dataset

TEXT_FIELDS = ("caption", "text")
_MEDIA = frozenset((*IMAGE_PARTS, *AUDIO_PARTS, *VIDEO_PARTS))
_NUMBERED = re.compile(r"[0-9]+[.]")  # of several files of one field: 0.jpg, 1.jpg
_CHANGED = ("changed shard", "missing shard")
_AHEAD = 4096  # rows announced together
_MOST_CLASSES = 100_000


class Statistics(msgspec.Struct):
    """Counts over samples, which add up over ranges."""

    parts: dict[str, int] = {}  # samples with each part
    most_parts: int = 0
    nulls: dict[str, int] = {}  # by column
    texts: list[str] | None = None  # JSON fields that are strings in every sample; None: no sample
    renamed: int = 0  # keys with dots, which a tar cannot have
    example: str = ""
    uses: int = 0  # of files by records
    used_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    folders: list[str] = []  # names of top folders
    only_media: bool = True  # each sample is one image, sound or video in a folder
    named: int = 0  # files that rows name without their bytes
    found: list[str] = []  # keys that were asked for
    again: int = 0  # keys that occur again
    repeated: list[str] = []  # some of them
    dropped: list[str] = []  # names of parts that were not

    def add(self, other: Statistics) -> None:
        """Add the counts of another range."""
        self.parts = dict(Counter(self.parts) + Counter(other.parts))
        self.nulls = dict(Counter(self.nulls) + Counter(other.nulls))
        if other.texts is not None:
            self.texts = other.texts if self.texts is None else sorted({*self.texts} & {*other.texts})
        for name in ("folders", "found", "dropped", "repeated"):
            setattr(self, name, sorted({*getattr(self, name), *getattr(other, name)}))
        self.only_media &= other.only_media
        self.most_parts, self.example = max(self.most_parts, other.most_parts), self.example or other.example
        for name in ("renamed", "uses", "used_bytes", "files", "file_bytes", "named", "again"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class TarSample(NamedTuple):
    """A sample: its key, its parts with the names that rejects give them, and its own such name."""

    key: str
    parts: list[tuple[str, str, PartData]]
    name: str | Callable[[], str]


class RejectedError(Exception):
    """A sample is rejected."""

    def __init__(self, file: str, key: str, fault: str) -> None:
        self.reject = Reject.of(printable(file), key, fault)
        super().__init__(fault)


class SampleReader:
    """Reads samples of a source, counts them in `statistics` and lists those that are `rejected`."""

    def __init__(self, source: SourceFiles, dataset: Dataset, options: Options, keys: Collection[str] | None) -> None:
        self.statistics, self.rejected, self.texts = Statistics(), list[Reject](), {*TEXT_FIELDS}
        self._source, self._dataset, self._options, self._keys = source, dataset, options, keys
        self._store = cast("Any", dataset.store)
        self._only = frozenset(name.lower() for name in options.only)
        self._lines, self._counted = 1, 0  # lines before an offset, for the numbers of rejected ones
        self._used: set[int] = set()  # hashes of the names of files that records use
        self._folders, self._found, self._dropped = set[str](), set[str](), set[str]()
        self._parsed: PartData = b""
        self._address = -1, ""  # the file whose rows are read, and what rejects call it
        self._counts, self._nulls = Counter[str](), Counter[str]()
        self._columnar = source.kind in COLUMN_KINDS
        self._media: list[str] = self._store.media_named(self._only) if self._columnar and self._only else []

    def samples(self, span: RowSpan) -> Iterator[TarSample]:
        """The samples of some rows. Raises `SavableError` if the source changed."""
        readers = {"folder": self._of_folder, **dict.fromkeys(TABLE_KINDS, self._of_table)}
        of_row: Callable[[int, int, int], TarSample | None] = readers.get(self._source.kind, self._of_store)
        try:
            if self._source.kind in RECORD_KINDS:
                self._store.validate(span.file)
            first = int(self._dataset.firsts[span.file])
            for start in range(span.start, span.end, _AHEAD):
                places = np.arange(first + start, first + min(start + _AHEAD, span.end))
                self._store.prefetch(places)
                rows = self._dataset.locate(places)[1]
                for number, row in enumerate(rows.tolist(), span.number + start - span.start):
                    try:
                        sample = self._checked(of_row(span.file, row, number))
                    except RejectedError as error:
                        self.rejected.append(error.reject)
                        continue
                    if sample is not None:
                        yield sample
            self._store.verify_given()
            self._source.check(span.file)
        except ShardError as error:
            if error.reason in _CHANGED:
                raise changed(
                    str(error).partition(": ")[0], str(error).partition(": ")[2].partition(". ")[0]
                ) from error
            raise

    def finish(self) -> Statistics:
        """The statistics of all samples."""
        found = self.statistics
        found.parts, found.nulls, found.folders = dict(self._counts), dict(self._nulls), sorted(self._folders)
        found.found, found.dropped = sorted(self._found), sorted(self._dropped)
        found.texts = sorted(self.texts) if self._counts and self._source.kind in TABLE_KINDS else None
        return found

    def _checked(self, sample: TarSample | None) -> TarSample | None:
        """The sample if its parts are of their types; counts it."""
        if sample is None:
            return None
        for extension, file, data in sample.parts:
            if data is self._parsed:  # JSON of a row, which was read as such
                continue
            fault = data_fault(extension, data, check_images=self._options.check_images)
            if fault:
                raise RejectedError(file, sample.key, fault)
        found, names = self.statistics, [part[0] for part in sample.parts]
        self._counts.update(names)
        found.most_parts = max(found.most_parts, len(names))
        if found.only_media:
            folder = class_of(sample.key)
            found.only_media = len(names) == 1 and names[0].lower() in _MEDIA and bool(folder)
            if len(self._folders) < _MOST_CLASSES:
                self._folders.add(folder)
        return sample

    def _wants(self, key: str) -> bool:
        if self._keys is None:
            return True
        if key in self._keys:
            self._found.add(key)
            return True
        return False

    def _writes(self, extension: str) -> bool:
        if is_named(extension, self._only):
            return True
        self._dropped.add(extension)
        return False

    def _sample(
        self, key: str, first: str, parts: list[tuple[str, str, PartData]], name: str | Callable[[], str]
    ) -> TarSample:
        if not parts:
            raise RejectedError(first, key, "no chosen part")
        return TarSample(key, parts, name)

    def _part(self, file: int, row: int, extension: str, size: int | None, name: str) -> PartData:
        """A part, in pieces if it is a long video or sound."""
        if may_be_long(extension):
            size = self._store.head(file, row, extension, 0)[1] if size is None else size
            if is_long(extension, size):
                return LongPart(functools.partial(self._store.open, file, row, extension), size, name)
        found: bytes = self._store.read(file, row, extension)
        return found

    def _of_folder(self, file: int, row: int, number: int) -> TarSample | None:
        store = self._store
        own, files = store.key(file, row), store.files(row)
        key = tar_key(own)
        if not self._wants(key):
            return None
        first = store.path(next(iter(files.values())))
        if key != own:
            found = self.statistics
            found.renamed, found.example = found.renamed + 1, found.example or f"{own} is {key} there"
        if self._options.classes:
            if not class_of(key):
                raise RejectedError(first, key, "no class: it is in no folder")
            if any(name.lower() == CLASS for name in files):
                raise RejectedError(first, key, f"two parts with one extension: {CLASS}, of a file and of the folder")
        parts: list[tuple[str, str, PartData]] = []
        for name in files if not self._options.classes else [*files, CLASS]:
            if self._writes(name) or name not in files:
                each = files.get(name)
                path, size = (first, 1) if each is None else (store.path(each), store.size(each))
                parts.append((name, path, self._part(file, row, name, size, path)))
        return self._sample(key, first, parts, first)

    def _of_table(self, file: int, row: int, number: int) -> TarSample | None:
        store, field, key = self._store, self._options.key_field, ""
        raw, start = store.raw(file, row)
        try:
            fields, body = store.parsed(file, raw, start)
            key = f"{number + 1:09d}" if field is None else _key_in(fields, field)
            if not self._wants(key):
                return None
            files = store.files_of(file, fields)
            if self._address[0] != file:
                self._address = file, store.where(file)
            self._parsed, address = body, self._address[1]
            if files or field is not None:
                parts = sorted([("json", address, len(body), ""), *((*each, "") for each in files)])
                fault, path = parts_fault(key, parts)
                if fault and path != address:
                    reason, _, detail = fault.partition(": ")
                    fault = f"{reason}: {printable(path)}: {detail}".removesuffix(": ")
                if fault:
                    raise RecordError(fault)
        except RecordError as error:
            raise RejectedError(self._place(file, start, number), key, str(error)) from error
        if self.texts:
            self.texts.intersection_update(name for name in TEXT_FIELDS if isinstance(fields.get(name), str))
        found: list[tuple[str, str, PartData]] = [("json", address, body)] if self._writes("json") else []
        for each in files:
            if self._writes(each.part):
                found.append((each.part, each.path, self._part(file, row, each.part, each.size, each.path)))
                self._use(each.path, each.size)
        return self._sample(key, address, found, functools.partial(self._place, file, start, number))

    def _use(self, path: str, size: int) -> None:
        found, name = self.statistics, hash(path)
        found.uses, found.used_bytes = found.uses + 1, found.used_bytes + size
        if name not in self._used:
            self._used.add(name)
            found.files, found.file_bytes = found.files + 1, found.file_bytes + size

    def _place(self, file: int, start: int, number: int) -> str:
        """What rejects call a row: its line in the file, or its number in a list."""
        if self._source.kind == "json":
            return f"{self._source.name}:{number + 1}"
        while self._counted < start:
            size = min(start - self._counted, 1 << 22)
            self._lines += self._store.files.read(file, self._counted, size).count(b"\n")
            self._counted += size
        return f"{self._source.name}:{self._lines}"

    def _of_store(self, file: int, row: int, number: int) -> TarSample | None:
        store, shard = self._store, self._source.name or self._dataset.entries.names[file]
        name = f"{shard}, record {number}"
        key = f"{number:09d}"
        try:
            if self._source.kind not in RECORD_KINDS or self._options.key_field is not None:
                key = store.key(file, row)
                key = key.removeprefix("./") if self._source.kind == "tars" else _tar_key_of_row(key, shard)
            if not self._wants(key):
                return None
            names = store.extensions(file, row)
            parts: list[tuple[str, str, PartData]] = [
                (each, name, self._part(file, row, each, None, name)) for each in names if self._writes(each)
            ]
        except ShardError as error:
            if isinstance(error.__cause__, RecordError):
                raise RejectedError(name, key, str(error.__cause__)) from error
            if error.reason == "no key":
                raise RejectedError(name, "", f"no key: {str(error).partition(': ')[2]}") from error
            raise
        if self._columnar:
            parts += self._named_files(file, row, name, key)
        if not parts and not names:
            empty = "no field: the record is empty" if self._source.kind in RECORD_KINDS else _ALL_NULL
            raise RejectedError(name, key, empty)
        for each, _, _ in parts:
            if fault := name_fault(key, each):
                raise RejectedError(name, key, fault)
        if self._source.kind in RECORD_KINDS:
            fault, _ = parts_fault(key, [(each, name, len(data), "") for each, _, data in parts])
            if fault:
                raise RejectedError(name, key, fault)
        return self._sample(key, shard, parts, name)

    def _named_files(self, file: int, row: int, name: str, key: str) -> list[tuple[str, str, PartData]]:
        """The files that a row names without their bytes, which are in the folder of `files_from`."""
        nulls = self._store.nulls(file, row)
        self._nulls.update(each for each in nulls if self._writes(each) or each in self._media)
        found: list[tuple[str, str, PartData]] = []
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


_ALL_NULL = "no part: every field is null"


def is_named(extension: str, only: Collection[str]) -> bool:
    """Whether a part is one of these lower-case names; without names any part is."""
    extension = extension.lower()
    return not only or extension in only or plain_part(extension) in only


def plain_part(extension: str) -> str:
    """The name of a part without the number of one of several: `0.jpg` is `jpg`."""
    return _NUMBERED.sub("", extension, count=1)


def _key_in(fields: dict[str, Any], field: str) -> str:
    value = fields.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RecordError(f"no key: the field {field!r} holds {value!r}")
    return str(value)


def _tar_key_of_row(key: str, shard: str) -> str:
    """The key as a tar may have it: a row without one, "web/0.parquet:17", becomes "web/0/17"."""
    if key.startswith(f"{shard}:"):
        key = f"{shard.rpartition('.')[0]}/{key[len(shard) + 1 :]}"
        return key.replace(".", "_")
    return key


def _named_file(source: SourceFiles, named: Any, name: str, key: str) -> tuple[str, str, PartData]:
    """A file below `source.files_from` that a row names; nothing outside of it is read."""
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
    except (ValueError, OSError) as error:  # a path may be no name of a file
        raise RejectedError(name, key, f"missing file: {where}, and there is no {path}"[:400]) from error
    if not stat.S_ISREG(status.st_mode):
        raise RejectedError(name, key, f"not a regular file: {where}")
    if min(status.st_mtime_ns, status.st_ctime_ns) > source.newest_ns:
        raise changed(path, "written since the start")
    return named.part, path, file_data(Path(path), named.part, status.st_size)
