"""A job that writes one range: the same bytes each time, after any kill.

    work/000012.k3x9/train-000000.tar         one attempt, in a folder of its own
    work/000012.k3x9/train-000000.tar.rows    its rows of the index
    work/000012.k3x9/hashes                   uint64: of the contents of parts, and of rejects
    work/000012.k3x9/keys                     uint64: hashes of the keys of samples, if they may be repeated
    work/000012.k3x9/record                   its shards, rejects and counts
    work/000012/                              ─ renamed when all of it is on the disk: the range is finished

Two attempts at one range end with the same bytes, so the first one to be renamed stays. For a bucket, the folder of an
attempt is on the machine that writes. Its shards are uploaded, and its other files are returned.

What a job has in memory does not grow with the samples of its range.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.files import replace_file, replacing
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

RECORD_FILE, KEYS, HASHES, ROWS = "record", "keys", "hashes", ".rows"
_ALL = 1 << 64
_EXAMPLES = 5  # examples of repeated keys
_NOTED_ROWS, _NOTED_BYTES = 256, 16_000_000  # progress is noted after so many rows or bytes


class RangeRecord(msgspec.Struct):
    """Result of a range."""

    shards: list[tuple[str, ShardEntry]] = []  # each with its split
    rejected: list[Reject] = []
    statistics: Statistics = msgspec.field(default_factory=Statistics)
    size: int = 0  # bytes read


class Written(NamedTuple):
    """Rows and bytes that a job read.

    `files` are files for the work folder if it is on another machine, `changed` the names of files that differ.
    """

    rows: int
    size: int
    files: dict[str, bytes]
    changed: list[str]


Hashes: TypeAlias = tuple[Path, int, int]  # a file of uint64, and the number and count of those of a range


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
    repeats: bytes = b""  # a bit for each sample whose key may be repeated: whether another sample has it
    bucket: Bucket | None = None
    hashes: Hashes | None = None

    @property
    def folder(self) -> Path:
        """The folder of the finished range."""
        return self.work / self.name

    @property
    def rows(self) -> int:
        """Return the number of its rows, or of its compressed files."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def is_finished(self) -> bool:
        """Whether the range was written."""
        return (self.folder / RECORD_FILE).exists()

    def record(self) -> RangeRecord:
        """Return the record of the finished range."""
        return msgspec.msgpack.decode((self.folder / RECORD_FILE).read_bytes(), type=RangeRecord)

    def table(self, shard: ShardEntry) -> ShardTable:
        """Return the rows of a shard, which are mapped."""
        return ShardTable(shard, cast("bytes", np.memmap(self.folder / f"{shard.name}{ROWS}", np.uint8, "r").data))

    def written_hashes(self) -> Hashes:
        """Return the hashes of contents."""
        path = self.folder / HASHES
        return path, 0, path.stat().st_size // 8

    def key_hashes(self) -> NDArray[np.uint64]:
        """Return the hashes of the keys of samples."""
        return _numbers(self.folder / KEYS)

    def note(self, written: Written) -> None:
        """Write the files of a range whose shards are in a bucket."""
        for name, data in written.files.items():
            self.folder.mkdir(exist_ok=True)
            replace_file(self.folder / name, [data])


def write_range(job: RangeJob, note: Callable[[int, int], None] = lambda rows, size: None) -> Written:
    """Write a range, or compare it.

    `note` is called now and then with new rows and bytes; the result has those that it did not get.

    Raises `SavableError` if the source changed or the disk is full, ValueError for damage of a whole file.
    """
    with room_on(job.work.parent.parent), _own_folder(job) as folder:
        writer = _RangeWriter(job, folder, note)
        try:
            record = writer.write()
        except ShardError as error:
            if error.reason in CHANGED:
                raise
            raise ValueError(str(error)) from error
        files = {} if job.hashes is not None else _finish(job, folder, record)
        return Written(job.rows - writer.noted[0], record.size - writer.noted[1], files, sorted(writer.changed))


def join_shards(job: RangeJob, split: str, shards: list[tuple[RangeJob, ShardEntry]]) -> Written:
    """Write the samples of shards of several ranges, which are small, as one range."""
    with room_on(job.work.parent.parent), _own_folder(job) as folder:
        record = RangeRecord()
        series = _series(folder, split, job.options, record)
        for other, shard in shards:
            path = other.folder / shard.name
            if job.bucket is not None:
                found = BucketObject(f"{WORK}/{other.name}/{shard.name}", shard.size, 0)
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
        return Written(0, 0, _finish(job, folder, record), [])


