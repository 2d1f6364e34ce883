"""The index of shards behind a URL: the dataset's own, or one made in the cache from shards downloaded whole."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.remote.cache_layout import TarLayout
from savable_pipeline.data.remote.cache_space import cache_bytes, cache_folder
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.data.remote.lookup import (
    changed_shards,
    install_index,
    looked_up,
    newest_version,
    note_reindexed,
    pointed_version,
)
from savable_pipeline.data.remote.scratch import RemoteObject, scan_object
from savable_pipeline.data.remote.shard_cache import ShardCache, create_flags
from savable_pipeline.data.remote.urls import RemoteShards
from savable_pipeline.data.shards.index_file import ShardTable
from savable_pipeline.data.shards.index_making import Progress
from savable_pipeline.data.shards.index_writer import write_index
from savable_pipeline.data.shards.indexing import check_none_gone
from savable_pipeline.data.shards.paths import NOT_THERE, Shards
from savable_pipeline.data.shards.scan import TARS
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardNames
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_AT_ONCE = 8  # shards downloaded at a time to be indexed


def open_remote(
    shards: Shards,
    cache: Path,
    limit: int,
    *,
    tolerant: bool,
    anew: bool = False,
    engine: Engine | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[RemoteShards, ShardCache]:
    """The shards of these URLs, and the cache's version of them with its index; their metadata is downloaded too.

    Shards that were found to be other than indexed are indexed again, unless `tolerant`; with `anew` in any case, and
    the server is asked for the size of each. `progress` is told of shards that are downloaded to be indexed: here, or
    by the machines of an `engine`. Raises `RemoteError`, and `ShardError`, also for a damaged shard, or one gone from
    an indexed prefix, unless `tolerant`.
    """
    with (
        contextlib.closing(Downloader(cache, limit)) as downloader,
        looked_up(shards, cache, downloader) as (found, folder, version),
    ):
        if anew:
            found = _sized(found, downloader)
        elif version is not None and isinstance(shards, str) and shards.rstrip("/") == found.root:
            found = _with_missing(found, version, tolerant)
        changed, ever = changed_shards(folder) if anew or not tolerant else (set[str](), set[str]())
        if version is None or not _knows(version, found, tolerant, ever):
            version = _made_index(found, folder, version, downloader, limit, tolerant, changed, progress, engine)
        create_flags(version)
        return found, ShardCache(version)


def index_remote(
    shards: Shards, progress: Progress = lambda done, total: None, engine: Engine | None = None
) -> tuple[Path, list[ShardEntry]]:
    """Indexes shards behind a URL, in the cache, unless the index beside them fits; with an `engine` its machines read.

    Returns the path of the index in the cache, and the shards that could not be read to their end.
    """
    cache = cache_folder(None)
    limit = cache_bytes(None, cache)
    found, cached = open_remote(shards, cache, limit, tolerant=True, anew=True, engine=engine, progress=progress)
    names = set(found.names)
    return cached.folder / "index", [entry for entry in cached.index.shards if entry.fault and entry.name in names]


def _with_missing(found: RemoteShards, version: Path, tolerant: bool) -> RemoteShards:
    """The shards of a prefix, with those of its index that are gone. Raises `ShardError` for them unless `tolerant`."""
    indexed = TarIndex(version / "index").shards.names
    if ShardNames.of(found.names).text == indexed.text:
        return found
    gone = set(indexed).difference(found.names)
    if not tolerant:
        check_none_gone(found.root, gone)
    sizes = {**dict.fromkeys(gone, -1), **dict(zip(found.names, found.sizes.tolist(), strict=True))}
    return RemoteShards(found.root, sorted(sizes), np.array([sizes[name] for name in sorted(sizes)], np.int64))


def _sized(found: RemoteShards, downloader: Downloader) -> RemoteShards:
    """The same shards with the size of each, as the server lists it, or says when it is asked."""
    unknown: list[int] = np.flatnonzero(found.sizes < 0).tolist()
    tickets = {n: downloader.submit("stat", found.root, found.names[n], True) for n in unknown}
    sizes = found.sizes.copy()
    for n, ticket in tickets.items():
        sizes[n] = _size_of(found.root, found.names[n], downloader.result(ticket))
    return RemoteShards(found.root, found.names, sizes)


def _knows(version: Path, found: RemoteShards, tolerant: bool, changed: set[str]) -> bool:
    """Whether an index has all the shards, at their present sizes, and unless `tolerant` without a fault."""
    index = TarIndex(version / "index")
    if changed and not changed.isdisjoint(found.names):
        return False
    try:
        numbers = index.numbers(found.names)
    except KeyError:
        return False
    if not tolerant and index.shards.faults and not index.shards.faults.keys().isdisjoint(numbers.tolist()):
        return False
    known = index.shards.sizes[numbers]
    return bool(((found.sizes == known) | (found.sizes == -1)).all())


def _made_index(
    found: RemoteShards,
    folder: Path,
    own: Path | None,
    downloader: Downloader,
    limit: int,
    tolerant: bool,
    changed: set[str],
    progress: Progress,
    engine: Engine | None,
) -> Path:
    """The version of an index made from shards downloaded whole; they stay in the cache if all of them fit.

    (Those that the machines of an `engine` downloaded do not.)

    Of those that an index in the cache has as they are, its tables are taken.
    """
    names = hashlib.sha256("\0".join(found.names).encode()).hexdigest()[:32]
    pointer = folder / f"made-{names}.json"
    version = pointed_version(pointer, names)
    if version is not None and _knows(version, found, tolerant, changed):
        return version
    before = own or version
    known = _known(before, found, changed, downloader)
    if not known:  # an index made of fewer shards, to which others were added since
        found = _sized(found, downloader)
        before = newest_version(folder, "made-*.json")
        known = _known(before, found, changed, downloader)
    left = [number for number, name in enumerate(found.names) if name not in known]
    to_scan = RemoteShards(found.root, [found.names[number] for number in left], found.sizes[left])
    sizes = dict(zip(to_scan.names, _sized(to_scan, downloader).sizes.tolist(), strict=True))
    keep = engine is None and sum(sizes.values()) <= limit
    log.warning(
        "%s has no index of %d shards (%.3g GB): they are downloaded to make one; make it where they lie to avoid that",
        found.root,
        len(sizes),
        sum(sizes.values()) / 1e9,
    )
    fresh = folder / "downloaded.index"
    versions: dict[str, str] = {}
    scanned = folder / "scan"
    if engine is None:
        tables = _tables(found.root, sizes, scanned, downloader, keep, tolerant, progress, versions)
    else:
        tables = _tables_elsewhere(engine, found.root, sizes, scanned, tolerant, progress, versions)
    write_index(fresh, _in_order(before, known, tables))
    version = install_index(folder, fresh, pointer, names)
    create_flags(version)
    _pin(ShardCache(version), changed, versions, scanned, keep)
    note_reindexed(folder)
    shutil.rmtree(scanned, ignore_errors=True)
    return version


def _known(version: Path | None, found: RemoteShards, changed: set[str], downloader: Downloader) -> dict[str, int]:
    """The numbers in an index of shards that have not changed, by name; their rows are here."""
    if version is None:
        return {}
    layout, sizes = TarLayout(version), dict(zip(found.names, found.sizes.tolist(), strict=True))
    index = layout.index
    entries = [(n, e) for n, e in enumerate(index.shards) if e.name in sizes and e.name not in changed and not e.fault]
    same = [(number, e.name) for number, e in entries if sizes[e.name] in (-1, e.size)]
    if layout.parts is not None and same:
        create_flags(version)
        absent = layout.parts.absent(np.array([number for number, _ in same], dtype=np.int64))
        downloader.call("index_rows", found.root, str(version), absent.tolist())
    return {name: number for number, name in same if index.is_whole(number)}


def _in_order(before: Path | None, known: dict[str, int], tables: list[ShardTable]) -> Iterator[ShardTable]:
    """These tables and those of the `known` shards of an index, in the order of their names."""
    scanned = {table.entry.name: table for table in tables}
    index = TarIndex(before / "index") if before is not None and known else None
    for name in sorted({*scanned, *known}):
        if index is not None and name in known:
            yield index.table(known[name])
        else:
            yield scanned[name]


def _size_of(root: str, name: str, stat: tuple[int, str] | None) -> int:
    if stat is None:
        raise ShardError(f"{root}/{name}: no such object on the server", reason=NOT_THERE)
    return int(stat[0])


def _tables(
    root: str,
    sizes: dict[str, int],
    scanned: Path,
    downloader: Downloader,
    keep: bool,
    tolerant: bool,
    progress: Progress,
    versions: dict[str, str],
) -> list[ShardTable]:
    """Downloads and scans each shard, with some downloads ahead; what an interrupted call left is not repeated.

    Without `keep` a shard is deleted once its table is written, as `NAME.table`. The server's versions of those that
    were downloaded are put into `versions`.
    """
    tables: list[ShardTable] = []
    coming: deque[tuple[str, int | None]] = deque()
    names = iter(sizes)
    progress(0, len(sizes))
    while True:
        while len(coming) < _AT_ONCE and (name := next(names, None)) is not None:
            here = _size_here(scanned / name) == sizes[name] or _left(scanned, name, sizes[name], keep) is not None
            whole = ("whole", root, name, sizes[name], str(scanned / name))
            coming.append((name, None if here else downloader.submit(*whole)))
        if not coming:
            return tables
        name, ticket = coming.popleft()
        if ticket is not None:
            versions[name] = downloader.result(ticket)
        table = _left(scanned, name, sizes[name], keep) or TARS.scan(scanned, name)
        if table.entry.fault and not tolerant:
            (scanned / name).unlink()
            raise ShardError(f"{root}/{table.entry.fault}")
        if not keep:
            _leave(scanned, name, table)
            (scanned / name).unlink(missing_ok=True)
        tables.append(table)
        progress(len(tables), len(sizes))


def _tables_elsewhere(
    engine: Engine,
    root: str,
    sizes: dict[str, int],
    scanned: Path,
    tolerant: bool,
    progress: Progress,
    versions: dict[str, str],
) -> list[ShardTable]:
    """`_tables`, by the machines of an engine, each of which downloads what it scans."""
    left = {name: _left(scanned, name, size, keep=False) for name, size in sizes.items()}
    tables = [table for table in left.values() if table is not None]
    jobs = [RemoteObject(root, name, size) for name, size in sizes.items() if left[name] is None]
    progress(len(tables), len(sizes))
    with contextlib.closing(engine.each(scan_object, jobs)) as finished:
        for job, (table, version) in finished:
            if table.entry.fault and not tolerant:
                raise ShardError(f"{root}/{table.entry.fault}")
            versions[job.name] = version
            _leave(scanned, job.name, table)
            tables.append(table)
            progress(len(tables), len(sizes))
    return tables


def _leave(scanned: Path, name: str, table: ShardTable) -> None:
    """Write the table of a shard aside, for `_left`."""
    path = scanned / f"{name}.table"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [msgspec.msgpack.encode(table)])


def _left(scanned: Path, name: str, size: int, keep: bool) -> ShardTable | None:
    """The table of a shard that an interrupted call has left, if the shard was whole and has the same size now."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        table = msgspec.msgpack.decode((scanned / f"{name}.table").read_bytes(), type=ShardTable)
        if not keep and table.entry.size == size and not table.entry.fault:
            return table
    return None


def _size_here(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _pin(cached: ShardCache, changed: set[str], versions: dict[str, str], scanned: Path, keep: bool) -> None:
    """Drops what is in the cache of shards that have changed, and pins those that were downloaded to their versions.

    With `keep` these are moved into the cache, all their samples marked as present.
    """
    for shard, entry in enumerate(cached.index.shards):
        if entry.name in changed:
            cached.forget(shard)
        cached.pin(shard, versions.get(entry.name, ""))
    if keep:
        _keep(cached, scanned)


def _keep(cached: ShardCache, scanned: Path) -> None:
    """Moves shards that were downloaded whole into the cache, and marks all their samples as present."""
    for shard, entry in enumerate(cached.index.shards):
        if not (scanned / entry.name).exists():
            continue
        (scanned / entry.name).replace(cached.path(shard))
        rows = slice(int(cached.firsts[shard]), int(cached.firsts[shard + 1]))
        cached.present[rows] |= 1
        cached.touched[shard] = time.time()
        fd = cached.open(shard)
        cached.sync_if_complete(shard, fd)
        os.close(fd)
