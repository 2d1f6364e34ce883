"""A job that writes one range: the same bytes each time, after any kill.

    work/000012.k3x9/train-000000.tar   a shard of one attempt, which has a folder of its own
    work/000012.k3x9/record             all other results of the job
    work/000012/                        the folder, renamed when all of it is on the disk: the range is finished

    record   rows of the index of each shard │ hashes of the contents of parts, and of rejects: uint64
             │ hashes of the keys of samples, if they may be repeated: uint64 │ `RangeRecord` │ its bytes: uint64

Two attempts at one range write the same bytes, so the first one that finishes is used. For a bucket, the folder of an
attempt is on the machine that writes it. Its shards are uploaded, and its record is returned.

What a job has in memory does not grow with the samples of its range.
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
_NOTED_ROWS, _NOTED_BYTES = 256, 16_000_000  # progress is noted after so many rows or bytes


class WrittenShard(msgspec.Struct, frozen=True):
    """A shard of a range, and where its rows of the index are in the record."""

    range: str
    split: str
    entry: ShardEntry
    rows: tuple[int, int]  # first byte and number of bytes


class RangeRecord(msgspec.Struct):
    """Result of a range."""

    shards: list[WrittenShard] = []
    contents: tuple[int, int] = (0, 0)  # first byte and number of the hashes of contents
    keys: tuple[int, int] = (0, 0)
    rejected: list[Reject] = []
    statistics: Statistics = msgspec.field(default_factory=Statistics)
    size: int = 0  # bytes read


class Written(NamedTuple):
    """Result of a job."""

    rows: int  # that it read and did not note before, or compressed files
    size: int  # bytes of these
    record: bytes  # its record if the target is a bucket
    changed: list[str]  # names of the files that differ, if it compares


class Hashes(NamedTuple):
    """Numbers in a file: uint64 (length,), from byte `start`."""

    path: Path
    start: int
    length: int

    def array(self) -> NDArray[np.uint64]:
        """Return the numbers, which are mapped."""
        return np.memmap(self.path, "<u8", "r", self.start, self.length) if self.length else np.empty(0, "<u8")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeJob:
    """Job to write a range into `work`, or to compare it with `hashes`.

    With a bucket, shards are written on this machine and uploaded.
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
        """Return the number of rows of its range, or of compressed files."""
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
        """Return the hashes of contents of the finished range."""
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

    `note` is called now and then with the number of rows and bytes since the last call. The result has those after it.

    Raises `SavableError` if the source changed or the disk is full, ValueError for damage of a whole file.
    """
    with room_on(job.work.parent.parent), _Attempt(job) as attempt:
        writer = _RangeWriter(job, attempt, note)
        try:
            writer.write()
        except ShardError as error:
            if error.reason in CHANGED:
                raise
            raise ValueError(str(error)) from error
        size = attempt.record.size - writer.noted[1]
        return Written(job.rows - writer.noted[0], size, attempt.finish(), sorted(writer.changed))


def join_shards(job: RangeJob, split: str, shards: list[WrittenShard]) -> Written:
    """Write the samples of small shards of several ranges as one range."""
    with room_on(job.work.parent.parent), _Attempt(job) as attempt:
        series = attempt.series(split)
        for shard in shards:
            path = job.work / shard.range / shard.entry.name
            if job.bucket is not None:
                found = BucketObject(f"{WORK}/{shard.range}/{path.name}", shard.entry.size, 0)
                job.bucket.fetch([found], job.work.parent.parent)
            with path.open("rb") as file:
                for extent in tar_samples(path.name, file.fileno()):
                    members = zip(extent.extensions, extent.members, strict=True)
                    if extent.key == series.last_key:
                        series.finish()
                    series.add(extent.key, {e: os.pread(file.fileno(), m.size, m.payload) for e, m in members})
            if job.bucket is not None:
                path.unlink()
        series.finish()
        return Written(0, 0, attempt.finish(), [])


class _Attempt:
    """One attempt to write a range into its own `folder`, with a growing record."""

    def __init__(self, job: RangeJob) -> None:
        self._job, self.record, self._open = job, RangeRecord(), contextlib.ExitStack()

    def __enter__(self) -> _Attempt:
        parent = self._job.work if self._job.bucket is None else None
        name = tempfile.TemporaryDirectory(dir=parent, prefix=f"{self._job.name}.", ignore_cleanup_errors=True)
        self.folder = Path(self._open.enter_context(name))
        self._file = self._open.enter_context((self.folder / RECORD_FILE).open("wb"))
        self.contents, self.keys = self._numbers(), self._numbers()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _numbers(self) -> NumberSpool:
        """Return an empty spool, whose file is in the folder of the attempt."""
        return NumberSpool(file=self._open.enter_context(tempfile.TemporaryFile(dir=self.folder)))

    def series(self, split: str) -> ShardSeries:
        """Return the shards of a split."""
        options, prefix = self._job.options, f"{split}-" if split else ""

        def finished(table: ShardTable) -> None:
            rows = self._file.tell(), self._file.write(table.rows)
            self.record.shards.append(WrittenShard(self._job.name, split, table.entry, rows))

        series = ShardSeries(
            self.folder, lambda n: f"{prefix}{n:06d}.tar", options.shard_bytes, options.shard_samples, finished
        )
        self._open.callback(series.close)
        return series

    def finish(self) -> bytes:
        """Finish the range, unless another attempt was faster.

        Returns the record if the target is a bucket, and otherwise b"".
        """
        if self._job.hashes is not None:  # it was only compared
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
        bucket = self._job.bucket
        if bucket is None:
            os.fsync(self._file.fileno())
            with contextlib.suppress(OSError):  # another attempt was faster
                self.folder.rename(self._job.folder)
            return b""
        for shard in self.record.shards:
            bucket.upload(f"{WORK}/{shard.range}/{shard.entry.name}", self.folder / shard.entry.name)
        return (self.folder / RECORD_FILE).read_bytes()


def shard_table(work: Path, shard: WrittenShard) -> ShardTable:
    """Return the rows of a shard, which are mapped."""
    rows = np.memmap(work / shard.range / RECORD_FILE, np.uint8, "r", *shard.rows)
    return ShardTable(shard.entry, cast("bytes", rows.data))


class _RangeWriter:
    """Writes the samples of a range into the series of their splits."""

    def __init__(self, job: RangeJob, attempt: _Attempt, note: Callable[[int, int], None]) -> None:
        self._job, self._folder, self._record = job, attempt.folder, attempt.record
        self._contents, self._keys = attempt.contents, attempt.keys
        self._note_progress, self.noted, self._rows = note, (0, 0), 0
        self._samples, self._last_key, self._renamed = 0, "", set[str]()
        self._rejected = list[Reject]()  # of the span that is read
        self.changed = set[str]()  # names of files with other contents than the known hashes
        self._known = None if job.hashes is None else np.sort(job.hashes.array())
        self._ends = [int(end * _HASHES) for end in accumulate(Fraction(part) for _, part in job.options.split)]
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
        """Write a sample, or compare it, and note progress."""
        key = self._distinct_key(sample) if self._may_repeat else sample.key
        parts: dict[str, PartData] = {part.extension: part.data for part in sample.parts}
        if key and self._series:  # otherwise the sample is only compared
            number = _hashed(key) if self._ends else 0
            self._series[next((i for i, end in enumerate(self._ends) if number < end), 0)].add(key, parts)
        for part in sample.parts:
            self._note(part.file, _hashed(f"{sample.key}.{part.extension}") ^ content_hash(part.data))
        self._record.size += sum(map(len, parts.values()))
        self._rows += not self._job.source.packed  # whose rows are files
        rows, size = self._rows - self.noted[0], self._record.size - self.noted[1]
        if rows >= _NOTED_ROWS or size >= _NOTED_BYTES:
            self._note_progress(rows, size)
            self.noted = self._rows, self._record.size

    def _note(self, file: str, content: int) -> None:
        """Record the hash of a part or a reject of a file.

        The file has changed if the hash is not among the known ones.
        """
        self._contents.append(content)
        if self._known is not None:
            found = np.uint64(content)
            if found not in self._known[np.searchsorted(self._known, found) :][:1]:  # sorted
                self.changed.add(file)

    def _reject(self, reject: Reject) -> None:
        self._record.rejected.append(reject)
        self._note(reject.file, _hashed(f"{reject.file}\0{reject.reason}"))

    def _distinct_key(self, sample: TarSample) -> str:
        """Return the key, or "" if the sample is rejected.

        A repeated key of a tar gets the name of its tar before it.
        """
        number, last_key = self._samples, self._last_key
        self._samples += 1
        self._keys.append(_hashed(sample.key))
        self._last_key = key = sample.key
        byte = self._job.repeats[number >> 3] if number >> 3 < len(self._job.repeats) else 0
        if key != last_key and not byte >> (number & 7) & 1:  # readers merge neighbors with one key
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
        """Decompress one file after another, and write the samples of each."""
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


def _hashed(key: str) -> int:
    return xxh3_64_intdigest(key.encode("utf-8", "surrogateescape"))
