"""Building of a dataset's media table from the headers of its media parts.

Several processes read the headers, and nothing is decoded. A part whose headers cannot be read is reported, and is
marked as broken in the table. Existing entries of shards are reused. The results of an interrupted command are in a
file next to the table (see index_making.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import numpy as np

from savable_pipeline.core.wording import encodable
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.media.media_table import KIND, HeaderFacts, MediaTable, may_be_newer, pack_rows, read_headers
from savable_pipeline.data.shards.index import BlobIndex, Format, IndexedFiles, ShardTable
from savable_pipeline.data.shards.index_making import (
    FileProgress,
    ScannedTables,
    each_shard,
    serial_then_parallel,
    write_index,
)
from savable_pipeline.data.shards.indexing import at_first_writable, media_table_name, open_files
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.shards.part_types import MEDIA_PARTS, part_type
from savable_pipeline.data.shards.paths import Shards, is_remote
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.opening import find_source, store_of
from savable_pipeline.errors import MediaError, SavableError, ShardError

_ALONE_S = 2.0  # seconds for which one process reads before others start
_MOST_FAULTS = 100  # most broken parts that are listed with their error


@dataclass(frozen=True, slots=True)
class MediaFaults:
    """Number of unreadable parts and shards together, and the first messages."""

    count: int
    messages: list[str]


def index_media(
    files: Shards, *, processes: int | None = None, progress: FileProgress = lambda done, total: None
) -> tuple[Path, MediaFaults]:
    """Build the media table of indexed files in `processes` processes.

    None means one per core. Returns its path, and the unreadable parts and shards. Raises `ShardError`, also for remote
    files; ImportError without PyAV, if there is audio or video.
    """
    reject_remote(files)
    source = find_source(files)
    form = source.format
    indexed = open_files(source.listed or source.files, form, tolerant=True)

    def scan(path: Path) -> Path:
        _build(path, indexed, processes or os.cpu_count() or 1, progress)
        return path

    path = at_first_writable(indexed.root, media_table_name(form.index_kind), scan, near=(indexed.root / META).is_dir())
    return path, _faults(path, indexed)


def reject_remote(files: Shards) -> None:
    """Raise `ShardError` for remote files."""
    if is_remote(files):
        raise ShardError(f"{files}: `savable index --media` reads local files. Run it there, and upload {META}")


def _build(path: Path, indexed: IndexedFiles, processes: int, progress: FileProgress) -> None:
    """Write the table at `path`, which the caller has locked."""
    for stale in path.parent.glob(f"{path.name}.*.tmp"):
        stale.unlink(missing_ok=True)
    current = {entry.name: entry for entry in indexed.index.shards}
    old = _open_table(path)
    reused: dict[str, int] = {}  # numbers in the old table, by name
    for number, name in enumerate(() if old is None else old.shards.names):
        is_reusable = old and _is_current(old.shards[number], current) and old.is_whole(number)
        if is_reusable and not may_be_newer(indexed.root / name, path):
            reused[name] = number
    with ScannedTables(path) as scanned:
        resumed = {name for name in scanned if _is_current(scanned[name].entry, current)}
        missing = [name for name in indexed.entries.names if name not in reused and name not in resumed]
        progress(0, len(missing))
        for done, found in enumerate(_scan_all(indexed, missing, processes), 1):
            scanned.add(found)
            resumed.add(found.entry.name)
            progress(done, len(missing))

        def table_of(name: str) -> ShardTable:
            if name in resumed or old is None:
                return scanned[name]
            return old.table(reused[name])

        write_index(path, map(table_of, sorted({*reused, *resumed})), KIND)


def _open_table(path: Path) -> BlobIndex | None:
    with contextlib.suppress(OSError, ValueError, ShardError):
        return BlobIndex(path, KIND)
    return None


def _is_current(old: ShardEntry, current: dict[str, ShardEntry]) -> bool:
    """Return whether the `old` entry of a table has no error and is of the current version of its shard."""
    entry = current.get(old.name)
    is_same = entry is not None and (entry.size, entry.samples, entry.digest) == (old.size, old.samples, old.digest)
    return is_same and not old.fault


def _scan_all(indexed: IndexedFiles, names: list[str], processes: int) -> Iterator[ShardTable]:
    """Yield the table rows of each of these shards.

    Several processes read them if it takes more than some seconds.
    """
    scan = _Scan(indexed.form, indexed.index_path, indexed.root)
    task = partial(_scan, indexed.form, indexed.index_path)

    def in_processes(remaining: list[str]) -> Iterator[ShardTable]:
        with contextlib.closing(each_shard(task, indexed.root, remaining, processes)) as answers:
            for other, answer in answers:
                yield (scan.crashed(other) if answer is None else msgspec.msgpack.decode(answer, type=ShardTable))

    return serial_then_parallel(names, scan, in_processes, _ALONE_S) if processes > 1 else map(scan, names)


def _scan(form: Format, index_path: Path, root: Path, name: str) -> ShardTable:
    """Return the table rows of a shard. A child process reads the index only once."""
    return _open_scan(form, index_path, root)(name)


@lru_cache(maxsize=1)
def _open_scan(form: Format, index_path: Path, root: Path) -> _Scan:
    return _Scan(form, index_path, root)


class _Scan:
    """Reads the headers of shards of an index."""

    def __init__(self, form: Format, index_path: Path, root: Path) -> None:
        self._index, self._root = form.index_at(index_path), root
        files = IndexedFiles(form, self._index, index_path, None, root, tolerant=True)
        self._dataset = Dataset(store_of(files, inspect=True))

    def __call__(self, name: str) -> ShardTable:
        """Return the table rows of a shard. An error of the shard is in its entry."""
        entry = self._entry(name)
        try:
            return ShardTable(entry, pack_rows(_media_of_samples(self._dataset, self._index.number(name))))
        except SavableError as error:
            return self._failed(entry, str(error))

    def crashed(self, name: str) -> ShardTable:
        """Return the table of a shard whose headers crashed a process."""
        return self._failed(self._entry(name), "the process that read its headers died; was there too little memory?")

    def _entry(self, name: str) -> ShardEntry:
        return msgspec.structs.replace(self._index.shards[self._index.number(name)], fault="")

    def _failed(self, entry: ShardEntry, fault: str) -> ShardTable:
        """Return a table with an error and no rows, because a shard is read whole or not."""
        reason = fault.removeprefix(f"{self._root}/").removeprefix(f"{entry.name}: ")
        return ShardTable(msgspec.structs.replace(entry, fault=encodable(f"{entry.name}: {reason}")), pack_rows(()))


def _media_of_samples(dataset: Dataset, shard: int) -> Iterator[list[tuple[str, HeaderFacts]]]:
    """Yield for each sample of a shard the names and headers of its media parts."""
    ranges = getattr(dataset.store, "range_parts", ())
    for row in dataset.locate(np.arange(dataset.firsts[shard], dataset.firsts[shard + 1]))[1].tolist():
        parts = dataset.extensions(shard, row)
        media = [part for part in parts if part_type(part) in MEDIA_PARTS or part in ranges]
        yield [(part, read_headers(dataset.store, shard, row, part)) for part in media]


def _faults(path: Path, indexed: IndexedFiles) -> MediaFaults:
    """Return the shards and parts in the table at `path` that could not be read."""
    table = BlobIndex(path, KIND)
    numbers = table.numbers(indexed.entries.names)
    faults = [table.shards.faults[number] for number in numbers.tolist() if number in table.shards.faults]
    readable = [shard for shard, number in enumerate(numbers.tolist()) if number not in table.shards.faults]
    count, names = len(faults), indexed.entries.select(np.array(readable, np.int64)).names
    files = IndexedFiles(indexed.form, indexed.index, indexed.index_path, names, indexed.root, tolerant=True)
    if not files.firsts[-1]:
        return MediaFaults(count, faults[:_MOST_FAULTS])
    dataset = Dataset(store_of(files, inspect=True))
    for shard, row, part in MediaTable(path, table, numbers[readable]).broken():
        count += 1
        if len(faults) < _MOST_FAULTS:
            faults.append(_describe_broken(dataset, int(dataset.firsts[shard]) + row, part))
    return MediaFaults(count, faults[:_MOST_FAULTS])


def _describe_broken(dataset: Dataset, index: int, part: str) -> str:
    """Return the error of reading the headers of a part of the sample with this index."""
    epoch = 0
    refs = np.array([(index, epoch)], REF)
    try:
        dataset.open_samples(refs)[0].media(part)
    except (MediaError, SavableError) as error:
        return encodable(str(error))
    return f"{part!r} of sample {index}"  # reached only if the part changed since it was read
