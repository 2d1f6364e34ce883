"""Finds the index of a folder of shards, or makes it: on first use, by one process, under a lock.

The index lies in `.nv-meta/savable.index` beside the shards, or in the user's cache if that place is read-only. A shard
is scanned again if its size has changed, or if it is younger than the index and some samples are not where they were:
moving or touching a folder does not matter. The rows of scanned shards are in a file until all are there, so that
memory does not grow with them, and an interrupted call can be continued. Of many shards a mark says whether anything
was added, removed or replaced since all were looked at (see fresh_mark.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.shards import fresh_mark
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME, META, read_counts
from savable_pipeline.data.shards.index_file import ShardIndex, ShardTable
from savable_pipeline.data.shards.index_place import in_first_place, index_places
from savable_pipeline.data.shards.index_writer import write_index
from savable_pipeline.data.shards.paths import Shards, Unlistable, find_shards
from savable_pipeline.data.shards.processes import Answer, EachShard, each_shard
from savable_pipeline.data.shards.scan import check_utf8, scan
from savable_pipeline.data.shards.scanned_tables import ScannedTables
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]  # of the shards done, and of all
WRITTEN = f"{META}/savable.writer"  # there `sp.ShardWriter` leaves the rows of each shard, as `X.tar.index`
_SCAN = "savable_pipeline.data.shards.scan:scan"
_ALONE_S = 5.0  # that one process scans before it starts others
_LOG_EVERY_S = 10.0


def open_index(
    root: Path,
    names: list[str],
    *,
    tolerant: bool = False,
    looked_at: Callable[[ShardIndex], None] = lambda index: None,
) -> ShardIndex:
    """The index of the shards `names` below `root`; shards that are new or were rewritten are scanned first.

    `looked_at` is called with an index that has these shards and no others, each as it was found.

    Raises `ShardError` for a damaged shard. With `tolerant` the samples before the damage are taken, and a shard that
    was changed or lost since it was indexed stays in the index as it was: a run that continues without it can then be
    resumed, and only reading its samples raises.
    """
    found = _Found(root, names)
    for path in index_places(root, INDEX_NAME):
        index = _fresh(path, found, tolerant)
        if index is not None:
            if path == root / INDEX_NAME and len(index.shards) == len(names) and found.are_as_in(index, path):
                looked_at(index)
            return _checked(root, index, names, tolerant)

    def make(path: Path) -> ShardIndex:
        index = _fresh(path, found, tolerant)  # another process may have made it while we waited
        if index is None:
            _write(root, path, names, tolerant=tolerant)
            index = ShardIndex(path)
        return index

    return _checked(root, in_first_place(root, INDEX_NAME, make), names, tolerant)


def index_shards(
    shards: Shards,
    *,
    processes: int | None = None,
    each: EachShard | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Path, list[ShardEntry]]:
    """Indexes the shards that are new or were changed: by `each`, or in `processes` processes (None: one a processor).

    Returns the path of the index, and the shards that could not be read to their end. Raises `ShardError` if there are
    no shards, or no place where an index can be written.
    """
    root, names = find_shards(shards)

    def make(path: Path) -> tuple[Path, list[ShardEntry]]:
        _write(root, path, names, processes=processes, each=each, progress=progress)
        shards, wanted = ShardIndex(path).shards, set(names)
        return path, [shards[number] for number in sorted(shards.faults) if shards.names[number] in wanted]

    path, faults = in_first_place(root, INDEX_NAME, make)
    if path == root / INDEX_NAME and len(names) >= fresh_mark.MARKED_SHARDS:
        _mark(root)
    return path, faults


def _mark(root: Path) -> None:
    """Marks the index that was just written as fresh, so that no start needs to look at all shards again."""
    if fresh_mark.known_index(root, tolerant=True) is None:
        fresh_mark.let_rest()
        open_folder(root, tolerant=True, unlistable=lambda error: None)


def open_folder(root: Path, *, tolerant: bool, unlistable: Unlistable) -> tuple[ShardIndex, list[str] | None]:
    """The index of all shards below a folder, and their names; None if it has all of these and no others.

    Also of those that should be there: Energon's list names them, and with `tolerant` the index. (A run that goes on
    without shards that were lost since it was indexed must still count them.) Raises `ShardError` as `open_index` does,
    and unless `tolerant` if the index names shards that are gone.
    """
    known = fresh_mark.known_index(root, tolerant=tolerant)
    if known is not None:
        return _checked(root, known, None, tolerant), None
    began = fresh_mark.begin_look(root)
    folders: list[str] = []
    unlisted: list[ShardError] = []

    def left_out(error: ShardError) -> None:
        unlisted.append(error)
        unlistable(error)

    _, names = find_shards(root, missing_too=tolerant, unlistable=left_out, visited=folders.append)

    def looked_at(index: ShardIndex) -> None:
        if began is not None and not unlisted and len(index.shards) >= fresh_mark.MARKED_SHARDS:
            fresh_mark.mark_fresh(root, index, folders, began)

    names = _with_missing(root, names, tolerant)
    return open_index(root, names, tolerant=tolerant, looked_at=looked_at), names


def _with_missing(root: Path, found: list[str], tolerant: bool) -> list[str]:
    indexed = _indexed_names(root)
    if not tolerant:
        check_none_gone(str(root), indexed.difference(found))
    return sorted({*found, *indexed, *(read_counts(root) or ())})


def _indexed_names(root: Path) -> set[str]:
    for path in index_places(root, INDEX_NAME):
        with contextlib.suppress(OSError, ValueError, ShardError):
            return set(ShardIndex(path).shards.names)
    return set()


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


def _checked(root: Path, index: ShardIndex, names: list[str] | None, tolerant: bool) -> ShardIndex:
    faults = index.shards.faults
    wanted = None if names is None or not faults else set(names)
    for number in sorted(faults):
        if wanted is not None and index.shards.names[number] not in wanted:
            continue
        if not tolerant:
            raise ShardError(f"{root}/{faults[number]}")
        log.warning("%s/%s; going on with the samples before it", root, faults[number])
    return index


class _Found:
    """Shards as they are now: `sizes`, -1 for one that is not there, and when they were last written, in ns."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root, self.names = root, names
        self.sizes = np.empty(len(names), dtype=np.int64)
        self.written = np.empty(len(names), dtype=np.int64)
        for number, name in enumerate(names):
            try:
                found = os.stat(f"{root}/{name}")  # noqa: PTH116  # a Path per name is slow for a million shards
                self.sizes[number], self.written[number] = found.st_size, found.st_mtime_ns
            except OSError:
                self.sizes[number] = self.written[number] = -1

    def are_as_in(self, index: ShardIndex, path: Path) -> bool:
        """Whether the index at `path` has all of them as they are. Raises KeyError without one of them, OSError."""
        numbers = index.numbers(self.names)
        if not np.array_equal(index.shards.sizes[numbers], self.sizes):
            return False
        touched = numbers[self.written > path.stat().st_mtime_ns].tolist()
        return all(_as_indexed(self.root, index, number) for number in touched)


