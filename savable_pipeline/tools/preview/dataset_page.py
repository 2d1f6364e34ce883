"""The page of a dataset: its numbers, and samples drawn from all of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import Bijection, derive_key
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.info import split_counts
from savable_pipeline.data.dataset.kinds import open_any
from savable_pipeline.data.dataset.sample import REF
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.preview.page import first_line, render
from savable_pipeline.tools.preview.sample_entries import sample_card

MOST_SAMPLES = 500
_BINS = 24
_MOST_PARTS = 40  # rows of the table of parts
_MOST_FAULTS = 50  # damaged shards in the list


@dataclass(frozen=True, slots=True)
class _PartRow:
    """An extension: how many samples have it, its sizes in bytes, and their histogram in percent of its peak."""

    extension: str
    samples: int
    total: int
    least: int
    median: int
    greatest: int
    bars: Sequence[int]


def preview_dataset(shards: Shards, *, samples: int = 24, seed: int = 0) -> bytes:
    """A page with `samples` samples, or all if there are fewer, drawn over all shards by `seed`; UTF-8.

    Damaged samples are shown with their fault. Raises ValueError for a wrong number, `ShardError` for no sample.
    """
    if not 1 <= samples <= MOST_SAMPLES:
        raise ValueError(f"a page shows 1 to {MOST_SAMPLES} samples, not {samples}")
    dataset = open_any(shards, on_error="skip")
    numbers = np.sort(Bijection(derive_key(seed, "preview"), dataset.count)(np.arange(min(samples, dataset.count))))
    refs = np.zeros(len(numbers), dtype=REF)
    refs["index"] = numbers
    drawn = zip(dataset.open_samples(refs), numbers.tolist(), strict=True)
    splits, faults = _splits(dataset), [(name, fault.removeprefix(f"{name}: ")) for name, fault in dataset.faults]
    sizes = [entry.size for entry in dataset.entries]
    rows = _part_rows(_sizes(dataset))
    return render(
        "dataset.html.jinja",
        title=dataset.address.rpartition("/")[2],
        root=dataset.address,
        shards=len(dataset.entries),
        samples=dataset.count,
        size=sum(sizes),
        shard_sizes=(min(sizes), max(sizes)),
        shard_samples=(min(e.samples for e in dataset.entries), max(e.samples for e in dataset.entries)),
        splits=splits,
        parts=rows[:_MOST_PARTS],
        more_parts=len(rows) - _MOST_PARTS,
        faults=faults[:_MOST_FAULTS],
        more_faults=len(faults) - _MOST_FAULTS,
        cards=[sample_card(sample, number) for sample, number in drawn],
    )


def _splits(dataset: Dataset) -> dict[str, str]:
    """The number of samples of each split, in words; or the fault of the file of splits."""
    try:
        return {name: f"{count:,} samples" for name, count in split_counts(dataset.root, dataset.entries).items()}
    except ShardError as error:
        return {"not readable": first_line(error)}


def _sizes(dataset: Dataset) -> dict[str, NDArray[np.int64]]:
    """The sizes of parts; none where a sample that is looked at is damaged."""
    try:
        return dataset.part_sizes()[0]
    except ShardError:
        return {}


def _part_rows(sizes: dict[str, NDArray[np.int64]]) -> list[_PartRow]:
    ranked = sorted(sizes, key=lambda extension: (-len(sizes[extension]), extension))
    return [_part_row(extension, sizes[extension]) for extension in ranked]


def _part_row(extension: str, sizes: NDArray[np.int64]) -> _PartRow:
    """Bins have equal width in the logarithm of the size, from the least to the greatest."""
    least, greatest = int(sizes.min()), int(sizes.max())
    counts, _ = np.histogram(np.log1p(sizes), bins=_BINS) if greatest > least else (np.zeros(0, dtype=np.int64), None)
    bars = [-(-100 * int(count) // int(counts.max())) for count in counts]
    return _PartRow(extension, len(sizes), int(sizes.sum()), least, int(np.median(sizes)), greatest, bars)
