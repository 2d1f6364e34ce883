"""Makes and finds the index of a folder of shards: on first use, by one process, under a lock.

The index lies in `.nv-meta/savable.index` beside the shards, or in a cache where the place is read-only. A shard is
scanned again when its size is another, or when it is younger than the index and its last sample is not where it was:
where a folder lies and when it was touched do not matter.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from savable_pipeline.errors import ShardError
from savable_pipeline.shard_index import ShardEntry, ShardIndex, ShardTable, replace_file, write_index
from savable_pipeline.tar import BLOCK, Extent, members, samples

log = logging.getLogger(__name__)

INDEX_NAME = ".nv-meta/savable.index"


def scan(root: Path, name: str) -> ShardTable:
    """Read every header of one shard. Raises `ShardError`."""
    path = root / name
    starts: list[int] = []
    layouts: list[tuple[tuple[str, int], ...]] = []
    sizes: list[int] = []
    digest = xxh3_64()
    end = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        for extent in samples(str(path), fd):
            starts.append(extent.members[0].header)
            layouts.append(_layout(extent))
            sizes.extend(member.size for member in extent.members)
            end = extent.members[-1].end
            for member in extent.members:
                digest.update(f"{member.name}\0{member.payload}\0{member.size}\0".encode("utf-8", "surrogateescape"))
        for member in members(str(path), fd, end):
            end = member.end
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    _check_utf8(path, [name, *(extension for layout in set(layouts) for extension, _ in layout)])
    return ShardTable(ShardEntry(name, size, len(starts), digest.intdigest()), starts, end, layouts, sizes)


def _check_utf8(path: Path, names: list[str]) -> None:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ShardError(f"{path!s}: the name {name!r} is no UTF-8; rename it and write the shard again") from None


def _layout(extent: Extent) -> tuple[tuple[str, int], ...]:
    ends = [extent.members[0].header, *(member.end for member in extent.members)]
    gaps = [(member.payload - end) // BLOCK for member, end in zip(extent.members, ends, strict=False)]
    return tuple(zip(extent.extensions, gaps, strict=True))


def open_index(root: Path, names: list[str]) -> ShardIndex:
    """The index of the shards `names` below `root`; what is missing or was rewritten is scanned first.

    Raises `ShardError` for a shard that cannot be read, and for a set of shards without a single sample.
    """
    stats = {name: _stat(root / name) for name in names}
    for path in _places(root):
        index = _fresh(root, path, stats)
        if index is not None:
            return index
    with _locked(root) as path:
        index = _fresh(root, path, stats)  # another process may have made it while we waited
        if index is not None:
            return index
        write_index(path, _tables(root, path, names))
        return ShardIndex(path)


def _fresh(root: Path, path: Path, stats: dict[str, os.stat_result]) -> ShardIndex | None:
    """The index at `path` if it is there, whole, and knows each shard as it is."""
    try:
        index, made = ShardIndex(path), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
    except ShardError as error:
        log.warning("%s; making it again", error)
        return None
    known = {entry.name: entry.size for entry in index.shards}
    if any(known.get(name) != stat.st_size for name, stat in stats.items()):
        return None
    touched = [name for name, stat in stats.items() if stat.st_mtime_ns > made]
    return index if all(_as_indexed(root, index, name) for name in touched) else None


def _as_indexed(root: Path, index: ShardIndex, name: str) -> bool:
    """Whether a shard is as large as the index says, and its last sample where the index says."""
    try:
        with (root / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return index.tables()[name][0].size == size and index.ends_as_written(name, file.fileno())
    except OSError:
        return False


def _tables(root: Path, path: Path, names: list[str]) -> list[ShardTable]:
    """One table a shard: kept from the index at `path` where still right, scanned where not."""
    kept: dict[str, ShardTable] = {}
    with contextlib.suppress(OSError, ValueError, ShardError):
        old = ShardIndex(path)
        kept = {entry.name: old.table(entry.name) for entry in old.shards if _as_indexed(root, old, entry.name)}
    missing = [name for name in names if name not in kept]
    log.info("indexing %d of %d shards in %s", len(missing), len(names), root)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for table in pool.map(lambda name: scan(root, name), missing):
            kept[table.entry.name] = table
            write_tar_idx(root / table.entry.name, table)
    return [kept[name] for name in sorted(kept)]


def write_tar_idx(shard: Path, table: ShardTable) -> None:
    """Write `X.tar.idx`: little-endian uint64 offsets of the samples, then the end. Left out in a read-only place."""
    offsets = np.array([*table.starts, table.end], dtype="<u8").tobytes()
    path = shard.with_suffix(".tar.idx")
    with contextlib.suppress(OSError):
        if not path.exists() or path.read_bytes() != offsets:
            replace_file(path, [offsets])


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from error


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
