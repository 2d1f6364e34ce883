"""Makes and finds the index of a folder of shards: on first use, by one process, under a lock.

The index lies in `.nv-meta/savable.index` beside the shards, or in a cache where the place is read-only. A shard is
scanned again when its size is another, or when it is younger than the index and its last sample is not where it was:
where a folder lies and when it was touched do not matter. What was scanned is written now and then, so that who is
stopped goes on from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from savable_pipeline.errors import ShardError
from savable_pipeline.scan import check_utf8, scan
from savable_pipeline.shard_index import ShardEntry, ShardIndex, ShardTable, replace_file, write_index
from savable_pipeline.shard_jobs import each_shard
from savable_pipeline.shard_paths import Shards, find_shards

log = logging.getLogger(__name__)

INDEX_NAME = ".nv-meta/savable.index"
Progress: TypeAlias = Callable[[int, int], None]  # shards done, and in all
_ALONE_S = 5.0  # so long one process scans, before it begins others
_WRITE_EVERY_S = 60.0
_TELL_EVERY_S = 10.0


def open_index(root: Path, names: list[str], *, tolerant: bool = False) -> ShardIndex:
    """The index of the shards `names` below `root`; what is missing in it or was rewritten is scanned first.

    Raises `ShardError` for a shard that is damaged. `tolerant`: its samples before the damage are taken, and a shard
    that has changed or gone since it was indexed stays in the index as it was, so that a run that goes on without it
    can be resumed; reading its samples is then the error.
    """
    stats = {name: _stat(root, name) for name in names}
    for path in _places(root):
        index = _fresh(root, path, stats, tolerant)
        if index is not None:
            return _checked(root, index, names, tolerant)
    with _locked(root) as path:
        index = _fresh(root, path, stats, tolerant)  # another process may have made it while we waited
        if index is None:
            _write(root, path, names, tolerant=tolerant)
            index = ShardIndex(path)
    return _checked(root, index, names, tolerant)


def index_shards(
    shards: Shards, *, processes: int | None = None, progress: Progress = lambda done, total: None
) -> tuple[Path, list[ShardEntry]]:
    """Index what is not indexed as it is now, in `processes` processes (None: one a processor).

    Gives the place of the index, and the shards that could not be read to their end. Raises `ShardError` if there are
    no shards, or there is no place for an index.
    """
    root, names = find_shards(shards)
    with _locked(root) as path:
        _write(root, path, names, processes=processes, progress=progress)
        return path, [entry for entry in ShardIndex(path).shards if entry.fault and entry.name in set(names)]


def find_index(root: Path) -> dict[str, ShardEntry]:
    """What is indexed of the shards below `root`, by name, however they are now."""
    for path in _places(root):
        with contextlib.suppress(OSError, ValueError, ShardError):
            return {entry.name: entry for entry in ShardIndex(path).shards}
    return {}


def _checked(root: Path, index: ShardIndex, names: list[str], tolerant: bool) -> ShardIndex:
    tables = index.tables()
    faults = [tables[name][0].fault for name in names if tables[name][0].fault]
    for fault in faults:
        if not tolerant:
            raise ShardError(f"{root}/{fault}")
        log.warning("%s/%s; going on with the samples before it", root, fault)
    return index


def _fresh(root: Path, path: Path, stats: dict[str, os.stat_result | None], tolerant: bool) -> ShardIndex | None:
    """The index at `path` if it is there, whole, and knows each shard as it is."""
    try:
        index, made = ShardIndex(path), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
    except ShardError as error:
        log.warning("%s; making it again", error)
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
    """Whether a shard is as large as the index says, and its last sample where the index says."""
    try:
        with (root / entry.name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if entry.size != size or not index.is_whole(entry.name):
                return False
            return index.ends_as_written(entry.name, file.fileno())
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
    """Write the index at `path`: of each shard the table that is there if it is still right, or a new one."""
    for name in names:
        check_utf8(str(root / name), name)
    kept = _kept(root, path, set(names) if tolerant else set())
    missing = [name for name in names if name not in kept]
    log.info("indexing %d of %d shards in %s", len(missing), len(names), root)
    began = told = written = time.monotonic()
    progress(0, len(missing))
    for done, table in enumerate(_scanned(root, missing, processes), 1):
        kept[table.entry.name] = table
        if not table.entry.fault:
            write_tar_idx(root / table.entry.name, table)
        progress(done, len(missing))
        now = time.monotonic()
        if now - told > _TELL_EVERY_S:
            told = now
            log.warning("indexing %s: %d of %d shards after %.0f s", root, done, len(missing), now - began)
        if now - written > _WRITE_EVERY_S:
            _write_sorted(path, kept)
            written = time.monotonic()
    _write_sorted(path, kept)


def _kept(root: Path, path: Path, anyway: set[str]) -> dict[str, ShardTable]:
    """The tables in the index at `path` that are right, and those of `anyway` however their shards are now."""
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


def _write_sorted(path: Path, tables: dict[str, ShardTable]) -> None:
    write_index(path, [tables[name] for name in sorted(tables)])


def _scanned(root: Path, names: list[str], processes: int | None) -> Iterator[ShardTable]:
    """A table a shard; in other processes too where there is much to do."""
    processes = processes or os.cpu_count() or 1
    end = time.monotonic() + _ALONE_S
    for done, name in enumerate(names):
        if processes > 1 and len(names) - done > 1 and time.monotonic() > end:
            yield from _scanned_elsewhere(root, names[done:], processes)
            return
        yield scan(root, name)


def _scanned_elsewhere(root: Path, names: list[str], processes: int) -> Iterator[ShardTable]:
    with contextlib.closing(each_shard("scan", root, names, processes)) as answers:
        for name, answer in answers:
            if answer is None:
                raise ShardError(f"{root / name}: the process that indexed it ended; is there too little memory?")
            yield msgspec.msgpack.decode(answer, type=ShardTable)


def write_tar_idx(shard: Path, table: ShardTable) -> None:
    """Write `X.tar.idx`: little-endian uint64 offsets of the samples, then the end. Left out in a read-only place.

    One that is there and says something else is written anew only if it is older than its shard.
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
    """What `X.tar.idx` should be."""
    return table.starts + np.array([table.end], dtype="<u8").tobytes()


def _stat(root: Path, name: str) -> os.stat_result | None:
    try:
        return os.stat(f"{root}/{name}")  # noqa: PTH116  # a path an object is slow for a million shards
    except OSError:
        return None


def _places(root: Path) -> list[Path]:
    """Where the index may lie: beside the shards, or in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "savable_pipeline"
    return [
        root / INDEX_NAME,
        cache / f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]}.index",
    ]


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """Hold the lock of the first place that can be written; gives the index's path there."""
    for path in _places(root):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(path.name + ".lock").open("ab")
        except OSError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
        return
    raise ShardError(f"{root}: no place to write an index: neither {INDEX_NAME} there nor a cache can be written")
