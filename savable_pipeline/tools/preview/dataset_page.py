"""The pages of a dataset: its numbers, and samples drawn from all of its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.info import split_counts
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.preview.chosen_samples import Numbers, SampleChoice, chosen_samples
from savable_pipeline.tools.preview.page import Card, first_line, render
from savable_pipeline.tools.preview.room import PAGE_BYTES, Room
from savable_pipeline.tools.preview.sample_entries import sample_card

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


def preview_dataset(shards: Shards, *, samples: int = 24, seed: int = 0, part: str = "", key: str = "") -> bytes:
    """The first of `dataset_pages`, with `samples` samples, or all if there are fewer; UTF-8."""
    return next(dataset_pages(shards, SampleChoice(samples, 1, seed, part, key)))[1]


def dataset_pages(shards: Shards, wanted: SampleChoice, name: str = "preview.html") -> Iterator[tuple[str, bytes]]:
    """The file name and content, UTF-8, of each page, linked to each other: "preview.html", "preview-2.html", ….

    Samples are in the order of the dataset; the first page has its numbers, too. Damaged samples are shown with their
    fault. Raises `ShardError` for no sample, ValueError where none matches.
    """
    dataset = open_any(shards, on_error="skip")
    chosen = chosen_samples(dataset, wanted)
    names = [name, *(f"{Path(name).stem}-{page}{Path(name).suffix}" for page in range(2, len(chosen.pages) + 1))]
    about = {
        "title": dataset.address.rpartition("/")[2],
        "root": dataset.address,
        "samples": dataset.count,
        "wanted": wanted.words,
        "shown": sum(map(len, chosen.pages)),
        "chosen": chosen,
        "names": [quote(each) for each in names],
    }
    for page, numbers in enumerate(chosen.pages):
        of_dataset = _numbers(dataset) if page == 0 else {}
        yield (
            names[page],
            render("dataset.html.jinja", **about, **of_dataset, page=page, cards=_cards(dataset, numbers)),
        )


def _cards(dataset: Dataset, numbers: Numbers) -> list[Card]:
    refs = np.zeros(len(numbers), dtype=REF)
    refs["index"] = numbers
    drawn = zip(dataset.open_samples(refs), numbers.tolist(), strict=True)
    return [sample_card(sample, number, Room(PAGE_BYTES // len(numbers))) for sample, number in drawn]


def _numbers(dataset: Dataset) -> dict[str, Any]:
    faults = [(name, fault.removeprefix(f"{name}: ")) for name, fault in dataset.faults]
    sizes, counts = dataset.entries.sizes, dataset.entries.samples
    rows = _part_rows(_sizes(dataset))
    return {
        "shards": len(dataset.entries),
        "size": int(sizes.sum()),
        "shard_sizes": (int(sizes.min()), int(sizes.max())),
        "shard_samples": (int(counts.min()), int(counts.max())),
        "splits": _splits(dataset),
        "parts": rows[:_MOST_PARTS],
        "more_parts": len(rows) - _MOST_PARTS,
        "faults": faults[:_MOST_FAULTS],
        "more_faults": len(faults) - _MOST_FAULTS,
    }


def _splits(dataset: Dataset) -> dict[str, str]:
    """The number of samples of each split, in words; or the fault of the file of splits."""
    try:
        return {name: f"{count:,} samples" for name, count in split_counts(dataset).items()}
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
