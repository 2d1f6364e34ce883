"""Makes the index of the files of a folder, of any format: of what is not in the one that is there, or is other now.

What was scanned is in a file until all is there, so that memory does not grow with it, and an interrupted call can be
continued.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from savable_pipeline.core.open_files import with_handles
from savable_pipeline.data.shards.byte_source import opened
from savable_pipeline.data.shards.energon_metadata import META
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardIndex, ShardTable
from savable_pipeline.data.shards.index_writer import ScannedTables, write_index
from savable_pipeline.data.shards.processes import Answer, EachShard, each_shard
from savable_pipeline.data.shards.shard_list import check_utf8
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]  # of the files done, and of all
WRITTEN = f"{META}/savable.writer"  # there `sp.ShardWriter` leaves the rows of each shard, as `X.tar.index`
_ALONE_S = 5.0  # that one process scans before it starts others
_LOG_EVERY_S = 10.0


def is_as_indexed(root: Path, index: ShardIndex, number: int, form: FileFormat) -> bool:
    """Whether a file has the size that is in the index, and is the one that was indexed."""
    return index.is_whole(number) and with_handles(partial(_is_the_same, root, index, number, form))


def _is_the_same(root: Path, index: ShardIndex, number: int, form: FileFormat) -> bool:
    try:
        with opened(root / index.shards.names[number]) as file:
            return file.size == index.shards.sizes[number] and form.is_as_indexed(file, index, number)
    except OSError:
        return False


def make_index(
    root: Path,
    path: Path,
    names: list[str],
    form: FileFormat,
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
            _join(root, path, form, scanned, _whole(path, form), ())
    kept = _kept(root, path, form, set(names) if tolerant else set())
    written = _of_writers(root, form, [name for name in names if name not in kept])
    missing = [name for name in names if name not in kept and name not in written]
    log.info("indexing %d of %d shards in %s", len(missing), len(names), root)
    began = logged = time.monotonic()
    progress(0, len(missing))
    with ScannedTables(path) as scanned:
        for done, table in enumerate(_scanned(root, missing, form, processes, each), 1):
            if not table.entry.fault:  # before it is noted as scanned: whoever goes on after a kill scans it no more
                form.leave_beside(root / table.entry.name, table)
            scanned.add(table)
            progress(done, len(missing))
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                log.warning("indexing %s: %d of %d shards after %.0f s", root, done, len(missing), logged - began)
        _join(root, path, form, scanned, kept, written)
    indexed = {*kept, *names}
    for joined in (root / WRITTEN).glob("*.index") if path == root / form.index_name else ():
        if joined.name.removesuffix(".index") in indexed:
            joined.unlink(missing_ok=True)


def _join(
    root: Path,
    path: Path,
    form: FileFormat,
    scanned: ScannedTables,
    kept: Mapping[str, int],
    written: Collection[str],
) -> None:
    """Writes the index of the scanned files, of those `kept` from the one that is there, and those of writers."""
    old = form.index_at(path) if kept else None

    def table(name: str) -> ShardTable:
        if name in scanned:
            return scanned[name]
        if name in written:
            return _writers_index(root, name, form).table(0)
        assert old is not None
        return old.table(kept[name])

    write_index(path, map(table, sorted({*scanned, *kept, *written})), form.name)


def _whole(path: Path, form: FileFormat) -> dict[str, int]:
    """The files in the index at `path` whose rows are whole, and their numbers."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        old = form.index_at(path)
        return {name: number for number, name in enumerate(old.shards.names) if old.is_whole(number)}
    return {}


def _kept(root: Path, path: Path, form: FileFormat, anyway: set[str]) -> dict[str, int]:
    """The files in the index at `path` that are still right, by name, and those of `anyway` even if they are not."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        old = form.index_at(path)
        return {
            name: number for number, name in enumerate(old.shards.names) if _is_kept(root, old, number, form, anyway)
        }
    return {}


def _is_kept(root: Path, old: ShardIndex, number: int, form: FileFormat, anyway: set[str]) -> bool:
    if anyway and old.shards.names[number] in anyway:
        return old.is_whole(number)
    return number not in old.shards.faults and is_as_indexed(root, old, number, form)


def _of_writers(root: Path, form: FileFormat, names: list[str]) -> set[str]:
    """The files that `sp.ShardWriter` finished, if they are still right: these need not be scanned."""
    found = set()
    for name in names if (root / WRITTEN).is_dir() else ():
        with contextlib.suppress(OSError, ValueError, ShardError, IndexError):
            index = _writers_index(root, name, form)
            if index.shards.names[0] == name and is_as_indexed(root, index, 0, form):
                found.add(name)
    return found


def _writers_index(root: Path, name: str, form: FileFormat) -> ShardIndex:
    return form.index_at(root / WRITTEN / f"{name}.index")


def _scanned(
    root: Path, names: list[str], form: FileFormat, processes: int | None, each: EachShard | None
) -> Iterator[ShardTable]:
    """A table for each file, by `each`; without it in this process, and after some seconds in several."""
    task = f"{form.place}.scan"
    if each is not None:
        yield from _scanned_elsewhere(root, each(task, root, names))
        return
    processes = processes or os.cpu_count() or 1
    end = time.monotonic() + _ALONE_S
    for done, name in enumerate(names):
        if processes > 1 and len(names) - done > 1 and time.monotonic() > end:
            yield from _scanned_elsewhere(root, each_shard(task, root, names[done:], processes))
            return
        yield form.scan(root, name)


def _scanned_elsewhere(root: Path, coming: Generator[Answer, None, None]) -> Iterator[ShardTable]:
    with contextlib.closing(coming) as answers:
        for name, answer in answers:
            if answer is None:
                raise ShardError(f"{root / name}: the process that indexed it died; was there too little memory?")
            yield msgspec.msgpack.decode(answer, type=ShardTable)
