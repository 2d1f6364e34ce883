"""Index of remote files of any format: the dataset's own, or one in the cache.

A dataset's own index is trusted until one of its files is found changed. That file is then indexed in the cache.
Without an index, the server is asked for the stamps of all files except tars at each start, and changed and new files
are indexed again.

A tar is downloaded whole and scanned on the disk. Of other files, only the bytes that an index needs are fetched,
through the cache: the footer of a Parquet file, all of a JSONL file. Scanned tables are stored until all files are
indexed, and downloaded bytes stay in the cache if they fit, so that an interrupted start resumes from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.remote.cache_files import pin_whole, pinned_version, read_pin, whole_version
from savable_pipeline.data.remote.lookup import (
    RemoteFolder,
    Version,
    hash_of,
    locked_dataset,
    newest_version,
    open_protected,
    pointed_version,
    unread_version,
    with_stamps,
    write_pointer,
)
from savable_pipeline.data.remote.session import Session, scratch
from savable_pipeline.data.remote.shard_cache import ShardCache, changed_shards, create_flags, open_parts
from savable_pipeline.data.remote.urls import RemoteShards
from savable_pipeline.data.shards.index import Format, ShardIndex, ShardTable
from savable_pipeline.data.shards.index_making import FileProgress, ScannedTables, write_index
from savable_pipeline.data.shards.indexing import check_none_gone
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardNames
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.shard_files import StoreFile
from savable_pipeline.errors import ShardError

_FILES_AT_ONCE = 8  # number of files to read at a time
log = logging.getLogger(__name__)


class WholeScans:
    """Scanner that downloads whole files into `scan_folder`.

    A file is NAME there, and NAME.pin has its version on the server.
    """

    def __init__(self, found: RemoteShards, form: Format, folder: Path, session: Session) -> None:
        self.scan_folder = folder / "scan"
        self._found, self._form, self._session = found, form, session

    def scan(self, number: int) -> ShardTable:
        """Return the table of a file, in any thread.

        Raises `ShardError` for a file that changed, `RemoteError`.
        """
        name, size, path = self._found.names[number], int(self._found.sizes[number]), self._path(number)
        if whole_version(path) is None or path.stat().st_size != size:
            self.pin(number, self._session.call("whole", self._found.root, name, size, str(path)))
        return self._form.scan(self.scan_folder, name)

    def drop(self, number: int) -> None:
        """Delete the local copy of a file."""
        self._path(number).unlink(missing_ok=True)

    def pin(self, number: int, version: str = "") -> str:
        """Return the server's version of a file that was scanned, or "".

        If a `version` is passed, it is recorded first.
        """
        if version:
            pin_whole(self._path(number), version)
        return pinned_version(self._path(number))

    def create_version(self, fresh: Path, version: Path, scanned: list[int]) -> ShardCache:
        """Create the version in the folder `version`, with the index at `fresh`.

        The cached bytes of the `scanned` files are moved there.
        """
        cached = _with_index(version, fresh)
        for number in scanned:
            if cached.pin(number, self.pin(number)) and whole_version(self._path(number)):
                self._adopt(cached, number)
        shutil.rmtree(self.scan_folder, ignore_errors=True)
        return cached

    def _adopt(self, cached: ShardCache, number: int) -> None:
        """Move a file into the cache, and mark all its rows as present."""
        path = self._path(number)
        if path.stat().st_size == cached.shards.sizes[number]:
            path.replace(cached.path(number))
            fd = cached.open(number)
            cached.mark_present(number, fd, int(cached.firsts[number]), int(cached.firsts[number + 1]))
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self.scan_folder / self._found.names[number]


class PartScans:
    """Scanner that reads files through the cache.

    The files are cached in a version without an index, which later gets the new index.
    """

    def __init__(self, found: RemoteShards, form: Format, folder: Path, session: Session) -> None:
        self._cached = unread_version(found, folder)
        # The downloading process may have opened an earlier folder of this name.
        session.call("forget", str(self._cached.folder))
        self._folder = RemoteFolder(found.root, self._cached, session)
        self._form, self.scan_folder = form, self._cached.folder

    def scan(self, number: int) -> ShardTable:
        """See `WholeScans.scan`."""
        files = CachedBlocks(self._folder)  # one reader per thread
        return self._form.read(StoreFile(files, number), self._cached.shards.names[number])

    def drop(self, number: int) -> None:
        """See `WholeScans.drop`."""
        self._cached.forget(number)

    def pin(self, number: int, version: str = "") -> str:
        """See `WholeScans.pin`."""
        return self._cached.pin(number, version)

    def create_version(self, fresh: Path, version: Path, scanned: list[int]) -> ShardCache:
        """See `WholeScans.create_version`."""
        if not (version / "flags").exists():
            shutil.rmtree(version, ignore_errors=True)
            fresh.replace(self.scan_folder / "index")
            self.scan_folder.replace(version)
            return open_protected(version)
        cached = _with_index(version, fresh)
        for number in scanned:
            cached.pin(number, self.pin(number))
        shutil.rmtree(self.scan_folder)
        return cached


def _with_index(version: Path, fresh: Path) -> ShardCache:
    """Move the index at `fresh` to the folder of a version, and return its cache."""
    version.mkdir(exist_ok=True)
    fresh.replace(version / "index")
    (version / "parts").unlink(missing_ok=True)
    return open_protected(version)


RemoteScans: TypeAlias = WholeScans | PartScans  # a scanner of files, which are named by their numbers


def scans_of(found: RemoteShards, form: Format, folder: Path, session: Session) -> RemoteScans:
    """Return the scanner for these files, in the `folder` of their dataset."""
    if form.whole:
        return WholeScans(found, form, folder, session)
    return PartScans(found, form, folder, session)


@dataclass(frozen=True, slots=True)
class RemoteScan:
    """File to scan on another machine, below `url`, with its size and stamp.

    The stamp is "" if it is unknown.
    """

    form: Format
    url: str
    name: str
    size: int
    stamp: str = ""


def scan_remotely(file: RemoteScan) -> tuple[ShardTable, str]:
    """Return the table of a file, and its version on the server.

    Raises `ShardError` if its size changed.
    """
    with scratch() as (folder, session):
        found = RemoteShards(file.url, [file.name], np.array([file.size]), [file.stamp])
        scans = scans_of(found, file.form, folder / "dataset", session)
        table = scans.scan(0)
        # convert to bytes, because a view cannot be sent
        return msgspec.structs.replace(table, rows=bytes(table.rows)), scans.pin(0)


def scan_by_engine(
    engine: Engine, scans: RemoteScans, found: RemoteShards, form: Format, numbers: list[int]
) -> Generator[ShardTable, None, None]:
    """Yield the tables of these files, scanned by the machines of an engine.

    The versions of the files are pinned on this machine.
    """
    stamps = found.stamps or [""] * len(found.names)
    jobs = (RemoteScan(form, found.root, found.names[i], int(found.sizes[i]), stamps[i]) for i in numbers)
    number_of = {found.names[number]: number for number in numbers}
    with contextlib.closing(engine.each(scan_remotely, jobs)) as finished:
        for job, (table, version) in finished:
            scans.pin(number_of[job.name], version)
            yield table


def scan_locally(
    scans: RemoteScans, numbers: list[int], unreadable: Callable[[int, ShardError], ShardTable]
) -> Generator[ShardTable, None, None]:
    """Yield the tables of these files, reading several at a time.

    `unreadable` returns the table of a file that fails.
    """

    def scan(number: int) -> ShardTable:
        try:
            return scans.scan(number)
        except ShardError as error:
            return unreadable(number, error)

    running: deque[Future[ShardTable]] = deque()
    waiting = iter(numbers)
    threads = ThreadPoolExecutor(_FILES_AT_ONCE)
    try:
        running.extend(threads.submit(scan, number) for number in itertools.islice(waiting, _FILES_AT_ONCE))
        while running:
            yield running.popleft().result()
            running.extend(threads.submit(scan, number) for number in itertools.islice(waiting, 1))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def open_remote(
    files: Shards,
    found: RemoteShards,
    form: Format,
    session: Session,
    *,
    tolerant: bool,
    reindex: bool = False,
    engine: Engine | None = None,
    progress: FileProgress = lambda done, total: None,
) -> tuple[RemoteFolder, Sequence[str]]:
    """Index files if needed, and return where they are cached, and their names.

    `found` are the files. Files that differ from the index are indexed again, unless `tolerant`. With `reindex`, all
    files are, and their sizes are requested from the server. `progress` counts the indexed files. The machines of an
    `engine` index them, or else this one. Raises `RemoteError`, and unless `tolerant` `ShardError` for a damaged file
    or one that was deleted.
    """
    with locked_dataset(found, form, session, counts=reindex) as (found, folder, own):
        if reindex:
            found = replace(found, sizes=with_stamps(found, session, np.flatnonzero(found.sizes < 0).tolist()).sizes)
        elif found.whole and own is not None and not found.is_listed:
            found = _with_missing(found, own.index, tolerant)
        if own is not None and not tolerant:
            _flag_changed(own, found)
        builder = _IndexBuilder(form, folder, session, tolerant, reindex, engine, progress)
        keeps_index = tolerant and not reindex and not form.whole  # even if files changed
        if own is not None and _covers(own.index, found, tolerant, builder.changed(own), sizes=not keeps_index):
            cached = open_protected(own.folder)
        else:
            found, cached = builder.index_of(files, found, own)
        session.call("forget", str(cached.folder))  # another opening may have deleted the replaced version
        session.forget()
        return RemoteFolder(found.root, cached, session), found.names


def index_remote(
    files: Shards,
    found: RemoteShards,
    form: Format,
    session: Session,
    progress: FileProgress = lambda done, total: None,
    engine: Engine | None = None,
) -> tuple[Path, list[ShardEntry]]:
    """Index remote files in the cache, unless their own index is valid.

    The machines of an `engine` read them, if there is one.

    Returns the path of the index in the cache, and the files that could not be read to their end.
    """
    folder, names = open_remote(
        files, found, form, session, tolerant=True, reindex=True, engine=engine, progress=progress
    )
    shards, wanted = folder.index.shards, set(names)
    return folder.index_path, [shards[number] for number in sorted(shards.faults) if shards.names[number] in wanted]


def _with_missing(found: RemoteShards, index: ShardIndex, tolerant: bool) -> RemoteShards:
    """Return the files below a prefix, and those of the index that are gone, sorted by name.

    Raises `ShardError` for deleted files unless `tolerant`.
    """
    indexed = index.shards.names
    if ShardNames.of(found.names).text == indexed.text:
        return found
    gone = set(indexed).difference(found.names)
    if not tolerant:
        check_none_gone(found.root, gone)
    stamps = found.stamps or [""] * len(found.names)
    listed = zip(found.names, zip(found.sizes.tolist(), stamps, strict=True), strict=True)
    files = dict(sorted({**dict.fromkeys(gone, (-1, "")), **dict(listed)}.items()))
    sizes = np.array([size for size, _ in files.values()], np.int64)
    return RemoteShards(found.root, [*files], sizes, [stamp for _, stamp in files.values()] if found.stamps else ())


def _flag_changed(own: Version, found: RemoteShards) -> None:
    """Flag cached files that have another version in the listing of the server."""
    stamps = dict(zip(found.names, found.stamps, strict=True)) if found.stamps else {}
    pins = [path for path in own.folder.glob("*.pin") if path.stem.isdecimal()] if stamps else []
    listed = [(int(path.stem), read_pin(path), stamps.get(own.index.shards.names[int(path.stem)])) for path in pins]
    if replaced := [number for number, pin, stamp in listed if stamp and pin not in stamp]:
        create_flags(own.folder)
        ShardCache(own.folder).changed[replaced] = 1


def _covers(index: ShardIndex, found: RemoteShards, tolerant: bool, changed: set[str], *, sizes: bool = True) -> bool:
    """Return whether an index has all files with their current sizes and, unless `tolerant`, without faults."""
    if changed and not changed.isdisjoint(found.names):
        return False
    try:
        numbers = index.numbers(found.names)
    except KeyError:
        return False
    if not tolerant and index.shards.faults and not index.shards.faults.keys().isdisjoint(numbers.tolist()):
        return False
    known = index.shards.sizes[numbers]
    return not sizes or bool(((found.sizes == known) | (found.sizes == -1)).all())


@dataclass(frozen=True, slots=True)
class _IndexBuilder:
    """Builds the index of remote files in the `folder` of their dataset.

    It reuses rows of earlier indexes, and scans new files and those that changed.
    """

    form: Format
    folder: Path
    session: Session
    tolerant: bool
    reindex: bool
    engine: Engine | None
    progress: FileProgress

    def index_of(self, files: Shards, found: RemoteShards, own: Version | None) -> tuple[RemoteShards, ShardCache]:
        """Return the files, and the version with their index.

        An index that was built before is used if it fits.
        """
        pointer = self.folder / f"made-{_hash(as_names(files))}.json"
        before = pointed_version(pointer, self.form)
        changed = self.changed(before)
        if before is not None and self.tolerant and not self.reindex:
            names = before.index.shards.names
            if set(found.names) <= set(names):
                return RemoteShards.named(found.root, names), open_protected(before.folder)
        if not self.form.whole:
            known = () if own is None else set(own.index.shards.names)
            unknown = [number for number, name in enumerate(found.names) if name not in known]
            found = with_stamps(found, self.session, unknown, self.form)
        stamps = found.stamps if any(found.stamps) else ()
        stamp = hash_of(replace(found, stamps=stamps), sizes=False)
        if before is not None and before.stamp == stamp and _covers(before.index, found, self.tolerant, changed):
            return found, open_protected(before.folder)
        cached = self._build(found, before, own)
        write_pointer(pointer, Version(cached.folder, cached.layout.index, stamp, stamps))
        for stale in self.folder.glob("new-*"):  # old versions of files, left by an interrupted call
            shutil.rmtree(stale, ignore_errors=True)
        if self.form.whole:
            cached.changed[:] = 0
        pins = {number: cached.pin(number) for number in np.flatnonzero(cached.changed).tolist()}
        cached.forget_changed()  # cached bytes of changed files may be damaged
        for number, pin in pins.items():
            cached.pin(number, pin)
        return found, cached

    def changed(self, version: Version | None) -> set[str]:
        """Return the names of files that were found to differ from this version.

        The result is empty if such files are not indexed again.
        """
        return changed_shards(version.folder) if version and (self.reindex or not self.tolerant) else set()

    def _build(self, found: RemoteShards, before: Version | None, own: Version | None) -> ShardCache:
        base = before or own
        if base is None:  # an earlier index may have fewer files
            found = with_stamps(found, self.session, range(len(found.names)))
            base = newest_version(self.folder, "made-*.json", self.form)
        known = {} if base is None else self._unchanged_numbers(base, found, self.changed(base))
        missing = [number for number in range(len(found.names)) if number not in known]
        found = with_stamps(found, self.session, missing)
        if base is not None:
            found.sizes[[*known]] = base.index.shards.sizes[[*known.values()]]
        scans = scans_of(found, self.form, self.folder, self.session)
        scans.scan_folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / "downloaded.index"
        with ScannedTables(scans.scan_folder / "index") as scanned:
            self._scan(scans, found, missing, scanned)
            tables = (
                base.index.table(known[number]) if base is not None and number in known else scanned[name]
                for number, name in enumerate(found.names)
            )
            write_index(fresh, tables, self.form)
        version = self._version(fresh, {number: scans.pin(number) for number in missing})
        if base is not None and any(
            read_pin(version / f"{new}.pin") not in ("", read_pin(base.folder / f"{old}.pin"))
            for new, old in known.items()
        ):
            # the existing version has bytes of other files
            version = version.with_name(f"{version.name}-{_hash(base.folder.name)}")
        return scans.create_version(fresh, version, missing)

    def _unchanged_numbers(self, base: Version, found: RemoteShards, changed: set[str]) -> dict[int, int]:
        """Return the numbers of unchanged files in an earlier index, by their new numbers. Their rows are fetched."""
        numbers = {name: number for number, name in enumerate(found.names)}
        known = {}
        for old, entry in enumerate(base.index.shards):
            number = numbers.get(entry.name, -1)
            is_same = number >= 0 and found.sizes[number] in (-1, entry.size) and not entry.fault
            if is_same and entry.name not in changed and (not base.stamps or base.stamps[old] == found.stamps[number]):
                known[number] = old
        if (parts := open_parts(base.folder, base.index)) is not None and known:
            create_flags(base.folder)
            absent = parts.absent(np.array([*known.values()], dtype=np.int64))
            self.session.call("index_rows", found.root, str(base.folder), absent.tolist())
        return {number: old for number, old in known.items() if base.index.is_whole(old)}

    def _scan(self, scans: RemoteScans, found: RemoteShards, missing: list[int], scanned: ScannedTables) -> None:
        """Scan these files, unless an interrupted call has scanned them already."""
        form, size = self.form, int(found.sizes[missing].sum())
        fits = self.engine is None and size <= self.session.limit
        to_scan = {found.names[i]: i for i in missing if not _is_scanned(scanned, found.names[i], int(found.sizes[i]))}
        if form.whole:
            log.warning(
                "%s has no index of %d shards (%.3g GB). They are downloaded to build it. Run `savable index` there",
                found.root,
                len(missing),
                size / 1e9,
            )
        else:
            log.info("indexing %d of %d files at %s", len(to_scan), len(found.names), found.root)

        def unreadable(number: int, error: ShardError) -> ShardTable:
            if self.reindex or not self.tolerant:
                raise error
            return form.unreadable(found.names[number], int(found.sizes[number]), str(error))

        done_before, numbers = len(missing) - len(to_scan), [*to_scan.values()]
        self.progress(done_before, len(missing))
        scanning = (
            scan_locally(scans, numbers, unreadable)
            if self.engine is None
            else scan_by_engine(self.engine, scans, found, form, numbers)
        )
        with contextlib.closing(scanning) as tables:
            for done, table in enumerate(tables, done_before + 1):
                number = to_scan[table.entry.name]
                if table.entry.fault and not self.tolerant:
                    scans.drop(number)
                    raise ShardError(f"{found.root}/{table.entry.fault}")
                scanned.add(table)
                if form.whole and not fits:
                    scans.drop(number)
                self.progress(done, len(missing))

    def _version(self, fresh: Path, pins: dict[int, str]) -> Path:
        """Return the folder for this index, under another name if it exists for other versions of the files."""
        version = self.folder / self.form.index_at(fresh).identity.hex()
        if any(pin and read_pin(version / f"{number}.pin") not in ("", pin) for number, pin in pins.items()):
            return version.with_name(f"{version.name}-{_hash(sorted(pins.items()))}")
        return version


def _is_scanned(scanned: ScannedTables, name: str, size: int) -> bool:
    """Return whether an interrupted call stored a complete table of a file of this size."""
    if name not in scanned:
        return False
    entry = scanned[name].entry
    return entry.size == size and not entry.fault


def _hash(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:32]
