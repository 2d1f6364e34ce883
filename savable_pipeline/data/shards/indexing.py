"""Finds the index of a folder's files, of any format, or builds it under a lock.

The index of tars is in `.nv-meta/` in their folder, or in the user's cache if that folder is read-only. The index of
other files is in the cache, because other programs would read a new folder as a class or as data. It is in `.nv-meta/`
too if that exists, or if `savable index` built it. A file is scanned again if its size has changed, or if it is younger
than the index and its content differs, so moving or touching a folder does not matter (see index_making.py). With many
files, a mark shows whether any folder has changed since all files were checked:

    .nv-meta/savable.index.fresh     identity of the index │ each folder: inode, last changes │ Energon's files

Adding, removing or replacing a file changes the time of its folder, so checking the folders replaces checking a million
files. It does not detect a shard that was overwritten in place. That is an error when the shard is opened, which drops
the mark, so that the next start checks all shards. The mark is written only if the file system was found to record such
changes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from savable_pipeline.core.file_locks import file_lock
from savable_pipeline.core.files import replace_file, user_cache, with_handles
from savable_pipeline.data.shards import paths
from savable_pipeline.data.shards.byte_source import FileVersion
from savable_pipeline.data.shards.index import TAR, Format, IndexedFiles, ShardIndex, index_name
from savable_pipeline.data.shards.index_making import EachShard, FileProgress, build_index, file_matches_index
from savable_pipeline.data.shards.metadata import META, METADATA_FILES, named_files, read_counts
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry, ShardList
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

T = TypeVar("T")
MARKED_SHARDS = 4096  # with fewer shards, each is checked, which takes a tenth of a second
_LEAST_BYTES = 40  # fewest bytes of a shard in an index
_QUIET_NS = 2_000_000_000  # the coarsest timestamp granularity of a file system


def media_table_name(kind: str) -> str:
    """Return the path of the media table of a kind, relative to the files' folder."""
    return index_name("media" if kind == TAR else f"{kind}.media")


def index_paths(root: Path, name: str, *, near: bool = True) -> list[Path]:
    """Return the paths where an index may be, the preferred one first.

    They are `name` below the shards' folder, first if `near`, and one in the user's cache if there is one.
    """
    hashed = f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]}{Path(name).name.removeprefix('savable')}"
    cached = [] if (cache := user_cache()) is None else [cache / "savable_pipeline" / hashed]
    return [root / name, *cached] if near else [*cached, root / name]


def at_first_writable(root: Path, name: str, build: Callable[[Path], T], *, near: bool) -> T:
    """Return `build(path)` for the index's first path that can be written.

    See `index_paths` and `first_writable`.
    """
    return first_writable(index_paths(root, name, near=near), f"{root}: no place to write an index", build)


