"""The index of files behind a URL: of what lies beside them, and of what is read of the others through the cache.

Only the bytes that a format's index needs are fetched: of a Parquet file its footer, of a JSONL file all.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.remote.lookup import METADATA_FOLDER
from savable_pipeline.data.remote.remote_files import (
    IndexKind,
    RemotePlace,
    RemoteVersion,
    looked_up_files,
    remote_version,
)
from savable_pipeline.data.remote.scratch import RemoteObject, scratch, scratch_place
from savable_pipeline.data.remote.urls import RemoteShards
from savable_pipeline.data.shards.file_bytes import FileBytes
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardIndex, ShardTable
from savable_pipeline.data.shards.index_making import Progress
from savable_pipeline.data.shards.index_writer import write_index
from savable_pipeline.data.shards.indexing import check_none_gone
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.cached_blocks import CachedBlocks, CachedBytes
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_AT_ONCE = 8  # files that are read at a time


def open_remote_files(
    files: Shards,
    form: FileFormat,
    *,
    tolerant: bool = False,
    engine: Engine | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[RemotePlace, list[str], ShardIndex]:
    """The place of the files of these URLs, their names, and their index, which is made if it is not in the cache.

    `progress` is told of files that are read to be indexed: here, or by the machines of an `engine`. With `tolerant`, a
    file that cannot be indexed is one with a fault. Raises `ShardError`, `RemoteError`.
    """
    with remote_version(files, form.kind, _index_kind(form), beside=form.beside, tolerant=tolerant) as version:
        whole = isinstance(files, str) and files.rstrip("/") == version.place.url and not form.kind.listing
        if whole and form.splits and version.downloader.call("stat", version.place.url, form.splits) is not None:
            raise ShardError(f"{files}: holds several splits; read one of them, such as {version.place.url}/train/")
        if whole and not tolerant:
            check_none_gone(
                version.place.url,
                set(_own_tables(version.place.url, version.own_index, form)).difference(version.names),
            )
        index = _read(version.place.places, form)
        if index is None:
            _write(version, form, tolerant, progress, engine)
            index = form.index_at(version.place.places)
        return version.place, version.names, index


def index_remote_files(
    files: Shards,
    form: FileFormat,
    progress: Progress = lambda done, total: None,
    engine: Engine | None = None,
) -> tuple[Path, list[ShardEntry]]:
    """Indexes files behind a URL, in the cache; with an `engine` its machines read them.

    Returns the path of the index, and the files with a fault.
    """
    place, names, index = open_remote_files(files, form, tolerant=False, engine=engine, progress=progress)
    faults, wanted = index.shards.faults, set(names)
    return place.places, [index.shards[n] for n in sorted(faults) if index.shards.names[n] in wanted]


def look_up_files(files: Shards, form: FileFormat) -> tuple[RemoteShards, Path, dict[str, ShardEntry]]:
    """The files of these URLs, a local folder with their metadata, and the entries of their own index by name."""
    with looked_up_files(files, form.kind, _index_kind(form)) as looked_up:
        tables = _own_tables(looked_up.found.root, looked_up.own_index, form)
        return looked_up.found, looked_up.folder / METADATA_FOLDER, {name: each.entry for name, each in tables.items()}


def _index_kind(form: FileFormat) -> IndexKind:
    return IndexKind(form.index_name, lambda path: list(form.index_at(path).shards.names))


def _read(path: Path, form: FileFormat) -> ShardIndex | None:
    with contextlib.suppress(OSError, ValueError, ShardError):
        return form.index_at(path)
    return None


def _own_tables(url: str, path: Path | None, form: FileFormat) -> dict[str, ShardTable]:
    """What the index that lies beside the files says, by name."""
    if path is None:
        return {}
    try:
        index = form.index_at(path)
    except (OSError, ValueError, ShardError) as error:
        log.warning("%s/%s: %s; making another", url, form.index_name, error)
        return {}
    return {name: index.table(n) for n, name in enumerate(index.shards.names) if index.is_whole(n)}


def _write(version: RemoteVersion, form: FileFormat, tolerant: bool, progress: Progress, engine: Engine | None) -> None:
    """Writes the index of a version."""
    sizes = {entry.name: entry.size for entry in version.place.cached.shards}
    own = _own_tables(version.place.url, version.own_index, form)
    tables = {
        name: table for name, table in own.items() if sizes.get(name) == table.entry.size and not table.entry.fault
    }
    missing = [name for name in version.names if name not in tables]
    log.info("indexing %d of %d files at %s", len(missing), len(sizes), version.place.url)
    progress(0, len(missing))
    coming = (
        _scanned(version, form, missing, tolerant)
        if engine is None
        else _scanned_elsewhere(engine, version, form, missing)
    )
    with contextlib.closing(coming) as scanned:
        for done, table in enumerate(scanned, 1):
            tables[table.entry.name] = table
            progress(done, len(missing))
    write_index(version.place.places, (tables[name] for name in sorted(tables)), form.name)


def _scanned(
    version: RemoteVersion, form: FileFormat, names: list[str], tolerant: bool
) -> Generator[ShardTable, None, None]:
    """A table for each file; several are read at a time, each through files of its own."""
    numbers = _numbers(version)

    def scan(name: str) -> ShardTable:
        files = CachedBlocks(version.place, downloader=version.downloader)
        try:
            return form.read(CachedBytes(files, numbers[name]), name)
        except ShardError as error:
            if not tolerant:
                raise
            return form.unreadable(name, version.place.cached.shards[numbers[name]].size, str(error))

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(scan, names)


def _numbers(version: RemoteVersion) -> dict[str, int]:
    return {entry.name: number for number, entry in enumerate(version.place.cached.shards)}


@dataclass(frozen=True, slots=True)
class _Scan:
    """One file to read on another machine: by `read`, see `FileFormat`, with what lies `beside` it."""

    file: RemoteObject
    read: Callable[[FileBytes, str], ShardTable]
    beside: tuple[str, str]

    @property
    def name(self) -> str:
        return self.file.name


def _scan_file(job: _Scan) -> tuple[ShardTable, str]:
    """The table of a file, and the version that was read. Raises `ShardError`, `RemoteError`."""
    with scratch() as (folder, downloader):
        place = scratch_place(job.file, job.beside, folder, downloader)
        return job.read(CachedBytes(CachedBlocks(place, downloader=downloader), 0), job.name), place.cached.pin(0)


def _scanned_elsewhere(
    engine: Engine, version: RemoteVersion, form: FileFormat, names: list[str]
) -> Generator[ShardTable, None, None]:
    """`_scanned`, by the machines of an engine; what they read is the version that is read here from then on."""
    numbers, cached = _numbers(version), version.place.cached
    files = (RemoteObject(version.place.url, name, cached.shards[numbers[name]].size) for name in names)
    jobs = (_Scan(file, form.read, form.beside) for file in files)
    with contextlib.closing(engine.each(_scan_file, jobs)) as finished:
        for job, (table, pin) in finished:
            cached.pin(numbers[job.name], pin)
            yield table