@contextlib.contextmanager
def _own_folder(job: RangeJob) -> Iterator[Path]:
    parent = job.work if job.bucket is None else None
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"{job.name}.", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _finish(job: RangeJob, folder: Path, record: RangeRecord) -> dict[str, bytes]:
    if job.bucket is None:
        replace_file(folder / RECORD_FILE, [msgspec.msgpack.encode(record)], sync=True)
        with contextlib.suppress(OSError):  # another attempt was faster
            folder.rename(job.folder)
        return {}
    for _, shard in record.shards:
        job.bucket.upload(f"{WORK}/{job.name}/{shard.name}", folder / shard.name)
    others = [path for path in folder.iterdir() if path.suffix != ".tar"]
    return {path.name: path.read_bytes() for path in others} | {RECORD_FILE: msgspec.msgpack.encode(record)}


def _series(folder: Path, split: str, options: Options, record: RangeRecord) -> ShardSeries:
    prefix = f"{split}-" if split else ""

    def finished(table: ShardTable) -> None:
        replace_file(folder / f"{table.entry.name}{ROWS}", [table.rows], sync=True)
        record.shards.append((split, table.entry))

    return ShardSeries(folder, lambda n: f"{prefix}{n:06d}.tar", options.shard_bytes, options.shard_samples, finished)


class _RangeWriter:
    """Writes the samples of a range into the series of their splits."""

    def __init__(self, job: RangeJob, folder: Path, note: Callable[[int, int], None]) -> None:
        self._job, self._folder, self._record = job, folder, RangeRecord()
        self._note_progress, self.noted, self._rows = note, (0, 0), 0
        self._samples, self._last, self._renamed = 0, "", set[str]()
        self._rejected = list[Reject]()  # of the rows that are read
        self.changed = set[str]()  # the names of files whose content is another
        self._known = None if job.hashes is None else np.sort(_numbers(*job.hashes))
        self._ends = [int(end * _ALL) for end in accumulate(Fraction(part) for _, part in job.options.split)]
        splits = [name for name, _ in job.options.split] or [""]
        self._series = [_series(folder, split, job.options, self._record) for split in splits if job.hashes is None]
        form, options = job.source.form, job.options
        self._may_repeat = form == TARS or options.key_field is not None or options.key_end == "last"

    def write(self) -> RangeRecord:
        with contextlib.ExitStack() as stack:
            keys, hashes = (stack.enter_context(replacing(self._folder / name, sync=True)) for name in (KEYS, HASHES))
            self._keys, self._hashes = NumberSpool(file=keys), NumberSpool(file=hashes)
            for series in self._series:
                stack.callback(series.close)
            if self._job.source.packed:
                self._write_packed()
            else:
                self._write_spans(self._job.source, self._job.source.dataset(), self._job.spans)
            for series in self._series:
                series.finish()
            self._keys.write()
            self._hashes.write()
        return self._record

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
        """Record the hash of a part or a reject, or a changed file if the known hash differs."""
        self._hashes.append(content)
        if self._known is not None:
            found = np.uint64(content)
            if found not in self._known[np.searchsorted(self._known, found) :][:1]:
                self.changed.add(file)

    def _reject(self, reject: Reject) -> None:
        self._record.rejected.append(reject)
        self._note(reject.file, _hashed(f"{reject.file}\0{reject.reason}"))

    def _distinct_key(self, sample: TarSample) -> str:
        """Return the key, of a repeated one with the name of its tar before it; "" if the sample is rejected."""
        number, before = self._samples, self._last
        self._samples += 1
        self._keys.append(_hashed(sample.key))
        self._last = key = sample.key
        byte = self._job.repeats[number >> 3] if number >> 3 < len(self._job.repeats) else 0
        if key != before and not byte >> (number & 7) & 1:  # readers merge neighbors with one key
            return key
        statistics, form = self._record.statistics, self._job.source.form
        statistics.repeats += 1
        if len(statistics.repeated) < _EXAMPLES and key not in statistics.repeated:
            statistics.repeated.append(key)
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
        """Decompress the files of the range, one after another, and write the samples of each."""
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


def _numbers(path: Path, first: int = 0, count: int = -1) -> NDArray[np.uint64]:
    return np.fromfile(path, "<u8", count, offset=8 * first)


def _hashed(key: str) -> int:
    return xxh3_64_intdigest(key.encode("utf-8", "surrogateescape"))
