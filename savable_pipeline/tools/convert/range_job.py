"""A job that writes one range: the same bytes each time, after any kill.

    work/000012.k3x9/train-000000.tar   a shard of one attempt, which has a folder of its own
    work/000012.k3x9/record             all other results of the job
    work/000012/                        the folder, renamed when all of it is on the disk: the range is finished

    record   rows of the index of each shard │ hashes of the contents of parts, and of rejects: uint64
             │ hashes of the keys of samples, if they may be repeated: uint64 │ `RangeRecord` │ its bytes: uint64

Two attempts at one range write the same bytes, so the first one that finishes is used. For a bucket, the folder of an
attempt is on the machine that writes it. Its shards are uploaded, and its record is returned.

The memory of a job does not grow with the number of samples in its range.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.remote.session import Bucket, BucketObject
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.number_spool import NumberSpool
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.tar import samples as tar_samples
from savable_pipeline.data.stores.folder_store import FOLDER
from savable_pipeline.data.stores.sample_names import Reject, printable
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.options import WORK, Options
from savable_pipeline.tools.convert.part_data import PartData, content_hash
from savable_pipeline.tools.convert.samples import CHANGED, SampleReader, Statistics, TarSample, line_fault
from savable_pipeline.tools.convert.shard_series import ShardSeries, room_on
from savable_pipeline.tools.convert.source import EmptySourceError, RowSpan, SourceFiles

RECORD_FILE = "record"
_HASHES = 1 << 64  # number of possible hashes, which the splits divide
_EXAMPLES = 5  # repeated keys that a warning names
_NOTED_ROWS, _NOTED_BYTES = 256, 16_000_000  # progress is reported after so many rows or bytes


class WrittenShard(msgspec.Struct, frozen=True):
    """A shard of a range, and the bytes of the record that have its rows of the index."""

    range: str
    split: str
    entry: ShardEntry
    rows: tuple[int, int]  # first byte and number of bytes


class RangeRecord(msgspec.Struct):
    """Result of a range."""

    shards: list[WrittenShard] = []
    contents: tuple[int, int] = (0, 0)  # first byte and number of the hashes of contents
    keys: tuple[int, int] = (0, 0)  # first byte and number of the hashes of keys
    rejected: list[Reject] = []
    statistics: Statistics = msgspec.field(default_factory=Statistics)
    size: int = 0  # bytes of the parts that were read


class Written(NamedTuple):
    """Result of a job."""

    rows: int  # number of rows, or of compressed files, since the last call of `note`
    size: int  # bytes of their parts
    record: bytes  # the record of the range if the target is a bucket, otherwise b""
    changed: list[str]  # names of the files that differ, if the job only compares


class Hashes(NamedTuple):
    """Hashes in a file, uint64 (length,), from byte `start`."""

    path: Path
    start: int
    length: int

    def array(self) -> NDArray[np.uint64]:
        """Return the hashes, memory-mapped."""
        return np.memmap(self.path, "<u8", "r", self.start, self.length) if self.length else np.empty(0, "<u8")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeJob:
    """Job to write a range into `work`, or only to compare its contents with `hashes`.

    With a bucket, shards are written on the machine that does the job, and uploaded.
    """

    name: str
    source: SourceFiles
    spans: tuple[RowSpan, ...]
    options: Options
    work: Path
    keys: frozenset[str] | None = None
    repeats: bytes = b""  # a bit for each sample: whether another sample has its key; b"" if none has
    bucket: Bucket | None = None
    hashes: Hashes | None = None

    @property
    def folder(self) -> Path:
        """The folder of the finished range."""
        return self.work / self.name

    @property
    def rows(self) -> int:
        """Return the number of rows of the range, or of compressed files."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def is_finished(self) -> bool:
        """Whether the range was written."""
        return (self.folder / RECORD_FILE).exists()

    def record(self) -> RangeRecord:
        """Return the record of the finished range."""
        with (self.folder / RECORD_FILE).open("rb") as file:
            end = file.seek(-8, os.SEEK_END)
            file.seek(end - int.from_bytes(file.read(), "little"))
            return msgspec.msgpack.decode(file.read()[:-8], type=RangeRecord)

    def content_hashes(self) -> Hashes:
        """Return the hashes of the parts and rejects of the finished range."""
        return Hashes(self.folder / RECORD_FILE, *self.record().contents)

    def key_hashes(self) -> NDArray[np.uint64]:
        """Return the hashes of the keys of samples of the finished range."""
        return Hashes(self.folder / RECORD_FILE, *self.record().keys).array()

    def note(self, written: Written) -> None:
        """Write the record of a range whose shards are in a bucket."""
        if self.bucket is not None:
            self.folder.mkdir(exist_ok=True)
            replace_file(self.folder / RECORD_FILE, [written.record])


