"""Finds the index of a folder of shards, or makes it: on first use, by one process, under a lock.

The index lies in `.nv-meta/savable.index` beside the shards, or in the user's cache if that place is read-only. A shard
is scanned again if its size has changed, or if it is younger than the index and some samples are not where they were:
moving or touching a folder does not matter. The index is written once a minute, so that an interrupted call can be
continued.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.errors import ShardError
from savable_pipeline.shards.energon_metadata import INDEX_NAME, META
from savable_pipeline.shards.index_file import ShardIndex, ShardTable, write_index
from savable_pipeline.shards.index_place import in_first_place, index_places
from savable_pipeline.shards.paths import Shards, find_shards
from savable_pipeline.shards.processes import each_shard
from savable_pipeline.shards.scan import check_utf8, scan
from savable_pipeline.shards.shard_list import ShardEntry

log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]  # of the shards done, and of all
WRITTEN = f"{META}/savable.writer"  # there `sp.ShardWriter` leaves the rows of each shard, as `X.tar.index`
_ALONE_S = 5.0  # that one process scans before it starts others
_WRITE_EVERY_S = 60.0
_LOG_EVERY_S = 10.0


def open_index(root: Path, names: list[str], *, tolerant: bool = False) -> ShardIndex:
    """The index of the shards `names` below `root`; shards that are new or were rewritten are scanned first.

    Raises `ShardError` for a damaged shard. With `tolerant` the samples before the damage are taken, and a shard that
    was changed or lost since it was indexed stays in the index as it was: a run that continues without it can then be
    resumed, and only reading its samples raises.
    """
    stats = {name: _stat(root, name) for name in names}
    for path in index_places(root, INDEX_NAME):
        index = _fresh(root, path, stats, tolerant)
        if index is not None:
            return _checked(root, index, names, tolerant)

    def make(path: Path) -> ShardIndex:
        index = _fresh(root, path, stats, tolerant)  # another process may have made it while we waited
        if index is None:
            _write(root, path, names, tolerant=tolerant)
            index = ShardIndex(path)
        return index

    return _checked(root, in_first_place(root, INDEX_NAME, make), names, tolerant)


def index_shards(
    shards: Shards, *, processes: int | None = None, progress: Progress = lambda done, total: None
) -> tuple[Path, list[ShardEntry]]:
    """Indexes the shards that are new or were changed, in `processes` processes (None: one per processor).

    Returns the path of the index, and the shards that could not be read to their end. Raises `ShardError` if there are
    no shards, or no place where an index can be written.
    """
    root, names = find_shards(shards)

    def make(path: Path) -> tuple[Path, list[ShardEntry]]:
        _write(root, path, names, processes=processes, progress=progress)
        return path, [entry for entry in ShardIndex(path).shards if entry.fault and entry.name in set(names)]

    return in_first_place(root, INDEX_NAME, make)


def find_index(root: Path) -> dict[str, ShardEntry]:
    """The entries of the index of `root`, by name, whatever has become of the shards."""
    for path in index_places(root, INDEX_NAME):
        with contextlib.suppress(OSError, ValueError, ShardError):
            return {entry.name: entry for entry in ShardIndex(path).shards}
    return {}


def check_none_gone(address: str, gone: Collection[str]) -> None:
    """Raises `ShardError` if shards that were indexed are gone from the folder or prefix `address`."""
    if gone:
        raise ShardError(
            f"{address}: {len(gone)} shards that were indexed are gone, such as {min(gone)}; put them back, or run "
            f"`savable index {address}` to go on without them",
            reason="missing shard",
        )


def _checked(root: Path, index: ShardIndex, names: list[str], tolerant: bool) -> ShardIndex:
    tables = index.tables()
    faults = [tables[name][0].fault for name in names if tables[name][0].fault]
    for fault in faults:
        if not tolerant:
            raise ShardError(f"{root}/{fault}")
        log.warning("%s/%s; going on with the samples before it", root, fault)
    return index


def _fresh(root: Path, path: Path, stats: dict[str, os.stat_result | None], tolerant: bool) -> ShardIndex | None:
    """The index at `path` if it exists, is whole, and has each shard as it is now; else None."""
    try:
        index, made = ShardIndex(path), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
    except ShardError as error:
        log.warning("%s; making a new one", error)
        return None
    known = index.tables()
    if any(name not in known for name in stats):
        return None
    if tolerant:
        return index
    if any(stat is None or known[name][0].fault or known[name][0].size != stat.st_size for name, stat in stats.items()):
        return None
    touched = [name for name, stat in stats.items() if stat is not None and stat.st_mtime_ns > made]
    return index if all(_as_indexed(root, index, index.tables()[name][0]) for name in touched) else None


def _as_indexed(root: Path, index: ShardIndex, entry: ShardEntry) -> bool:
    """Whether a shard's size and the places of some samples are those in the index."""
    try:
        with (root / entry.name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if entry.size != size or not index.is_whole(entry.name):
                return False
            return index.is_as_written(entry.name, file.fileno())
    except OSError:
        return False


def _write(
    root: Path,
    path: Path,
    names: list[str],
    *,
    tolerant: bool = False,
    processes: int | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Writes the index at `path`; tables that it has already, and that are still right, are kept."""
    for name in names:
        check_utf8(str(root / name), name)
    for stale in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed; the lock is ours
        stale.unlink(missing_ok=True)
    kept = _kept(root, path, set(names) if tolerant else set())
    kept |= _of_writers(root, [name for name in names if name not in kept])
    missing = [name for name in names if name not in kept]
    log.info("indexing %d of %d shards in %s", len(missing), len(names), root)
    began = logged = written = time.monotonic()
    progress(0, len(missing))
    for done, table in enumerate(_scanned(root, missing, processes), 1):
        kept[table.entry.name] = table
        if not table.entry.fault:
            write_tar_idx(root / table.entry.name, table)
        progress(done, len(missing))
        now = time.monotonic()
        if now - logged > _LOG_EVERY_S:
            logged = now
            log.warning("indexing %s: %d of %d shards after %.0f s", root, done, len(missing), now - began)
        if now - written > _WRITE_EVERY_S:
            _write_sorted(path, kept)
            written = time.monotonic()
    _write_sorted(path, kept)
    for joined in (root / WRITTEN).glob("*.tar.index") if path == root / INDEX_NAME else ():
        if joined.name.removesuffix(".index") in kept:
            joined.unlink(missing_ok=True)


def _kept(root: Path, path: Path, anyway: set[str]) -> dict[str, ShardTable]:
    """The tables in the index at `path` that are still right, and those of `anyway` even if they are not."""
    try:
        old = ShardIndex(path)
    except (OSError, ValueError, ShardError):
        return {}
    right = [
        entry.name
        for entry in old.shards
        if (entry.name in anyway or (not entry.fault and _as_indexed(root, old, entry))) and old.is_whole(entry.name)
    ]
    return {name: old.table(name) for name in right}


def _of_writers(root: Path, names: list[str]) -> dict[str, ShardTable]:
    """The tables of shards that `sp.ShardWriter` finished, if they are still right: these need not be scanned."""
    found = {}
    for name in names if (root / WRITTEN).is_dir() else ():
        with contextlib.suppress(OSError, ValueError, ShardError, KeyError):
            index = ShardIndex(root / WRITTEN / f"{name}.index")
            if _as_indexed(root, index, index.tables()[name][0]):
                found[name] = index.table(name)
    return found


def _write_sorted(path: Path, tables: dict[str, ShardTable]) -> None:
    write_index(path, [tables[name] for name in sorted(tables)])


def _scanned(root: Path, names: list[str], processes: int | None) -> Iterator[ShardTable]:
    """A table for each shard; after some seconds in several processes."""
    processes = processes or os.cpu_count() or 1
    end = time.monotonic() + _ALONE_S
    for done, name in enumerate(names):
        if processes > 1 and len(names) - done > 1 and time.monotonic() > end:
            yield from _scanned_elsewhere(root, names[done:], processes)
            return
        yield scan(root, name)


def _scanned_elsewhere(root: Path, names: list[str], processes: int) -> Iterator[ShardTable]:
    with contextlib.closing(each_shard("savable_pipeline.shards.scan:scan", root, names, processes)) as answers:
        for name, answer in answers:
            if answer is None:
                raise ShardError(f"{root / name}: the process that indexed it died; was there too little memory?")
            yield msgspec.msgpack.decode(answer, type=ShardTable)


def write_tar_idx(shard: Path, table: ShardTable) -> None:
    """Writes `X.tar.idx`, unless the place is read-only: little-endian uint64 offsets of the samples, then of the end.

    A file with other offsets is replaced only if it is older than its shard.
    """
    offsets = tar_idx(table)
    path = shard.with_suffix(".tar.idx")
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_mtime_ns >= shard.stat().st_mtime_ns:
            if path.read_bytes() != offsets:
                log.warning("%s: other offsets than the shard's samples have; left as it is", path)
            return
        replace_file(path, [offsets])


def tar_idx(table: ShardTable) -> bytes:
    """The right content of `X.tar.idx`."""
    return table.starts + np.array([table.end], dtype="<u8").tobytes()


def _stat(root: Path, name: str) -> os.stat_result | None:
    try:
        return os.stat(f"{root}/{name}")  # noqa: PTH116  # a Path per name is slow for a million shards
    except OSError:
        return None
