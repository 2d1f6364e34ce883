"""Finds the index of the files of a folder, of any format, or makes it: on first use, by one process, under a lock.

The index lies in `.nv-meta/` beside the files, or in the user's cache if that place is read-only. A file is scanned
again if its size has changed, or if it is younger than the index and is not as it was: moving or touching a folder does
not matter (see index_making.py). Of many files a mark says whether anything was added, removed or replaced since all
were looked at (see fresh_mark.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from savable_pipeline.data.shards import fresh_mark
from savable_pipeline.data.shards.byte_source import FileVersion
from savable_pipeline.data.shards.energon_metadata import read_counts
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardIndex
from savable_pipeline.data.shards.index_making import Progress, is_as_indexed, make_index
from savable_pipeline.data.shards.index_place import in_first_place, index_places
from savable_pipeline.data.shards.paths import Shards, Unlistable, find_shards, raise_it, spelled_out
from savable_pipeline.data.shards.processes import EachShard
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """The files below a folder, and their index; `names` is None if it has all of them and no others."""

    root: Path
    index: ShardIndex
    path: Path  # of the index
    names: list[str] | None


def open_files(
    files: Shards, form: FileFormat, *, tolerant: bool = False, unlistable: Unlistable = raise_it
) -> FoundIndex:
    """The files that a user names, indexed: those that are new or were rewritten are scanned first.

    Of a folder also those that should be there: Energon's list names them, and with `tolerant` the index. (A run that
    goes on without files that were lost since it was indexed must still count them.)

    Raises `ShardError` for a damaged file, and for a folder whose index names files that are gone. With `tolerant` the
    samples before the damage are taken, and a file that was changed or lost since it was indexed stays in the index as
    it was: a run that continues without it can then be resumed, and only reading its samples raises.
    """
    if not is_folder(files) or form.kind.listing:  # which names all that there should be
        root, names = find_shards(files, form.kind, missing_too=tolerant, unlistable=unlistable)
        return open_index(root, names, form, tolerant=tolerant)
    root = Path(spelled_out(files)[0]).absolute()  # a relative one would change its meaning with the working folder
    known = fresh_mark.known_index(root, form, tolerant=tolerant)
    if known is not None:
        return _checked(FoundIndex(root, known, root / form.index_name, None), tolerant)
    return _look_at_all(root, form, tolerant=tolerant, unlistable=unlistable)


def is_folder(files: Shards) -> bool:
    """Whether a user names all files of one folder."""
    return isinstance(files, str | os.PathLike) and Path(spelled_out(files)[0]).is_dir()


def _look_at_all(root: Path, form: FileFormat, *, tolerant: bool, unlistable: Unlistable) -> FoundIndex:
    began = fresh_mark.begin_look(root, form)
    folders: list[str] = []
    unlisted: list[ShardError] = []

    def left_out(error: ShardError) -> None:
        unlisted.append(error)
        unlistable(error)

    _, names = find_shards(root, form.kind, missing_too=tolerant, unlistable=left_out, visited=folders.append)

    def looked_at(index: ShardIndex) -> None:
        if began is not None and not unlisted and len(index.shards) >= fresh_mark.MARKED_SHARDS:
            fresh_mark.mark_fresh(root, form, index, folders, began)

    names = _with_missing(root, names, form, tolerant)
    return open_index(root, names, form, tolerant=tolerant, looked_at=looked_at)


def open_index(
    root: Path,
    names: list[str],
    form: FileFormat,
    *,
    tolerant: bool = False,
    looked_at: Callable[[ShardIndex], None] = lambda index: None,
) -> FoundIndex:
    """The index of the files `names` below `root`; those that are new or were rewritten are scanned first.

    `looked_at` is called with an index that has these files and no others, each as it was found. Raises `ShardError`
    for a damaged one unless `tolerant`: see `open_files`.
    """
    now = _FilesNow(root, names, form)
    for path in index_places(root, form.index_name):
        index = _fresh(path, now, tolerant)
        if index is not None:
            if path == root / form.index_name and len(index.shards) == len(names) and now.are_as_in(index, path):
                looked_at(index)
            return _checked(FoundIndex(root, index, path, names), tolerant)

    def make(path: Path) -> FoundIndex:
        index = _fresh(path, now, tolerant)  # another process may have made it while we waited
        if index is None:
            make_index(root, path, names, form, tolerant=tolerant)
            index = form.index_at(path)
        return FoundIndex(root, index, path, names)

    return _checked(in_first_place(root, form.index_name, make), tolerant)


def index_files(
    files: Shards,
    form: FileFormat,
    *,
    processes: int | None = None,
    each: EachShard | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Path, list[ShardEntry]]:
    """Indexes the files that are new or were changed: by `each`, or in `processes` processes (None: one a processor).

    Returns the path of the index, and the files that could not be read to their end. Raises `ShardError` if there are
    no files, or no place where an index can be written.
    """
    root, names = find_shards(files, form.kind)

    def make(path: Path) -> tuple[Path, list[ShardEntry]]:
        make_index(root, path, names, form, processes=processes, each=each, progress=progress)
        shards, wanted = form.index_at(path).shards, set(names)
        return path, [shards[number] for number in sorted(shards.faults) if shards.names[number] in wanted]

    path, faults = in_first_place(root, form.index_name, make)
    if path == root / form.index_name and len(names) >= fresh_mark.MARKED_SHARDS:
        _mark(root, form)
    return path, faults


def _mark(root: Path, form: FileFormat) -> None:
    """Marks the index that was just written as fresh, so that no start needs to look at all files again."""
    if fresh_mark.known_index(root, form, tolerant=True) is None:
        fresh_mark.let_rest()
        _look_at_all(root, form, tolerant=True, unlistable=lambda error: None)


def _with_missing(root: Path, found: list[str], form: FileFormat, tolerant: bool) -> list[str]:
    indexed = set(_indexed(root, form))
    if not tolerant:
        check_none_gone(str(root), indexed.difference(found))
    told = (name for name in read_counts(root) or () if name.endswith(form.kind.suffixes))
    return sorted({*found, *indexed, *told})


def _indexed(root: Path, form: FileFormat) -> Sequence[str]:
    index = known_index(root, form)
    return () if index is None else index.shards.names


def known_index(root: Path, form: FileFormat) -> ShardIndex | None:
    """The index of `root`, whatever has become of the files; None without a whole one."""
    for path in index_places(root, form.index_name):
        with contextlib.suppress(OSError, ValueError, ShardError):
            return form.index_at(path)
    return None


def known_files(root: Path, form: FileFormat) -> dict[str, ShardEntry]:
    """The entries of the index of `root`, by name, whatever has become of the files."""
    index = known_index(root, form)
    return {} if index is None else {entry.name: entry for entry in index.shards}


def check_none_gone(address: str, gone: Collection[str]) -> None:
    """Raises `ShardError` if files that were indexed are gone from the folder or prefix `address`."""
    if gone:
        raise ShardError(
            f"{address}: {len(gone)} shards that were indexed are gone, such as {min(gone)}; put them back, or run "
            f"`savable index {address}` to go on without them",
            reason="missing shard",
        )


def _checked(found: FoundIndex, tolerant: bool) -> FoundIndex:
    check_faults(str(found.root), found.index, found.names, tolerant)
    return found


def check_faults(address: str, index: ShardIndex, names: Collection[str] | None, tolerant: bool) -> None:
    """Raises `ShardError` for the first of these files (None: all) that is damaged; with `tolerant` it is a warning."""
    faults = index.shards.faults
    wanted = None if names is None or not faults else set(names)
    for number in sorted(faults):
        if wanted is not None and index.shards.names[number] not in wanted:
            continue
        if not tolerant:
            raise ShardError(f"{address}/{faults[number]}")
        log.warning("%s/%s; going on with the samples before it", address, faults[number])


class _FilesNow:
    """Files as they are now: `sizes`, -1 for one that is not there, and when they were last written, in ns."""

    def __init__(self, root: Path, names: list[str], form: FileFormat) -> None:
        self.root, self.names, self.form = root, names, form
        self.sizes = np.empty(len(names), dtype=np.int64)
        self.written = np.empty(len(names), dtype=np.int64)
        for number, name in enumerate(names):
            try:
                found = os.stat(f"{root}/{name}")  # noqa: PTH116  # a Path per name is slow for a million shards
                self.sizes[number], self.written[number] = found.st_size, found.st_mtime_ns
            except OSError:
                self.sizes[number] = self.written[number] = -1
            if form.beside[1] and name.endswith(form.beside[0]):
                self.written[number] = max(self.written[number], self._written_beside(name))

    def _written_beside(self, name: str) -> int:
        """When what lies beside a file was put there; one that was moved there is as old as before otherwise."""
        try:
            return FileVersion.of((self.root / self.form.companion(name)).stat()).newest_ns
        except OSError:
            return time.time_ns()  # it may be gone

    def are_as_in(self, index: ShardIndex, path: Path) -> bool:
        """Whether the index at `path` has all of them as they are. Raises KeyError without one of them, OSError."""
        numbers = index.numbers(self.names)
        if not np.array_equal(index.shards.sizes[numbers], self.sizes):
            return False
        touched = numbers[self.written > path.stat().st_mtime_ns].tolist()
        return all(is_as_indexed(self.root, index, number, self.form) for number in touched)


def _fresh(path: Path, now: _FilesNow, tolerant: bool) -> ShardIndex | None:
    """The index at `path` if it exists, is whole, and has each file as it is now; else None."""
    try:
        index = now.form.index_at(path)
        numbers = index.numbers(now.names)
        if tolerant:
            return index
        faulty = bool(index.shards.faults) and not index.shards.faults.keys().isdisjoint(numbers.tolist())
        return index if not faulty and now.are_as_in(index, path) else None
    except (OSError, ValueError, KeyError):
        return None
    except ShardError as error:
        log.warning("%s; making a new one", error)
        return None