def write_range(job: RangeJob, note: Callable[[int, int], None] = lambda rows, size: None) -> Written:
    """Write a range, or compare it with the hashes of `job`.

    `note` is called now and then with the number of rows and bytes since its last call. The result has those after the
    last call.

    Raises `SavableError` if the source changed or the disk is full, and ValueError if a whole file is damaged.
    """
    with room_on(job.work.parent.parent), _Attempt(job) as attempt:
        writer = _RangeWriter(job, attempt, note)
        try:
            writer.write()
        except ShardError as error:
            if error.reason in CHANGED:
                raise
            raise ValueError(str(error)) from error
        size = attempt.record.size - writer.noted_size
        return Written(job.rows - writer.noted_rows, size, attempt.finish(), sorted(writer.changed))


def join_shards(job: RangeJob, split: str, shards: list[WrittenShard]) -> Written:
    """Write the samples of small shards of several ranges as one range."""
    with room_on(job.work.parent.parent), _Attempt(job) as attempt:
        series = attempt.series(split)
        for shard in shards:
            path = job.work / shard.range / shard.entry.name
            if job.bucket is not None:
                uploaded = BucketObject(f"{WORK}/{shard.range}/{path.name}", shard.entry.size, 0)
                job.bucket.fetch([uploaded], job.work.parent.parent)
            with path.open("rb") as file:
                for extent in tar_samples(path.name, file.fileno()):
                    members = zip(extent.extensions, extent.members, strict=True)
                    if extent.key == series.last_key:  # readers would merge neighbors with one key
                        series.finish()
                    series.add(extent.key, {name: os.pread(file.fileno(), m.size, m.payload) for name, m in members})
            if job.bucket is not None:
                path.unlink()
        series.finish()
        return Written(0, 0, attempt.finish(), [])


class _Attempt:
    """One attempt to write a range, in a `folder` of its own, with a `record` that grows with each shard."""

    def __init__(self, job: RangeJob) -> None:
        self._job, self.record, self._open = job, RangeRecord(), contextlib.ExitStack()

    def __enter__(self) -> _Attempt:
        parent = self._job.work if self._job.bucket is None else None
        folder = tempfile.TemporaryDirectory(dir=parent, prefix=f"{self._job.name}.", ignore_cleanup_errors=True)
        self.folder = Path(self._open.enter_context(folder))
        self._file = self._open.enter_context((self.folder / RECORD_FILE).open("wb"))
        self.contents, self.keys = self._new_spool(), self._new_spool()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _new_spool(self) -> NumberSpool:
        """Return an empty spool, whose file is in the folder of the attempt."""
        return NumberSpool(file=self._open.enter_context(tempfile.TemporaryFile(dir=self.folder)))

    def series(self, split: str) -> ShardSeries:
        """Return a series of shards for a split. Finished ones are added to the record."""
        options, prefix = self._job.options, f"{split}-" if split else ""

        def add_to_record(table: ShardTable) -> None:
            rows = self._file.tell(), self._file.write(table.rows)
            self.record.shards.append(WrittenShard(self._job.name, split, table.entry, rows))

        series = ShardSeries(
            self.folder, lambda n: f"{prefix}{n:06d}.tar", options.shard_bytes, options.shard_samples, add_to_record
        )
        self._open.callback(series.close)
        return series

    def finish(self) -> bytes:
        """Finish the range, unless another attempt was faster.

        Returns the record if the target is a bucket, and otherwise b"".
        """
        if self._job.hashes is not None:  # the range was only compared
            return b""
        spans = list[tuple[int, int]]()  # first byte and number of the numbers of each spool
        for spool in (self.contents, self.keys):
            numbers = spool.numbers()
            spans.append((self._file.tell(), len(numbers)))
            self._file.write(numbers.data)
        self.record.contents, self.record.keys = spans
        record = msgspec.msgpack.encode(self.record)
        self._file.write(record + len(record).to_bytes(8, "little"))
        self._file.flush()
        if (bucket := self._job.bucket) is None:
            os.fsync(self._file.fileno())
            with contextlib.suppress(OSError):  # the folder exists if another attempt was faster
                self.folder.rename(self._job.folder)
            return b""
        for shard in self.record.shards:
            bucket.upload(f"{WORK}/{shard.range}/{shard.entry.name}", self.folder / shard.entry.name)
        return (self.folder / RECORD_FILE).read_bytes()


