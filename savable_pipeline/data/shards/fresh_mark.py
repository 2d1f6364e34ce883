"""A mark beside the index of many shards says that no folder has changed since its shards were all looked at.

    .nv-meta/savable.index.fresh     the index it is of │ each folder: inode, last changes │ Energon's files

A file that is added to a folder, removed or replaced changes the folder's time, so that looking at the folders tells as
much as listing them and looking at a million files. What it cannot tell is that a shard was overwritten in its place:
that is an error when the shard is opened, which drops the mark, so that the next start looks at all shards again. The
mark is written only where the file system's own clock and folders were seen to tell such changes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.shards.byte_source import FileVersion
from savable_pipeline.data.shards.energon_metadata import META, METADATA_FILES, named_files
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardIndex
from savable_pipeline.errors import ShardError

MARKED_SHARDS = 4096  # fewer are looked at each time: it takes a tenth of a second
_LEAST_BYTES = 40  # of a shard in an index
_QUIET_NS = 2_000_000_000  # the coarsest clock of a file system


class _Mark(msgspec.Struct, array_like=True):
    index: bytes
    folders: dict[str, FileVersion]
    metadata: dict[str, FileVersion | None]  # None: there is no such file


def known_index(root: Path, form: FileFormat, *, tolerant: bool) -> ShardIndex | None:
    """The index beside the shards if it is known to have all of them as they are, none damaged unless `tolerant`."""
    try:
        mark = msgspec.msgpack.decode(_mark_of(root / form.index_name).read_bytes(), type=_Mark)
        index = form.index_at(root / form.index_name)
        fresh = mark.index == index.identity and all(_look(root / name) == at for name, at in mark.folders.items())
        fresh = fresh and mark.metadata == _metadata(root)
    except (OSError, ValueError, ShardError):  # msgspec's errors are ValueErrors
        return None
    return index if fresh and (tolerant or not index.shards.faults) else None


def begin_look(root: Path, form: FileFormat) -> int | None:
    """The time, in ns, by the file system's clock, before shards are looked at, to be given to `mark_fresh`.

    None for an index of few shards, where no mark can be written, or the folders do not tell when a file was added.
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


def mark_fresh(root: Path, form: FileFormat, index: ShardIndex, folders: Iterable[str], began: int) -> None:
    """Writes the mark, if none of these folders has changed since two seconds before `began`."""
    with contextlib.suppress(OSError, ShardError):
        looks = {name: _look(root / name) for name in folders}
        if all(look.newest_ns < began - _QUIET_NS for look in looks.values()):
            mark = _Mark(index.identity, looks, _metadata(root))
            replace_file(_mark_of(root / form.index_name), [msgspec.msgpack.encode(mark)])


def let_rest() -> None:
    """Waits until what this process has just written into folders is old enough for a mark."""
    time.sleep(1.1 * _QUIET_NS / 1e9)


def forget_mark(index_path: Path) -> None:
    """Drops the mark of an index: the next start looks at all shards."""
    with contextlib.suppress(OSError):
        _mark_of(index_path).unlink()


def _mark_of(index_path: Path) -> Path:
    return index_path.with_name(f"{index_path.name}.fresh")


def _metadata(root: Path) -> dict[str, FileVersion | None]:
    """Energon's files, which may list shards too. Raises `ShardError` if one of them is wrong."""
    names = {*METADATA_FILES, *named_files(root)}
    return {name: _look(root / META / name) if (root / META / name).exists() else None for name in sorted(names)}


def _look(path: Path) -> FileVersion:
    return FileVersion.of(path.stat())
