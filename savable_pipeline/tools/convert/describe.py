"""The index and Energon's metadata of a folder whose shards are all there."""

from __future__ import annotations

import errno
from pathlib import Path

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME, META
from savable_pipeline.data.shards.indexing import WRITTEN, index_files
from savable_pipeline.data.shards.scan import TARS, write_tar_idx
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.tools.convert.energon import energon_files
from savable_pipeline.tools.convert.shard_job import room_on


def describe(folder: Path) -> TarIndex:
    """Index the shards that are new, and write Energon's files beside the index.

    Raises `ShardError`, OSError, and `SavableError` if the index has no room beside the shards.
    """
    with room_on(folder):
        for stale in folder.rglob("*.tar.idx.*.tmp"):  # of a process that was killed: nobody else writes here
            stale.unlink(missing_ok=True)
        place, _ = index_files(folder, TARS)
        if place.resolve() != (folder / INDEX_NAME).resolve():  # but in this user's cache, where others do not look
            raise OSError(errno.ENOSPC, f"no room for {INDEX_NAME}")
        index = describe_indexed(folder, place)
        for entry in index.shards:
            offsets = folder / f"{entry.name}.idx"
            if not entry.fault and not offsets.exists():  # the disk was full when it was indexed
                write_tar_idx(folder / entry.name, TARS.scan(folder, entry.name))
                if not offsets.exists():
                    raise OSError(errno.ENOSPC, f"no room for {offsets.name}")
        return index


def describe_indexed(folder: Path, index_path: Path) -> TarIndex:
    """Write Energon's files of a folder whose index is there."""
    index = TarIndex(index_path)
    counts = {entry.name: entry.samples for entry in index.shards}
    layouts = {frozenset(layout.position) for layout in index.layouts}
    for name, content in energon_files(counts, layouts).items():
        replace_file(folder / META / name, [content.encode()], sync=True)
    return index


def is_written(folder: Path) -> bool:
    """Whether `sp.ShardWriter` wrote the shards of a folder."""
    return (folder / WRITTEN).is_dir()
