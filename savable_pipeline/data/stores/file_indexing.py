"""Finds the index of files that are not tars, or makes it: on first use, by one process, under a lock.

A file is scanned again if its size has changed, or if it is younger than the index and is not as it was: moving or
touching a folder does not matter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from savable_pipeline.core.open_files import with_handles
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.data.remote.remote_files import RemotePlace
from savable_pipeline.data.remote.urls import is_remote
from savable_pipeline.data.shards.index_place import in_first_place, index_places
from savable_pipeline.data.shards.indexing import check_none_gone
from savable_pipeline.data.shards.paths import Shards, find_shards, raise_it, spelled_out
from savable_pipeline.data.shards.processes import Answer, EachShard, do, each_shard
from savable_pipeline.data.shards.scan import check_utf8
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.downloads import check_address
from savable_pipeline.data.stores.file_bytes import opened
from savable_pipeline.data.stores.file_format import FileFormat
from savable_pipeline.data.stores.place_index import FileTable, PlaceIndex, ScannedFiles, write_place_index
from savable_pipeline.data.stores.remote_indexing import index_remote_files, open_remote_files
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_ALONE_S = 5.0  # that one process scans before it starts others
_Progress = Callable[[int, int], None]  # of the files done, and of all


@dataclass(frozen=True, slots=True)
class IndexedFiles:
    """Files below a folder, and their index; or behind a URL: `root` then has their metadata, and nothing else."""

    root: Path
    names: list[str]
    index: PlaceIndex | ScannedFiles
    index_path: Path
    place: RemotePlace | None = None
    downloader: Downloader | None = None  # to read them with, if not one of their own

    @property
    def address(self) -> str:
        """The folder of the files, or their URL."""
        return str(self.root) if self.place is None else self.place.url


def open_files(
    files: Shards | IndexedFiles,
    form: FileFormat,
    *,
    tolerant: bool = False,
    unlistable: Callable[[ShardError], None] = raise_it,
) -> IndexedFiles:
    """The files that a user names, indexed: those that are new or were rewritten are scanned first. What is indexed
    already is returned.

    Raises `ShardError` for a damaged file. With `tolerant` its samples before the damage are taken, and a file that was
    changed or lost since it was indexed stays in the index as it was, so that only reading its samples raises.
    """
    if isinstance(files, IndexedFiles):
        return files
    check_address(files)
    found = _behind_url(files, form, tolerant) if is_remote(files) else _below(files, form, tolerant, unlistable)
    for name in found.names:
        fault = found.index.entries[name].fault
        if fault and not tolerant:
            raise ShardError(f"{found.address}/{fault}")
        if fault:
            log.warning("%s/%s; going on with the samples before it", found.address, fault)
    return found


def _behind_url(files: Shards, form: FileFormat, tolerant: bool) -> IndexedFiles:
    place, names, index = open_remote_files(files, form, tolerant=tolerant)
    return IndexedFiles(place.metadata, names, index, place.places, place)


def _below(files: Shards, form: FileFormat, tolerant: bool, unlistable: Callable[[ShardError], None]) -> IndexedFiles:
    root, names = find_shards(files, form.kind, missing_too=tolerant, unlistable=unlistable)
    if isinstance(files, str | os.PathLike) and Path(spelled_out(files)[0]).is_dir() and not form.kind.listing:
        indexed = set(known_files(root, form))
        if not tolerant:
            check_none_gone(str(root), indexed.difference(names))
        names = sorted({*names, *indexed})
    found = _fresh(root, names, form, tolerant)
    if found is None:
        found = in_first_place(root, form.index_name, lambda path: _made(path, root, names, form, tolerant))
    return found


def index_files(
    files: Shards,
    form: FileFormat,
    *,
    processes: int | None = None,
    each: EachShard | None = None,
    progress: _Progress = lambda done, total: None,
) -> tuple[Path, list[ShardEntry]]:
    """Indexes the files that are new or were changed: by `each`, or in `processes` processes (None: one a processor).

    Returns the path of the index, and the files that could not be read to their end. Raises `ShardError`.
    """
    check_address(files)
    if is_remote(files):
        return index_remote_files(files, form, progress)
    root, names = find_shards(files, form.kind)

    def make(path: Path) -> Path:
        _write(path, root, names, form, processes=processes, each=each, progress=progress)
        return path

    path = in_first_place(root, form.index_name, make)
    entries = PlaceIndex(path, form.name).entries
    return path, [entries[name] for name in names if entries[name].fault]


def known_files(root: Path, form: FileFormat) -> dict[str, ShardEntry]:
    """The entries in the index of `root`, by name, whatever has become of the files."""
    for path in index_places(root, form.index_name):
        with contextlib.suppress(OSError, ValueError, ShardError):
            return PlaceIndex(path, form.name).entries
    return {}


def _fresh(root: Path, names: list[str], form: FileFormat, tolerant: bool) -> IndexedFiles | None:
    for path in index_places(root, form.index_name):
        index = _fresh_at(path, root, names, form, tolerant)
        if index is not None:
            return IndexedFiles(root, names, index, path)
    return None


def _fresh_at(path: Path, root: Path, names: list[str], form: FileFormat, tolerant: bool) -> PlaceIndex | None:
    """The index at `path` if it exists, is whole, and has each file as it is now; else None."""
    try:
        index, made = PlaceIndex(path, form.name), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
    except ShardError as error:
        log.warning("%s; making a new one", error)
        return None
    if any(name not in index.entries for name in names):
        return None
    if tolerant or all(_is_right(root, index, name, made, form) for name in names):
        return index
    return None


def _is_right(root: Path, index: PlaceIndex, name: str, made: int, form: FileFormat) -> bool:
    """Whether a file is as it was when it was indexed, at `made` nanoseconds or before."""
    entry = index.entries[name]
    try:
        stat = os.stat(f"{root}/{name}")  # noqa: PTH116  # a Path per name is slow for a million files
        if entry.fault or stat.st_size != entry.size:
            return False
        if stat.st_mtime_ns <= made and _is_older_beside(root, name, made, form):
            return True
        return index.is_whole(name) and with_handles(partial(_is_as_indexed, root / name, index.table(name), form))
    except OSError:
        return False


def _is_as_indexed(path: Path, table: FileTable, form: FileFormat) -> bool:
    with opened(path) as file:
        return form.is_as_indexed(file, table)


def _is_older_beside(root: Path, name: str, made: int, form: FileFormat) -> bool:
    """Whether what may lie beside a file, such as an `.idx`, was there at `made` nanoseconds as it is now."""
    suffix, other = form.beside
    if not other or not name.endswith(suffix):
        return True
    try:
        stat = ((root / name).with_suffix(other) if suffix else root / other).stat()
    except FileNotFoundError:
        return False
    # One that was moved there since is as old as before; only the time of its last change of any kind is new.
    return max(stat.st_mtime_ns, stat.st_ctime_ns) <= made


def _made(path: Path, root: Path, names: list[str], form: FileFormat, tolerant: bool) -> IndexedFiles:
    index = _fresh_at(path, root, names, form, tolerant)  # another process may have made it while we waited
    if index is None:
        _write(path, root, names, form, tolerant=tolerant)
        index = PlaceIndex(path, form.name)
    return IndexedFiles(root, names, index, path)


def _write(
    path: Path,
    root: Path,
    names: list[str],
    form: FileFormat,
    *,
    tolerant: bool = False,
    processes: int | None = None,
    each: EachShard | None = None,
    progress: _Progress = lambda done, total: None,
) -> None:
    """Writes the index at `path`; what it has already of files that are as they were is kept."""
    for name in names:
        check_utf8(str(root / name), name)
    tables = _kept(path, root, names, form, tolerant)
    missing = [name for name in names if name not in tables]
    log.info("indexing %d of %d files in %s", len(missing), len(names), root)
    progress(0, len(missing))
    for done, table in enumerate(_scanned(form.scan, root, missing, processes, each), 1):
        tables[table.entry.name] = table
        progress(done, len(missing))
    write_place_index(path, form.name, [tables[name] for name in sorted(tables)])


def _kept(path: Path, root: Path, names: list[str], form: FileFormat, tolerant: bool) -> dict[str, FileTable]:
    """The tables in the index at `path` that are still right; and with `tolerant` those of `names` as they are."""
    try:
        old = PlaceIndex(path, form.name)
    except (OSError, ValueError, ShardError):
        return {}
    anyway = set(names) if tolerant else set()
    right = [name for name in old.entries if name in anyway or _is_right(root, old, name, -1, form)]
    return {name: old.table(name) for name in right if old.is_whole(name)}


def _scanned(
    task: str, root: Path, names: list[str], processes: int | None, each: EachShard | None
) -> Iterator[FileTable]:
    """A table for each file, by `each`; without it in this process, and after some seconds in several."""
    if each is not None:
        yield from _scanned_elsewhere(root, each(task, root, names))
        return
    processes = processes or os.cpu_count() or 1
    end = time.monotonic() + _ALONE_S
    for done, name in enumerate(names):
        if processes > 1 and len(names) - done > 1 and time.monotonic() > end:
            yield from _scanned_elsewhere(root, each_shard(task, root, names[done:], processes))
            return
        table = do(task, root, name)
        assert isinstance(table, FileTable), task
        yield table


def _scanned_elsewhere(root: Path, coming: Generator[Answer, None, None]) -> Iterator[FileTable]:
    with contextlib.closing(coming) as answers:
        for name, answer in answers:
            if answer is None:
                raise ShardError(f"{root / name}: the process that indexed it died; was there too little memory?")
            yield msgspec.msgpack.decode(answer, type=FileTable)