def _fresh(path: Path, found: _Found, tolerant: bool) -> ShardIndex | None:
    """The index at `path` if it exists, is whole, and has each shard as it is now; else None."""
    try:
        index = ShardIndex(path)
        numbers = index.numbers(found.names)
        if tolerant:
            return index
        faulty = bool(index.shards.faults) and not index.shards.faults.keys().isdisjoint(numbers.tolist())
        return index if not faulty and found.are_as_in(index, path) else None
    except (OSError, ValueError, KeyError):
        return None
    except ShardError as error:
        log.warning("%s; making a new one", error)
        return None


def _as_indexed(root: Path, index: ShardIndex, number: int) -> bool:
    """Whether a shard's size and the places of some samples are those in the index."""
    try:
        with (root / index.shards.names[number]).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if index.shards.sizes[number] != size or not index.is_whole(number):
                return False
            return index.is_as_written(number, file.fileno())
    except OSError:
        return False


def _write(
    root: Path,
    path: Path,
    names: list[str],
    *,
    tolerant: bool = False,
    processes: int | None = None,
    each: EachShard | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Writes the index at `path`; tables that it has already, and that are still right, are kept."""
    for name in names:
        check_utf8(str(root / name), name)
    for stale in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed; the lock is ours
        stale.unlink(missing_ok=True)
    with ScannedTables(path) as scanned:
        if len(scanned):  # by a process that was stopped
            _join(root, path, scanned, _whole(path), ())
    kept = _kept(root, path, set(names) if tolerant else set())
    written = _of_writers(root, [name for name in names if name not in kept])
    missing = [name for name in names if name not in kept and name not in written]
    log.info("indexing %d of %d shards in %s", len(missing), len(names), root)
    began = logged = time.monotonic()
    progress(0, len(missing))
    with ScannedTables(path) as scanned:
        for done, table in enumerate(_scanned(root, missing, processes, each), 1):
            if not table.entry.fault:  # before it is noted as scanned: whoever goes on after a kill scans it no more
                write_tar_idx(root / table.entry.name, table)
            scanned.add(table)
            progress(done, len(missing))
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                log.warning("indexing %s: %d of %d shards after %.0f s", root, done, len(missing), logged - began)
        _join(root, path, scanned, kept, written)
    indexed = {*kept, *names}
    for joined in (root / WRITTEN).glob("*.tar.index") if path == root / INDEX_NAME else ():
        if joined.name.removesuffix(".index") in indexed:
            joined.unlink(missing_ok=True)


def _join(root: Path, path: Path, scanned: ScannedTables, kept: Mapping[str, int], written: Collection[str]) -> None:
    """Writes the index of the scanned shards, of those `kept` from the one that is there, and those of writers."""
    old = ShardIndex(path) if kept else None

    def table(name: str) -> ShardTable:
        if name in scanned:
            return scanned[name]
        if name in written:
            return _writers_index(root, name).table(0)
        assert old is not None
        return old.table(kept[name])

    write_index(path, map(table, sorted({*scanned, *kept, *written})))


def _whole(path: Path) -> dict[str, int]:
    """The shards in the index at `path` whose rows are whole, and their numbers."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        old = ShardIndex(path)
        return {name: number for number, name in enumerate(old.shards.names) if old.is_whole(number)}
    return {}


def _kept(root: Path, path: Path, anyway: set[str]) -> dict[str, int]:
    """The shards in the index at `path` that are still right, by name, and those of `anyway` even if they are not."""
    try:
        old = ShardIndex(path)
    except (OSError, ValueError, ShardError):
        return {}
    faults = old.shards.faults
    return {
        name: number
        for number, name in enumerate(old.shards.names)
        if (name in anyway or (number not in faults and _as_indexed(root, old, number))) and old.is_whole(number)
    }


def _of_writers(root: Path, names: list[str]) -> set[str]:
    """The shards that `sp.ShardWriter` finished, if they are still right: these need not be scanned."""
    found = set()
    for name in names if (root / WRITTEN).is_dir() else ():
        with contextlib.suppress(OSError, ValueError, ShardError, IndexError):
            index = _writers_index(root, name)
            if index.shards.names[0] == name and _as_indexed(root, index, 0):
                found.add(name)
    return found


def _writers_index(root: Path, name: str) -> ShardIndex:
    return ShardIndex(root / WRITTEN / f"{name}.index")


def _scanned(root: Path, names: list[str], processes: int | None, each: EachShard | None) -> Iterator[ShardTable]:
    """A table for each shard, by `each`; without it in this process, and after some seconds in several."""
    if each is not None:
        yield from _scanned_elsewhere(root, each(_SCAN, root, names))
        return
    processes = processes or os.cpu_count() or 1
    end = time.monotonic() + _ALONE_S
    for done, name in enumerate(names):
        if processes > 1 and len(names) - done > 1 and time.monotonic() > end:
            yield from _scanned_elsewhere(root, each_shard(_SCAN, root, names[done:], processes))
            return
        yield scan(root, name)


def _scanned_elsewhere(root: Path, coming: Generator[Answer, None, None]) -> Iterator[ShardTable]:
    with contextlib.closing(coming) as answers:
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
