"""What a dataset holds, read from its index: only the first shard is opened, for a first key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from savable_pipeline.errors import ShardError
from savable_pipeline.indexing import open_index
from savable_pipeline.nv_meta import read_counts, read_split, split_names
from savable_pipeline.shard_index import ShardEntry, ShardIndex
from savable_pipeline.shard_paths import Shards, find_shards
from savable_pipeline.tar import samples


@dataclass(frozen=True, slots=True)
class PartInfo:
    """How many samples have a part, and how long it is in bytes."""

    samples: int
    size: int

    @property
    def mean(self) -> float:
        """The mean size in bytes."""
        return self.size / self.samples


@dataclass(frozen=True, slots=True)
class Info:
    """A dataset in numbers; sizes are in bytes."""

    root: Path
    shards: list[ShardEntry]
    parts: dict[str, PartInfo]  # by extension, the most frequent first
    first_key: str
    first_parts: dict[str, int]  # by extension: size
    splits: dict[str, int]  # by name: samples of its shards

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(entry.samples for entry in self.shards)

    @property
    def size(self) -> int:
        """The bytes of all shards."""
        return sum(entry.size for entry in self.shards)


def dataset_info(shards: Shards) -> Info:
    """Describe a dataset. Raises `ShardError` if there is none or it holds no sample."""
    root, names = find_shards(shards)
    index = open_index(root, names)
    tables = index.tables()
    entries = [tables[name][0] for name in names]
    rows = np.concatenate([np.arange(tables[name][1], tables[name][1] + tables[name][0].samples) for name in names])
    if not len(rows):
        raise ShardError(f"{root}: no sample in {len(names)} shards")
    first = next(entry for entry in entries if entry.samples)
    key, parts = _first_sample(root / first.name)
    return Info(root, entries, _parts(index, rows), key, parts, split_counts(root, entries))


def _parts(index: ShardIndex, rows: np.ndarray) -> dict[str, PartInfo]:
    sizes = index.part_sizes(rows)
    ranked = sorted(sizes, key=lambda extension: (-len(sizes[extension]), extension))
    return {extension: PartInfo(len(sizes[extension]), int(sizes[extension].sum())) for extension in ranked}


def _first_sample(path: Path) -> tuple[str, dict[str, int]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        extent = next(samples(str(path), fd))
    finally:
        os.close(fd)
    return extent.key, {e: member.size for e, member in zip(extent.extensions, extent.members, strict=True)}


def split_counts(root: Path, entries: list[ShardEntry]) -> dict[str, int]:
    """Samples by split, as `.nv-meta/split.yaml` or `split.json` has it; nothing where there is neither."""
    counts = {entry.name: entry.samples for entry in entries}
    known = {*counts, *(read_counts(root) or ())}
    splits = {name: read_split(root, name, known) for name in split_names(root)}
    return {
        name: sum(counts[shard] - len(split.excluded.get(shard, ())) for shard in split.shards if shard in counts)
        for name, split in splits.items()
    }
