"""What an index says of files behind a URL that have none: here, or on the machines of an engine.

A tar is downloaded whole and scanned on the disk; of another file only the bytes that its format's index needs are
fetched, through the cache: of a Parquet file its footer, of a JSONL file all. What was scanned is in a file until all
is there, and what was downloaded stays in the cache, if all of it fits: who is stopped goes on from there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.remote.remote_files import RemotePlace, held, unread_version
from savable_pipeline.data.remote.scratch import scratch
from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.remote.shard_cache import ShardCache
from savable_pipeline.data.remote.urls import RemoteShards
from savable_pipeline.data.remote.version_pins import pin_whole, pinned_version, whole_version
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardTable
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.shard_files import StoreFile
from savable_pipeline.errors import ShardError

_AT_ONCE = 8  # files that are read at a time


class WholeScans:
    """Files that are downloaded whole to be scanned: NAME, and the server's version as NAME.pin, below `aside`."""

    def __init__(self, found: RemoteShards, form: FileFormat, folder: Path, session: Session) -> None:
        self.aside = folder / "scan"
        self._found, self._form, self._session = found, form, session

    def scan(self, number: int) -> ShardTable:
        """The table of a file, in any thread. Raises `ShardError` for one that is not as it was, `RemoteError`."""
        name, size, path = self._found.names[number], int(self._found.sizes[number]), self._path(number)
        if whole_version(path) is None or path.stat().st_size != size:
            self.pin(number, self._session.call("whole", self._found.root, name, size, str(path)))
        return self._form.scan(self.aside, name)

    def drop(self, number: int) -> None:
        """Lets go of what is here of a file."""
        self._path(number).unlink(missing_ok=True)

    def pin(self, number: int, version: str = "") -> str:
        """The server's version of a file that was scanned, "" if it is not known; notes it, if one is given."""
        if version:
            pin_whole(self._path(number), version)
        return pinned_version(self._path(number))

    def moved(self, fresh: Path, version: Path, scanned: list[int]) -> ShardCache:
        """The version in this folder with the index at `fresh`, and with what is here of the files `scanned`."""
        cached = _with_index(version, fresh)
        for number in scanned:
            if cached.pin(number, self.pin(number)) and whole_version(self._path(number)):
                self._keep(cached, number)
        shutil.rmtree(self.aside, ignore_errors=True)
        return cached

    def _keep(self, cached: ShardCache, number: int) -> None:
        """Moves a file into the cache, and marks all its rows as present."""
        path = self._path(number)
        if path.stat().st_size == cached.shards.sizes[number]:
            path.replace(cached.path(number))
            fd = cached.open(number)
            cached.mark_present(number, fd, int(cached.firsts[number]), int(cached.firsts[number + 1]))
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self.aside / self._found.names[number]


class PartScans:
    """Files that are read through the cache: of a version without an index, which becomes that of the index."""

    def __init__(self, found: RemoteShards, form: FileFormat, folder: Path, session: Session) -> None:
        self._cached = unread_version(found, folder)
        self._place = RemotePlace(found.root, self._cached, session)
        self._form, self.aside = form, self._cached.folder

    def scan(self, number: int) -> ShardTable:
        """See `WholeScans.scan`."""
        files = CachedBlocks(self._place)  # of this thread
        return self._form.read(StoreFile(files, number), self._cached.shards.names[number])

    def drop(self, number: int) -> None:
        """See `WholeScans.drop`."""
        self._cached.forget(number)

    def pin(self, number: int, version: str = "") -> str:
        """See `WholeScans.pin`."""
        return self._cached.pin(number, version)

    def moved(self, fresh: Path, version: Path, scanned: list[int]) -> ShardCache:
        """See `WholeScans.moved`."""
        if not (version / "flags").exists():
            shutil.rmtree(version, ignore_errors=True)
            fresh.replace(self.aside / "index")
            self.aside.replace(version)
            return held(version)
        cached = _with_index(version, fresh)
        for number in scanned:
            cached.pin(number, self.pin(number))
        shutil.rmtree(self.aside)
        return cached


def _with_index(version: Path, fresh: Path) -> ShardCache:
    version.mkdir(exist_ok=True)
    fresh.replace(version / "index")
    (version / "parts").unlink(missing_ok=True)
    return held(version)


RemoteScans: TypeAlias = WholeScans | PartScans  # of files of which names and sizes are known, by their numbers


def scans_of(found: RemoteShards, form: FileFormat, folder: Path, session: Session) -> RemoteScans:
    """What scans these files, in the `folder` of their dataset in a cache of `limit` bytes."""
    if form.whole:
        return WholeScans(found, form, folder, session)
    return PartScans(found, form, folder, session)


@dataclass(frozen=True, slots=True)
class RemoteScan:
    """One file to scan on another machine: below `url`, of so many bytes, and with this stamp where one is known."""

    form: FileFormat
    url: str
    name: str
    size: int
    stamp: str = ""


def scan_there(file: RemoteScan) -> tuple[ShardTable, str]:
    """The table of a file, and the server's version of it. Raises `ShardError` if it has another size by now."""
    with scratch() as (folder, session):
        found = RemoteShards(file.url, [file.name], np.array([file.size]), [file.stamp])
        scans = scans_of(found, file.form, folder / "dataset", session)
        return scans.scan(0), scans.pin(0)


def scanned_elsewhere(
    engine: Engine, scans: RemoteScans, found: RemoteShards, form: FileFormat, numbers: list[int]
) -> Generator[ShardTable, None, None]:
    """The tables of these files, by the machines of an engine; what they read is pinned here."""
    stamps = found.stamps or [""] * len(found.names)
    jobs = (RemoteScan(form, found.root, found.names[n], int(found.sizes[n]), stamps[n]) for n in numbers)
    of = {found.names[number]: number for number in numbers}
    with contextlib.closing(engine.each(scan_there, jobs)) as finished:
        for job, (table, version) in finished:
            scans.pin(of[job.name], version)
            yield table


def scanned_here(
    scans: RemoteScans, numbers: list[int], unreadable: Callable[[int, ShardError], ShardTable]
) -> Generator[ShardTable, None, None]:
    """The tables of these files, some of which are read at a time; `unreadable` gives that of one that fails."""

    def scan(number: int) -> ShardTable:
        try:
            return scans.scan(number)
        except ShardError as error:
            return unreadable(number, error)

    coming: deque[Future[ShardTable]] = deque()
    waiting = iter(numbers)
    threads = ThreadPoolExecutor(_AT_ONCE)
    try:
        coming.extend(threads.submit(scan, number) for number in itertools.islice(waiting, _AT_ONCE))
        while coming:
            yield coming.popleft().result()
            coming.extend(threads.submit(scan, number) for number in itertools.islice(waiting, 1))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
