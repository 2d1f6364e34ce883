"""Writing one range of a source: the same bytes each time, by any process, and after any kill.

    work/000012.k3x9/train-000000.tar     one attempt, in a folder of its own
    work/000012.k3x9/record               its shards with their rows of the index, rejects and counts
    work/000012/                          ─ renamed when all of it is on the disk: the range is finished

Two attempts at one range end with the same bytes, so the first one to be renamed stays. For a bucket the folder of an
attempt is on the machine that writes, its shards are uploaded, and the record is returned.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.remote.session import Bucket, BucketObject
from savable_pipeline.data.shards.index import IndexedFiles, ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.tar import samples as tar_samples
from savable_pipeline.data.stores.sample_names import Reject, printable
from savable_pipeline.data.stores.tar_store import TARS, TarStore
from savable_pipeline.tools.convert.compressed import opened
from savable_pipeline.tools.convert.options import WORK, Options
from savable_pipeline.tools.convert.part_data import PartData
from savable_pipeline.tools.convert.samples import (
    SampleReader,
    Statistics,
    TarSample,
)
from savable_pipeline.tools.convert.shard_series import ShardSeries, room_on
from savable_pipeline.tools.convert.source import RowSpan, SourceFiles, changed

RECORD_FILE = "record"
_CHUNK = 1 << 20
_ALL = 1 << 64
_EXAMPLES = 5  # of repeated keys
CountDone = Callable[[int, int], None]  # called with samples and bytes that are done


class RangeShard(msgspec.Struct, frozen=True):
    """A shard of a range: its file, its split, and its rows of the index."""

    name: str
    split: str
    table: ShardTable


class RangeRecord(msgspec.Struct):
    """Result of a range."""

    pieces: list[RangeShard]
    rejected: list[Reject]
    statistics: Statistics
    samples: int = 0  # read
    size: int = 0  # bytes read
    keys: bytes = b""  # hashes of the keys of samples, where keys may occur again


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeJob:
    """A range to write into `work`, or by way of this machine into a bucket."""

    name: str
    source: SourceFiles
    spans: tuple[RowSpan, ...]
    options: Options
    work: Path
    keys: frozenset[str] | None = None
    again: bytes = b""  # a bit for each sample with a possible repeat: its key is that of one before it
    bucket: Bucket | None = None


def is_finished(job: RangeJob) -> bool:
    """Whether a range was written."""
    return (job.work / job.name / RECORD_FILE).exists()


def record_of(work: Path, name: str) -> RangeRecord:
    """The record of a finished range."""
    return msgspec.msgpack.decode((work / name / RECORD_FILE).read_bytes(), type=RangeRecord)


def write_range(job: RangeJob, tick: CountDone = lambda samples, size: None) -> bytes:
    """Write a range; returns its record.

    Raises `SavableError` if the source changed or the disk is full, `ShardError` for damage of a whole file.
    """
    with room_on(job.work.parent.parent), _own_folder(job) as folder:
        record = _RangeWriter(job, folder, tick).write()
        return _finish(job, folder, record)


def join_shards(job: RangeJob, pieces: list[tuple[str, RangeShard]]) -> bytes:
    """Write the samples of shards of several ranges, which are small, as one range."""
    with room_on(job.work.parent.parent), _own_folder(job) as folder:
        record = RangeRecord([], [], Statistics())
        series = _series(folder, pieces[0][1].split, job.options, record)
        for range_name, piece in pieces:
            path = job.work / range_name / piece.name
            if job.bucket is not None:
                found = BucketObject(f"{WORK}/{range_name}/{piece.name}", piece.table.entry.size, 0)
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
        return _finish(job, folder, record)


@contextlib.contextmanager
def _own_folder(job: RangeJob) -> Iterator[Path]:
    parent = job.work if job.bucket is None else None
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"{job.name}."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _finish(job: RangeJob, folder: Path, record: RangeRecord) -> bytes:
    encoded = msgspec.msgpack.encode(record)
    if job.bucket is not None:
        for piece in record.pieces:
            job.bucket.upload(f"{WORK}/{job.name}/{piece.name}", folder / piece.name)
        return encoded
    replace_file(folder / RECORD_FILE, [encoded], sync=True)
    with contextlib.suppress(OSError):  # another attempt was faster
        folder.rename(job.work / job.name)
    return b""


def note_finished(work: Path, name: str, record: bytes) -> None:
    """Write the record of a range whose shards are in a bucket."""
    (work / name).mkdir(exist_ok=True)
    replace_file(work / name / RECORD_FILE, [record])


def _series(folder: Path, split: str, options: Options, record: RangeRecord) -> ShardSeries:
    prefix = f"{split}-" if split else ""

    def finished(table: ShardTable) -> None:
        record.pieces.append(RangeShard(table.entry.name, split, table))

    return ShardSeries(folder, lambda n: f"{prefix}{n:06d}.tar", options.shard_bytes, options.shard_samples, finished)


class _RangeWriter:
    """Writes the samples of a range into the series of their splits."""

    def __init__(self, job: RangeJob, folder: Path, tick: CountDone) -> None:
        self._job, self._folder, self._tick = job, folder, tick
        self._record = RangeRecord([], [], Statistics())
        self._keys, self._last, self._renamed = array("Q"), "", set[str]()
        self._ends = [int(end * _ALL) for end in accumulate(Fraction(part) for _, part in job.options.split)]
        splits = [name for name, _ in job.options.split] or [""]
        self._series = [_series(folder, split, job.options, self._record) for split in splits]
        named = job.source.kind in ("tars", "packed") or job.options.key_field is not None
        self._may_repeat = named or job.options.key_end == "last"  # keys, which are compared at the end
        self._is_packed = bool(job.source.packed)  # whose tars are counted, not their samples

    def write(self) -> RangeRecord:
        try:
            if self._job.source.packed:
                self._write_packed()
            else:
                source = self._job.source
                self._write_spans(source, source.dataset(), self._job.spans)
            for series in self._series:
                series.finish()
        finally:
            for series in self._series:
                series.close()
        self._record.keys = self._keys.tobytes()
        return self._record

    def _write_spans(self, source: SourceFiles, dataset: Dataset, spans: tuple[RowSpan, ...]) -> None:
        reader = SampleReader(source, dataset, self._job.options, self._job.keys)
        for span in spans:
            read = 0
            for sample in reader.samples(span):
                read += 1
                self._add(sample)
            skipped = span.end - span.start - read
            self._record.samples += span.end - span.start
            if not self._is_packed:
                self._tick(skipped, 0)
        self._record.rejected += reader.rejected
        self._record.statistics.add(reader.finish())

    def _add(self, sample: TarSample) -> None:
        key = self._distinct_key(sample) if self._may_repeat else sample.key
        if not key:
            return
        series = self._series[0]
        if self._ends:
            number = _hashed(key)
            series = self._series[next(i for i, end in enumerate(self._ends) if number < end)]
        parts: dict[str, PartData] = {extension: data for extension, _, data in sample.parts}
        size = sum(map(len, parts.values()))
        if not self._is_packed:
            self._tick(1, size)
        series.add(key, parts)
        self._record.size += size

    def _distinct_key(self, sample: TarSample) -> str:
        """The key, of a repeated one with the name of its tar before it; "" if the sample is rejected."""
        number, before = len(self._keys), self._last
        self._keys.append(_hashed(sample.key))
        self._last = key = sample.key
        byte = self._job.again[number >> 3] if number >> 3 < len(self._job.again) else 0
        if key != before and not byte >> (number & 7) & 1:  # readers take neighbors with one key for one sample
            return key
        statistics = self._record.statistics
        statistics.again += 1
        if len(statistics.repeated) < _EXAMPLES and key not in statistics.repeated:
            statistics.repeated.append(key)
        name = sample.name if isinstance(sample.name, str) else sample.name()
        fault = "duplicate key: twice in one shard"
        if self._job.source.kind in ("tars", "packed"):
            key = f"{name.partition(', record ')[0].rpartition('.')[0].replace('.', '_')}/{key}"
            if key not in self._renamed:
                self._renamed.add(key)
                return key
        elif self._job.source.kind == "folder":
            fault = f"two names with one key: another one would be {key} too"
        else:
            fault = f"duplicate key: {key!r} is the key of a record before it"
        self._record.rejected.append(Reject.of(name, key, fault))
        return ""

    def _write_packed(self) -> None:
        """Decompress the tars of the range, one after another, and write the samples of each."""
        job = self._job
        (span,) = job.spans
        plain, index = self._folder / "decompressed.tar", self._folder / "index"
        for name, size, time_ns in job.source.packed[span.start : span.end]:
            path = Path(job.source.path, name)
            self._tick(1, size)
            fault = _decompress(path, plain)
            table = TARS.scan(self._folder, plain.name)
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) != (size, time_ns):
                raise changed(path, "another file than at the start")
            if fault := fault or table.entry.fault.replace(plain.name, name):
                self._reject(path, "damaged tar", fault)
            elif table.entry.samples:
                write_index(index, [table], TARS)
                store = TarStore(IndexedFiles(TARS, TARS.index_at(index), index, None, self._folder))
                if links := store.left_out():
                    self._reject(path, "links", links.replace(f"{self._folder}: ", "").replace(plain.name, name))
                else:
                    source = SourceFiles(str(self._folder), "tars", name=name)
                    self._write_spans(source, Dataset(store), (RowSpan(0, 0, table.entry.samples, 0),))
                index.unlink()
            plain.unlink(missing_ok=True)

    def _reject(self, path: Path, reason: str, detail: str) -> None:
        self._record.rejected.append(Reject(printable(str(path)), "", reason, printable(detail)))


def _hashed(key: str) -> int:
    return xxh3_64_intdigest(key.encode("utf-8", "surrogateescape"))


def _decompress(path: Path, plain: Path) -> str:
    """Decompress a tar; returns why it cannot be read to its end, or ""."""
    try:
        with opened(path) as content, plain.open("wb") as file:
            shutil.copyfileobj(content, file, _CHUNK)
    except ValueError as error:
        return f"{path.name}: {error}"
    return ""
