"""The page of a dataset: what it holds in numbers, and samples drawn from all of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.dataset import Dataset
from savable_pipeline.errors import ShardError
from savable_pipeline.info import split_counts
from savable_pipeline.keys import Bijection, key
from savable_pipeline.preview.page import render
from savable_pipeline.preview.parts import sample_card
from savable_pipeline.preview.shown import first_line
from savable_pipeline.remote_dataset import open_dataset
from savable_pipeline.sample import REF
from savable_pipeline.shard_paths import Shards

MOST_SAMPLES = 500
_BINS = 24
_MOST_PARTS = 40  # kinds of parts told in the table
_MOST_FAULTS = 50  # damaged shards told one by one


@dataclass(frozen=True, slots=True)
class _PartRow:
    """A kind of part: in how many samples, its sizes in bytes, and a histogram of them, in percent of its peak."""

    extension: str
    samples: int
    total: int
    least: int
    median: int
    greatest: int
    bars: Sequence[int]


def preview_dataset(shards: Shards, *, samples: int = 24, seed: int = 0) -> bytes:
    """A page with `samples` samples, or all if there are fewer, drawn over all shards by `seed`; UTF-8.

    What is damaged is shown as such. Raises ValueError for a wrong number, `ShardError` if there is no sample at all.
    """
    if not 1 <= samples <= MOST_SAMPLES:
        raise ValueError(f"a page shows 1 to {MOST_SAMPLES} samples, not {samples}")
    dataset = open_dataset(shards, on_error="skip")
    numbers = np.sort(Bijection(key(seed, "preview"), dataset.count)(np.arange(min(samples, dataset.count))))
    refs = np.zeros(len(numbers), dtype=REF)
    refs["index"] = numbers
    drawn = zip(dataset.samples(refs), numbers.tolist(), strict=True)
    splits, faults = _splits(dataset), [(name, fault.removeprefix(f"{name}: ")) for name, fault in dataset.faults]
    sizes = [entry.size for entry in dataset.entries]
    rows = _part_rows(dataset.part_sizes())
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
    """Samples of each split, in words; what is wrong with the file of the splits, if it is."""
    try:
        return {name: f"{count:,} samples" for name, count in split_counts(dataset.root, dataset.entries).items()}
    except ShardError as error:
        return {"not readable": first_line(error)}


def _part_rows(sizes: dict[str, NDArray[np.int64]]) -> list[_PartRow]:
    ranked = sorted(sizes, key=lambda extension: (-len(sizes[extension]), extension))
    return [_part_row(extension, sizes[extension]) for extension in ranked]


def _part_row(extension: str, sizes: NDArray[np.int64]) -> _PartRow:
    """Bins have equal width in the logarithm of the size, from the least to the greatest."""
    least, greatest = int(sizes.min()), int(sizes.max())
    counts, _ = np.histogram(np.log1p(sizes), bins=_BINS) if greatest > least else (np.zeros(0, dtype=np.int64), None)
    bars = [-(-100 * int(count) // int(counts.max())) for count in counts]
    return _PartRow(extension, len(sizes), int(sizes.sum()), least, int(np.median(sizes)), greatest, bars)
