"""Summary of a dataset from its index.

Only one shard is opened, for the first key.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.wording import counted
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.media.media_table import MediaTotals
from savable_pipeline.data.shards.metadata import read_counts, read_split, split_names
from savable_pipeline.data.shards.part_types import dotted_parts, lacking_parts
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.errors import ShardError


@dataclass(frozen=True, slots=True)
class PartInfo:
    """Number of samples with a part, and the bytes of that part in total."""

    samples: int
    size: int
    empty: int = 0  # number of samples with an empty part

    @property
    def mean(self) -> float:
        """Return the mean size in bytes."""
        return self.size / self.samples


@dataclass(frozen=True, slots=True)
class Info:
    """Statistics of a dataset. Sizes are in bytes."""

    root: str  # a folder or a URL
    shards: Sequence[ShardEntry]
    parts: dict[str, PartInfo]  # by extension, the most frequent first
    first_key: str
    first_parts: dict[str, int]  # sizes of the first sample's parts, by extension
    splits: dict[str, int]  # number of samples by name of the split
    examined: int  # number of samples that `parts` counts: all, or some if all would have to be read
    nulls: dict[str, int] = field(default_factory=dict)  # number of these samples with a null, by column
    media: dict[str, MediaTotals] = field(default_factory=dict)  # by extension, if there is a table of media
    # for tars: the parts of samples in which every part has a dot
    dotted: list[list[str]] = field(default_factory=list)
    # errors that a reader would raise, and warnings of the store about its files
    faults: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return sum(entry.samples for entry in self.shards)

    @property
    def size(self) -> int:
        """Return the bytes of all shards."""
        return sum(entry.size for entry in self.shards)

    @property
    def warnings(self) -> list[str]:
        """Return warnings about skipped content and about samples that differ."""
        counts = {extension: part.samples for extension, part in self.parts.items()}
        dotted = dotted_parts(self.examined, counts, part_sets=self.dotted)
        return [*self.faults, *lacking_parts(self.examined, counts), *dotted]


def dataset_info(shards: Shards, **settings: Any) -> Info:
    """Summarize a dataset, opened with these settings of its store.

    Raises `ShardError` if it has no sample, and `RemoteError`.
    """
    dataset = open_any(shards, inspect=True, **settings)
    unread: list[ShardError] = []
    sizes, examined = dataset.part_sizes(in_rows=dataset.store.parts_in_rows, unread=unread)
    nulls, faults = _count_nulls(dataset, examined)
    media, media_faults = _media_totals(dataset)
    if unread:
        unread_text = counted(len(unread), "sample names a file that is", "samples name files that are")
        faults = [*faults, f"{unread_text} not there, of {examined} looked at: {unread[0]}"]
    shards_of_first, rows_of_first = dataset.locate(np.zeros(1, dtype=np.int64))
    shard, row = int(shards_of_first[0]), int(rows_of_first[0])
    first_parts: dict[str, int] = {}
    with contextlib.suppress(*([ShardError] if unread else [])):
        first_parts = dataset.store.sizes(shard, row)
    return Info(
        root=dataset.address,
        shards=dataset.entries,
        parts=_part_infos(sizes),
        first_key=dataset.key(shard, row),
        first_parts=first_parts,
        splits=split_counts(dataset),
        examined=examined,
        nulls=nulls,
        media=media,
        dotted=_dotted_layouts(dataset, set(sizes)) if examined == dataset.count else [],
        faults=faults + media_faults,
    )


def _dotted_layouts(dataset: Dataset, parts: set[str]) -> list[list[str]]:
    """Return the parts of samples in which every part has a dot.

    The index of all shards is searched, because other shards may have other `parts`.
    """
    sets = dataset.store.part_sets()
    return sorted(each for each in sets if parts.issuperset(each) and all("." in part for part in each))


def _media_totals(dataset: Dataset) -> tuple[dict[str, MediaTotals], list[str]]:
    """Return the totals in the table of media, and a warning if the table cannot be used."""
    try:
        table = dataset.known_media.table
        return {} if table is None else {name: MediaTotals.of(rows) for name, rows in table.by_part().items()}, []
    except ShardError as error:
        return {}, [str(error)]


def _count_nulls(dataset: Dataset, examined: int) -> tuple[dict[str, int], list[str]]:
    """Return how many examined samples have a null, by column, and warnings about skipped or missing content."""
    store = dataset.store
    nulls, without_bytes = Counter[str](), Counter[str]()
    for shard, row in dataset.spread_rows():
        for counts, columns in zip((nulls, without_bytes), store.lacking(shard, row), strict=True):
            counts.update(columns)
    faults = [text for text in [store.rejects_warning()] if text] + [
        f"the column {column!r}: {count:,} of {examined:,} rows have a path and no bytes, which is an error when they "
        f"are read; {store.fix}"
        for column, count in sorted(without_bytes.items())
    ]
    return dict(nulls), faults


def _part_infos(sizes: dict[str, NDArray[np.int64]]) -> dict[str, PartInfo]:
    """Summarize the sizes of parts by extension, the most frequent part first."""
    ranked = sorted(sizes, key=lambda extension: (-len(sizes[extension]), extension))
    return {
        extension: PartInfo(len(found), int(found.sum()), int((found == 0).sum()))
        for extension in ranked
        for found in [sizes[extension]]
    }


def split_counts(dataset: Dataset) -> dict[str, int]:
    """Count the samples of each split.

    Splits are in `.nv-meta/split.yaml` or `split.json`. Without either, the result is empty.
    """
    root, store = dataset.root, dataset.store
    if root is None:
        return {}
    counts = {entry.name: entry.samples for entry in dataset.entries}
    known = {*counts, *(() if store.found is None else store.found.index.shards.names), *(read_counts(root) or ())}
    splits = {name: read_split(root, name, known) for name in split_names(root)}
    return {
        name: sum(counts[shard] - len(split.excluded.get(shard, ())) for shard in split.shards if shard in counts)
        for name, split in splits.items()
    }