def shard_table(work: Path, shard: WrittenShard) -> ShardTable:
    """Return the index rows of a shard, memory-mapped."""
    rows = np.memmap(work / shard.range / RECORD_FILE, np.uint8, "r", *shard.rows)
    return ShardTable(shard.entry, cast("bytes", rows.data))


class _RangeWriter:
    """Writes the samples of a range into the series of their splits, or compares them.

    `noted_rows` and `noted_size` are the number of rows and of bytes up to the last call of `note`.
    """

    def __init__(self, job: RangeJob, attempt: _Attempt, note: Callable[[int, int], None]) -> None:
        self._job, self._folder, self._record = job, attempt.folder, attempt.record
        self._contents, self._keys = attempt.contents, attempt.keys
        self._note_progress, self._rows, self.noted_rows, self.noted_size = note, 0, 0, 0
        # number of samples so far, key of the last one, and new keys of samples of tars whose own key is repeated
        self._samples, self._last_key, self._renamed = 0, "", set[str]()
        self._rejected = list[Reject]()  # of the span that is read
        self.changed = set[str]()  # names of files with contents that are not among the known hashes
        self._known_hashes = None if job.hashes is None else np.sort(job.hashes.array())
        # a sample belongs to the first split whose end is above the hash of its key
        self._split_ends = [int(end * _HASHES) for end in accumulate(Fraction(part) for _, part in job.options.split)]
        splits = [name for name, _ in job.options.split] or [""]
        self._series = [attempt.series(split) for split in splits if job.hashes is None]
        form, options = job.source.form, job.options
        self._may_repeat = form == TARS or options.key_field is not None or options.key_end == "last"

    def write(self) -> None:
        """Write all samples, or compare them."""
        if self._job.source.packed:
            self._write_packed()
        else:
            self._write_spans(self._job.source, self._job.source.dataset(), self._job.spans)
        for series in self._series:
            series.finish()

    def _write_spans(self, source: SourceFiles, dataset: Dataset, spans: tuple[RowSpan, ...]) -> None:
        reader = SampleReader(source, dataset, self._job.options, self._job.keys)
        self._rejected = reader.rejected
        for span in spans:
            for sample in reader.samples(span):
                self._add(sample)
            for reject in self._rejected:
                self._reject(reject)
            self._rejected.clear()
        self._record.statistics.add(reader.finish())

    def _add(self, sample: TarSample) -> None:
        """Write a sample, or compare it, and report progress."""
        key = self._distinct_key(sample) if self._may_repeat else sample.key
        parts: dict[str, PartData] = {part.extension: part.data for part in sample.parts}
        if key and self._series:  # otherwise the sample is only compared
            key_hash = _hash_of(key) if self._split_ends else 0
            split = next((i for i, end in enumerate(self._split_ends) if key_hash < end), 0)
            self._series[split].add(key, parts)
        for part in sample.parts:
            self._record_hash(part.file, _hash_of(f"{sample.key}.{part.extension}") ^ content_hash(part.data))
        self._record.size += sum(map(len, parts.values()))
        self._rows += not self._job.source.packed  # rows of a compressed source are files, which are counted at the end
        rows, size = self._rows - self.noted_rows, self._record.size - self.noted_size
        if rows >= _NOTED_ROWS or size >= _NOTED_BYTES:
            self._note_progress(rows, size)
            self.noted_rows, self.noted_size = self._rows, self._record.size

    def _record_hash(self, file: str, new_hash: int) -> None:
        """Record the hash of a part or a reject of a file.

        The file has changed if the hash is not among the known ones.
        """
        self._contents.append(new_hash)
        if (known := self._known_hashes) is not None:  # sorted
            value = np.uint64(new_hash)
            if value not in known[np.searchsorted(known, value) :][:1]:
                self.changed.add(file)

    def _reject(self, reject: Reject) -> None:
        self._record.rejected.append(reject)
        self._record_hash(reject.file, _hash_of(f"{reject.file}\0{reject.reason}"))

    def _distinct_key(self, sample: TarSample) -> str:
        """Return the key, or "" if the sample is rejected.

        A repeated key of a tar is prefixed with the name of the tar.
        """
        number, last_key, repeats = self._samples, self._last_key, self._job.repeats
        self._samples += 1
        self._keys.append(_hash_of(sample.key))
        self._last_key = key = sample.key
        is_repeated = number >> 3 < len(repeats) and repeats[number >> 3] >> (number & 7) & 1
        if key != last_key and not is_repeated:  # readers merge neighbors with one key
            return key
        statistics, form = self._record.statistics, self._job.source.form
        statistics.repeats += 1
        if len(statistics.repeated) < _EXAMPLES:
            statistics.repeated.add(key)
        name, fault = sample.name(), "duplicate key: twice in one shard"
        if form == TARS:
            key = f"{name.partition(', record ')[0].rpartition('.')[0].replace('.', '_')}/{key}"
            if key not in self._renamed:
                self._renamed.add(key)
                return key
        elif form == FOLDER:
            fault = f"two names with one key: both would be {key}"
        else:
            fault = f"duplicate key: {key!r} is the key of a record before it"
        self._rejected.append(Reject.of(name, key, fault))
        return ""

    def _write_packed(self) -> None:
        """Decompress one file after another, and write the samples of each. Damaged tars become rejects."""
        (span,) = self._job.spans
        folder = self._folder / "decompressed"
        for number in range(span.start, span.end):
            folder.mkdir()
            file = self._job.source.packed[number]
            with self._job.source.unpacked(number, folder) as (source, fault):
                try:
                    if fault:
                        raise ShardError(f"damaged: {fault}")
                    self._write_file(source)
                except ShardError as error:
                    plain = Path(str(source.found.files)).name
                    detail = str(error).replace(f"{folder}: ", "").replace(f"{folder}/", "").replace(plain, file.name)
                    if source.form != TARS:
                        raise ValueError(f"{file.path}: {detail.removeprefix(f'{file.name}: ')}") from error
                    reason = "links" if error.reason == "links" else "damaged tar"
                    self._reject(Reject(printable(file.path), "", reason, printable(detail.removeprefix("damaged: "))))

    def _write_file(self, source: SourceFiles) -> None:
        """Write the samples of a decompressed file. Raises `ShardError`."""
        try:
            dataset = source.dataset()
        except EmptySourceError as error:
            store: Any = error.args[0]
        else:
            store = dataset.store
            if links := store.rejects_warning():
                raise ShardError(links, reason="links")
            self._write_spans(source, dataset, (RowSpan(0, 0, dataset.count, 0),))
        for number in sorted(store.entries.faults):
            self._reject(line_fault(source, store, number))


def _hash_of(text: str) -> int:
    return xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))
