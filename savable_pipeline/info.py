"""What a dataset holds, read from its index: only one shard is opened, for a first key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.nv_meta import read_counts, read_split, split_names
from savable_pipeline.remote_dataset import open_dataset
from savable_pipeline.shard_index import ShardEntry
from savable_pipeline.shard_paths import Shards


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

    root: str  # a folder or a URL
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
    """Describe a dataset. Raises `ShardError` if there is none or it holds no sample, `RemoteError`."""
    dataset = open_dataset(shards)
    shard = next(number for number, entry in enumerate(dataset.entries) if entry.samples)
    row = dataset.first_row(shard)
    return Info(
        dataset.address,
        dataset.entries,
        _parts(dataset.part_sizes()),
        dataset.key(shard, row),
        dataset.sizes(row),
        split_counts(dataset.root, dataset.entries),
    )


def _parts(sizes: dict[str, NDArray[np.int64]]) -> dict[str, PartInfo]:
    ranked = sorted(sizes, key=lambda extension: (-len(sizes[extension]), extension))
    return {extension: PartInfo(len(sizes[extension]), int(sizes[extension].sum())) for extension in ranked}


def split_counts(root: Path, entries: list[ShardEntry]) -> dict[str, int]:
    """Samples by split, as `.nv-meta/split.yaml` or `split.json` has it; nothing where there is neither."""
    counts = {entry.name: entry.samples for entry in entries}
    known = {*counts, *(read_counts(root) or ())}
    splits = {name: read_split(root, name, known) for name in split_names(root)}
    return {
        name: sum(counts[shard] - len(split.excluded.get(shard, ())) for shard in split.shards if shard in counts)
        for name, split in splits.items()
    }
