"""The index of shards behind a URL: the dataset's own, or one made in the cache of shards fetched whole.

What needs the network here is done by a fetcher process that ends when the index is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections import deque
from pathlib import Path

import msgspec

from savable_pipeline.cache_room import cache_bytes, cache_folder
from savable_pipeline.errors import ShardError
from savable_pipeline.fetcher import Fetcher
from savable_pipeline.indexing import Progress
from savable_pipeline.remote import RemoteShards
from savable_pipeline.remote_lookup import install_index, looked_up, pointed_version
from savable_pipeline.scan import scan
from savable_pipeline.shard_cache import CachedShards, create_flags
from savable_pipeline.shard_index import ShardEntry, ShardIndex, ShardTable, replace_file, write_index
from savable_pipeline.shard_paths import Shards

log = logging.getLogger(__name__)

_AT_ONCE = 8  # shards fetched at a time to be indexed


def open_remote(
    shards: Shards, cache: Path, limit: int, *, tolerant: bool, progress: Progress = lambda done, total: None
) -> tuple[RemoteShards, CachedShards]:
    """The shards that these URLs mean, and the cache's version of them, indexed; and what Energon says of them.

    `progress` hears of shards that are fetched to be indexed. Raises `ShardError`, for a damaged shard unless
    `tolerant`, and `RemoteError`.
    """
    with (
        contextlib.closing(Fetcher(cache, limit)) as fetcher,
        looked_up(shards, cache, fetcher) as (found, folder, version),
    ):
        if version is None or not _knows(version, found, tolerant):
            version = _made_index(found, folder, fetcher, limit, tolerant, progress)
        create_flags(version)
        return found, CachedShards(version)


def index_remote(shards: Shards, progress: Progress = lambda done, total: None) -> tuple[Path, list[ShardEntry]]:
    """Index shards behind a URL, in the cache, unless the index beside them will do.

    Gives the place of the index in the cache, and the shards that could not be read to their end.
    """
    cache = cache_folder(None)
    found, cached = open_remote(shards, cache, cache_bytes(None, cache), tolerant=True, progress=progress)
    names = set(found.names)
    return cached.folder / "index", [entry for entry in cached.index.shards if entry.fault and entry.name in names]


def _knows(version: Path, found: RemoteShards, tolerant: bool) -> bool:
    """Whether an index has all the shards, as large as they are now, and whole unless `tolerant`."""
    entries = ShardIndex(version / "index").shards
    known = {entry.name: entry.size for entry in entries if tolerant or not entry.fault}
    return all(name in known and found.sizes.get(name, known[name]) == known[name] for name in found.names)


def _made_index(
    found: RemoteShards, folder: Path, fetcher: Fetcher, limit: int, tolerant: bool, progress: Progress
) -> Path:
    """The version of an index made here, from shards fetched whole; they stay in the cache if it holds them all."""
    names = hashlib.sha256("\0".join(found.names).encode()).hexdigest()[:32]
    pointer = folder / f"made-{names}.json"
    version = pointed_version(pointer, names)
    if version is not None and _knows(version, found, tolerant):
        return version
    sizes = {name: found.sizes.get(name) or _size(found.root, name, fetcher) for name in found.names}
    keep = sum(sizes.values()) <= limit
    log.warning(
        "%s has no index: all %d shards (%.3g GB) are fetched to make one; make it where they lie to avoid that",
        found.root,
        len(sizes),
        sum(sizes.values()) / 1e9,
    )
    fresh = folder / "fetched.index"
    write_index(fresh, _tables(found.root, sizes, folder / "scan", fetcher, keep, tolerant, progress))
    version = install_index(folder, fresh, pointer, names)
    create_flags(version)
    if keep:
        _keep(CachedShards(version), folder / "scan")
    shutil.rmtree(folder / "scan", ignore_errors=True)
    return version


def _size(root: str, name: str, fetcher: Fetcher) -> int:
    stat = fetcher.ask("stat", root, name)
    if stat is None:
        raise ShardError(f"{root}/{name}: no such object on the server")
    return int(stat[0])


def _tables(
    root: str,
    sizes: dict[str, int],
    scanned: Path,
    fetcher: Fetcher,
    keep: bool,
    tolerant: bool,
    progress: Progress,
) -> list[ShardTable]:
    """Fetch and scan each shard, some fetched ahead; what an interrupted call left is not fetched again.

    Without `keep` a shard is deleted when its table has been written in its place, as `NAME.table`.
    """
    tables: list[ShardTable] = []
    coming: deque[tuple[str, int | None]] = deque()
    names = iter(sizes)
    progress(0, len(sizes))
    while True:
        while len(coming) < _AT_ONCE and (name := next(names, None)) is not None:
            here = _size_here(scanned / name) == sizes[name] or _left(scanned, name, sizes[name], keep) is not None
            whole = ("whole", root, name, sizes[name], str(scanned / name))
            coming.append((name, None if here else fetcher.begin(*whole)))
        if not coming:
            return tables
        name, ticket = coming.popleft()
        if ticket is not None:
            fetcher.wait(ticket)
        table = _left(scanned, name, sizes[name], keep) or scan(scanned, name)
        if table.entry.fault and not tolerant:
            (scanned / name).unlink()
            raise ShardError(f"{root}/{table.entry.fault}")
        if not keep:
            replace_file(scanned / f"{name}.table", [msgspec.msgpack.encode(table)])
            (scanned / name).unlink(missing_ok=True)
        tables.append(table)
        progress(len(tables), len(sizes))


def _left(scanned: Path, name: str, size: int, keep: bool) -> ShardTable | None:
    """The table of a shard that an interrupted call has left, if the shard was whole and is as large now."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        table = msgspec.msgpack.decode((scanned / f"{name}.table").read_bytes(), type=ShardTable)
        if not keep and table.entry.size == size and not table.entry.fault:
            return table
    return None


def _size_here(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _keep(cached: CachedShards, scanned: Path) -> None:
    """Take shards that were fetched whole to be indexed as what the cache holds."""
    for shard, entry in enumerate(cached.index.shards):
        (scanned / entry.name).replace(cached.path(shard))
        rows = slice(int(cached.firsts[shard]), int(cached.firsts[shard + 1]))
        cached.present[rows] |= 1
        cached.touched[shard] = time.time()
        fd = cached.open(shard)
        cached.sync_if_complete(shard, fd)
        os.close(fd)