def first_writable(candidates: Iterable[Path], fault: str, build: Callable[[Path], T]) -> T:
    """Return `build(path)` for the first path that can be written, under its lock.

    Raises `ShardError` with the `fault` if there is none.
    """
    faults = []
    for path in candidates:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = with_handles(partial(path.with_name(path.name + ".lock").open, "ab"))
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
            continue
        with lock, file_lock(Path(lock.name), lock.fileno()):
            try:
                return build(path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                faults.append(f"{path}: {error.strerror}")
                log.warning("%s: %s; the index cannot be written there", path, error.strerror)
    cache = "This user has no home folder. " if user_cache() is None else ""
    raise ShardError(f"{fault}: {'; '.join(faults)}. {cache}Free space, or set XDG_CACHE_HOME to a writable folder")


class _Mark(msgspec.Struct, array_like=True):
    index: bytes
    folders: dict[str, FileVersion]
    metadata: dict[str, FileVersion | None]  # None means that the file does not exist


def marked_index(root: Path, form: Format, *, tolerant: bool) -> IndexedFiles | None:
    """Return the index next to the shards if its mark shows that it is valid.

    Otherwise return None. An index with a damaged shard is returned only if `tolerant`.
    """
    with contextlib.suppress(OSError, ValueError, ShardError):
        if (mark := valid_mark(root, form)) is not None:
            index = form.index_at(root / form.index_name)
            is_fresh = mark.index == index.identity and mark.metadata == _metadata(root)
            if is_fresh and (tolerant or not index.shards.faults):
                return IndexedFiles(form, index, root / form.index_name, None, root, tolerant=tolerant)
    return None


def valid_mark(root: Path, form: Format) -> _Mark | None:
    """Return the mark next to an index, or None.

    It is None if the mark is missing or damaged, or if a folder changed after it was written.
    """
    with contextlib.suppress(OSError, ValueError):  # msgspec's errors are subclasses of ValueError
        mark = msgspec.msgpack.decode(_mark_of(root / form.index_name).read_bytes(), type=_Mark)
        return mark if all(_version_of(root / name) == then for name, then in mark.folders.items()) else None
    return None


def start_of_check(root: Path, form: Format) -> int | None:
    """Return the file system's current time in ns, to pass to `mark_fresh`.

    Call it before checking the shards. The result is None for an index of few shards, if no mark can be written, or if
    the times of folders do not show that a file was added.
    """
    index = root / form.index_name
    folder = index.parent
    try:
        if index.stat().st_size < MARKED_SHARDS * _LEAST_BYTES:
            return None
        before = folder.stat().st_mtime_ns
        with tempfile.NamedTemporaryFile(dir=folder, prefix="savable.clock.", suffix=".tmp") as file:
            now, after = os.fstat(file.fileno()).st_mtime_ns, folder.stat().st_mtime_ns
    except OSError:
        return None
    return now if after > before and abs(after - now) < _QUIET_NS else None


def mark_fresh(root: Path, form: Format, index: ShardIndex, folders: Iterable[str], started_ns: int) -> None:
    """Write the mark, unless a folder changed shortly before the check or later.

    The check started at `started_ns`, and two seconds before it count as shortly.
    """
    with contextlib.suppress(OSError, ShardError):
        versions = {name: _version_of(root / name) for name in folders}
        if all(each.newest_ns < started_ns - _QUIET_NS for each in versions.values()):
            mark = _Mark(index.identity, versions, _metadata(root))
            replace_file(_mark_of(root / form.index_name), [msgspec.msgpack.encode(mark)])


def wait_for_mtime_granularity() -> None:
    """Wait until folders that this process changed are old enough for `mark_fresh`."""
    time.sleep(1.1 * _QUIET_NS / 1e9)


def forget_mark(index_path: Path) -> None:
    """Drop the mark of an index, so that the next start checks all shards."""
    with contextlib.suppress(OSError):
        _mark_of(index_path).unlink()


def _mark_of(index_path: Path) -> Path:
    return index_path.with_name(f"{index_path.name}.fresh")


def _metadata(root: Path) -> dict[str, FileVersion | None]:
    """Return the versions of Energon's files, which may list shards. Raises `ShardError` for a wrong one."""
    names = {*METADATA_FILES, *named_files(root)}
    return {name: _version_of(root / META / name) if (root / META / name).exists() else None for name in sorted(names)}


def _version_of(path: Path) -> FileVersion:
    return FileVersion.of(path.stat())


def open_files(
    files: paths.Shards | paths.ListedFiles,
    form: Format,
    *,
    tolerant: bool = False,
    unlistable: paths.Unlistable = paths.raise_error,
) -> IndexedFiles:
    """Open the index of the files that a user names, scanning new and changed files.

    For a folder, this includes files that should exist: those in Energon's list, and with `tolerant` those in the
    index. (A run that tolerates lost files must still count them.)

    Raises `ShardError` for a damaged file, and for a folder whose index names files that are gone. With `tolerant`, the
    samples before the damage are used, and a changed or lost file stays in the index as it was. A run that continues
    without it can then be resumed, and only reading its samples raises.
    """
    if isinstance(files, str | os.PathLike):
        root = Path(files).absolute()
        if (known := marked_index(root, form, tolerant=tolerant)) is not None:
            return _checked(known)
    listed = files if isinstance(files, paths.ListedFiles) else paths.list_files(files)
    for error in listed.unlistable:
        unlistable(error)
    found = files_of(listed, form, missing_too=tolerant)
    if found.complete:
        return open_index(found.root, found.names, form, tolerant=tolerant)
    if (known := marked_index(found.root, form, tolerant=tolerant)) is not None:
        return _checked(known)
    return _open_listed(found, form, tolerant=tolerant)


def _open_listed(listed: paths.ListedFiles, form: Format, *, tolerant: bool) -> IndexedFiles:
    root, started_ns = listed.root, start_of_check(listed.root, form)
    if started_ns is not None:  # the files were listed earlier, according to another clock
        started_ns -= time.monotonic_ns() - listed.started_ns

    def on_match(index: ShardIndex) -> None:
        if started_ns is not None and not listed.unlistable and len(index.shards) >= MARKED_SHARDS:
            mark_fresh(root, form, index, listed.folders, started_ns)

    indexes = _indexes(root, form)
    names = _with_missing(root, listed.names, form, tolerant, _shards_of_first(indexes))
    return open_index(root, names, form, tolerant=tolerant, indexes=indexes, on_match=on_match)


def files_of(listed: paths.ListedFiles, form: Format, *, missing_too: bool = False) -> paths.ListedFiles:
    """Return the files of a format among the listed ones.

    Their names are relative to the deepest folder that has all of them. Raises `ShardError` if there are none, for a
    compressed one, and unless `missing_too` for a missing one.
    """
    root = listed.root
    heads = listed.heads(dict.fromkeys(form.markers, paths.LARGEST_INDEX)) if listed.whole else {}
    try:
        names = form.files(listed.names, heads) if listed.chosen is None or form.variant else listed.chosen
        is_listed = form.listed is not None and form.listed(heads) is not None
    except ValueError as error:
        raise ShardError(f"{root}: {error}", reason=paths.NO_SUCH_PATH) from error
    advice = "sp.read(…) reads files of any kind, and `savable convert SRC DST` writes shards"
    advices = "file in this folder or below it", advice
    names = without_compressed(str(root), form, listed, names, listed.exact, advices)
    for name in listed.exact:
        if not (root / name).exists() and not (missing_too and form.has(name)):
            raise paths.missing_error(root / name)
    if is_listed and not missing_too and (gone := set(names).difference(listed.names)):
        raise ShardError(
            f"{root / min(gone)}: named by {' or '.join(form.markers)}, and not there. Copy the whole folder",
            reason="missing shard",
        )
    return replace(listed.below_deepest(names), complete=is_listed or not listed.whole)


def without_compressed(
    root: str, form: Format, listed: Any, names: Sequence[str], exact: Collection[str], advice: tuple[str, str]
) -> list[str]:
    """Return the names and the `exact` ones, sorted, without compressed files.

    A warning counts the compressed files. Raises `ShardError` if no file remains, and for a compressed file that is not
    `listed` as part of a whole folder. For the message, `advice` has a noun for the files, and what to do if there are
    none.
    """
    packed = [*filter(form.packs, listed.names)] if form.packed else []
    if packed and not listed.whole:
        raise ShardError(f"{root}/{packed[0]}: a compressed file cannot be read at an offset. {paths.PACKED_FIX}")
    found = sorted({*names, *exact}.difference(packed)) if packed or exact else [*names]
    if not found:
        but = f", but {len(packed)} compressed ones. {paths.PACKED_FIX}" if packed else f". {advice[1]}"
        raise ShardError(f"{root}: no {' or '.join(form.suffixes)} {advice[0]}{but}", reason=paths.NO_SHARD)
    if packed:
        fix = f"Unpack them, or name them in `savable convert`, such as {packed[0]}"
        log.warning("%s: %d compressed %s files are skipped. %s", root, len(packed), form.name, fix)
    return found


def open_index(
    root: Path,
    names: list[str],
    form: Format,
    *,
    tolerant: bool = False,
    indexes: Mapping[Path, ShardIndex] | None = None,
    on_match: Callable[[ShardIndex], None] = lambda index: None,
) -> IndexedFiles:
    """Return the index of the files `names` below `root`.

    Files that are new or were rewritten are scanned first.

    `indexes` are the existing ones by path, if they are open already. `on_match` is called with an index that has
    these files and no others, all unchanged. Raises `ShardError` for a damaged file unless `tolerant`: see
    `open_files`.
    """
    current = _CurrentFiles(root, names, form)
    for path, index in (_indexes(root, form) if indexes is None else indexes).items():
        if _matches_files(index, path, current, tolerant):
            is_whole = len(index.shards) == len(names)
            if is_whole and path == root / form.index_name and (not tolerant or current.match(index, path)):
                on_match(index)
            return _checked(IndexedFiles(form, index, path, None if is_whole else names, root, tolerant=tolerant))

    def build(path: Path) -> IndexedFiles:
        index = _opened(path, form)  # another process may have built it while this one waited for the lock
        if index is None or not _matches_files(index, path, current, tolerant):
            build_index(root, path, names, form, tolerant=tolerant)
            index = form.index_at(path)
        return IndexedFiles(form, index, path, names, root, tolerant=tolerant)

    near = form.name == TAR or (root / META).is_dir()
    return _checked(at_first_writable(root, form.index_name, build, near=near))


def index_files(
    files: paths.Shards | paths.ListedFiles,
    form: Format,
    *,
    processes: int | None = None,
    each: EachShard | None = None,
    progress: FileProgress = lambda done, total: None,
    near: bool = True,
) -> tuple[Path, list[ShardEntry]]:
    """Index the files that are new or changed.

    `each` scans the files, or if it is None `processes` processes (None: one per core). If `near`, the index and the
    sidecars for other programs are written to the folder of the files.

    Returns the path of the index, and the files that could not be read to their end. Raises `ShardError` if there are
    no files, or no place where an index can be written.
    """
    listed = files if isinstance(files, paths.ListedFiles) else paths.list_files(files)
    for error in listed.unlistable:
        raise error
    found = files_of(listed, form)
    root, names = found.root, found.names

    def build(path: Path) -> tuple[Path, list[ShardEntry]]:
        build_index(root, path, names, form, processes=processes, each=each, progress=progress, for_others=near)
        shards, wanted = form.index_at(path).shards, set(names)
        return path, [shards[number] for number in sorted(shards.faults) if shards.names[number] in wanted]

    path, faults = at_first_writable(root, form.index_name, build, near=near or form.name == TAR)
    if path == root / form.index_name and len(names) >= MARKED_SHARDS:
        _mark_new_index(root, form)
    return path, faults


def _mark_new_index(root: Path, form: Format) -> None:
    """Write the mark of the new index, so that the next start need not check all files."""
    if marked_index(root, form, tolerant=True) is None:
        wait_for_mtime_granularity()
        _open_listed(files_of(paths.list_files(root), form, missing_too=True), form, tolerant=True)


def _with_missing(root: Path, found: list[str], form: Format, tolerant: bool, known: ShardList) -> list[str]:
    """Return the files, with the missing ones of Energon's list and, if `tolerant`, of the index."""
    counted = {name for name in read_counts(root) or () if form.has(name)}
    if found == [*known.names] and counted.issubset(found):
        return found
    indexed = set(known.names)
    if not tolerant:
        check_none_gone(str(root), indexed.difference(found))
    return sorted({*found, *indexed, *counted})


def known_files(root: Path, form: Format) -> dict[str, ShardEntry]:
    """Return the entries of an index by name, also of changed or missing files."""
    return {entry.name: entry for entry in _shards_of_first(_indexes(root, form))}


def _indexes(root: Path, form: Format) -> dict[Path, ShardIndex]:
    """Return the undamaged indexes of `root`, by path."""
    found = {path: _opened(path, form) for path in index_paths(root, form.index_name)}
    return {path: index for path, index in found.items() if index is not None}


def _shards_of_first(indexes: Mapping[Path, ShardIndex]) -> ShardList:
    return next((index.shards for index in indexes.values()), ShardList.of(()))


def check_none_gone(address: str, gone: Collection[str]) -> None:
    """Raise `ShardError` if indexed files are gone from `address`."""
    if gone:
        raise ShardError(
            f"{address}: {len(gone)} indexed shards are gone, such as {min(gone)}. Restore them, pass "
            f'on_error="skip", or run `savable index {address}` before a new run',
            reason="missing shard",
        )


def _checked(found: IndexedFiles) -> IndexedFiles:
    """Return the files after `check_faults`."""
    check_faults(found.address, found.entries, found.tolerant)
    return found


def check_faults(address: str, files: ShardList, tolerant: bool) -> None:
    """Raise `ShardError` for the first damaged file, or with `tolerant` warn of each."""
    for fault in files.faults.values():
        if not tolerant:
            raise ShardError(f"{address}/{fault}")
        log.warning("%s/%s. Only the samples before it are used", address, fault)


class _CurrentFiles:
    """Current status of files: `sizes` in bytes, and the time of the last write in ns, both -1 if missing."""

    def __init__(self, root: Path, names: list[str], form: Format) -> None:
        self.root, self.names, self.form = root, names, form
        self.sizes = np.empty(len(names), dtype=np.int64)
        self.written = np.empty(len(names), dtype=np.int64)
        for number, name in enumerate(names):
            try:
                found = os.stat(f"{root}/{name}")  # noqa: PTH116  # a Path per name is slow for a million shards
                self.sizes[number], self.written[number] = found.st_size, found.st_mtime_ns
            except OSError:
                self.sizes[number] = self.written[number] = -1
            if form.sidecar[1] and name.lower().endswith(form.sidecar[0]):
                self.written[number] = max(self.written[number], self._sidecar_written_ns(name))

    def _sidecar_written_ns(self, name: str) -> int:
        """Return when the sidecar of a file was written or moved to its folder, or now if it is gone."""
        try:
            return FileVersion.of((self.root / self.form.companion(name)).stat()).newest_ns
        except OSError:
            return time.time_ns()  # the sidecar may be deleted

    def match(self, index: ShardIndex, path: Path, numbers: Rows | None = None) -> bool:
        """Return whether the index at `path` has all of these files, unchanged.

        `numbers` are the files' numbers in the index. Raises OSError, and KeyError if the index lacks a file.
        """
        numbers = index.numbers(self.names) if numbers is None else numbers
        if not np.array_equal(index.shards.sizes[numbers], self.sizes):
            return False
        newer = numbers[self.written > path.stat().st_mtime_ns].tolist()
        return all(file_matches_index(self.root, index, number, self.form) for number in newer)


def _opened(path: Path, form: Format) -> ShardIndex | None:
    """Return the index at `path`, or None if it is missing or damaged."""
    try:
        return form.index_at(path)
    except (OSError, ValueError):
        return None
    except ShardError as error:
        log.warning("%s. It is rebuilt", error)
        return None


def _matches_files(index: ShardIndex, path: Path, current: _CurrentFiles, tolerant: bool) -> bool:
    """Return whether an index has each file in its current version, or with `tolerant` in any version."""
    with contextlib.suppress(OSError, ValueError, KeyError, ShardError):
        numbers = index.numbers(current.names)
        is_faulty = bool(index.shards.faults) and not index.shards.faults.keys().isdisjoint(numbers.tolist())
        return tolerant or (not is_faulty and current.match(index, path, numbers))
    return False
