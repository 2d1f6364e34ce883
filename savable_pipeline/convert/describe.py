"""The index and Energon's metadata of a folder whose shards are all there."""

from __future__ import annotations

from pathlib import Path

from savable_pipeline.convert.energon import energon_files
from savable_pipeline.core.files import replace_file
from savable_pipeline.shards.energon_metadata import META
from savable_pipeline.shards.index_file import ShardIndex
from savable_pipeline.shards.indexing import WRITTEN, index_shards


def describe(folder: Path) -> ShardIndex:
    """Index the shards that are new, and write Energon's files beside the index. Raises `ShardError`, OSError."""
    place, _ = index_shards(folder)
    return describe_indexed(folder, place)


def describe_indexed(folder: Path, index_path: Path) -> ShardIndex:
    """Write Energon's files of a folder whose index is there."""
    index = ShardIndex(index_path)
    counts = {entry.name: entry.samples for entry in index.shards}
    layouts = {frozenset(layout.position) for layout in index.layouts}
    for name, content in energon_files(counts, layouts).items():
        replace_file(folder / META / name, [content.encode()], sync=True)
    return index


def is_written(folder: Path) -> bool:
    """Whether `sp.ShardWriter` wrote the shards of a folder."""
    return (folder / WRITTEN).is_dir()
