"""Pages of a dataset: its numbers, and samples drawn from all shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import Bijection, derive_key
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.info import split_counts
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, VIDEO_PARTS, part_type
from savable_pipeline.data.shards.paths import Shards, is_remote
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.tools.preview.page import PAGE_BYTES, Budget, Card, first_line, render
from savable_pipeline.tools.preview.sample_entries import part_entry, sample_card

MOST_SAMPLES = 500  # per page
_LOCATED_AT_ONCE = 1 << 16  # samples that are located at a time

SampleIndices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """Settings that choose the samples of a preview, drawn by `seed`.

    At most `pages` pages are chosen, each of `samples` samples.

    `part` and `key` are shell patterns. A chosen sample has a part whose name matches, without regard to case, and its
    key matches. "" matches all.
    """

    samples: int
    pages: int = 1
    seed: int = 0
    part: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ValueError(
                f"a page shows 1 to {MOST_SAMPLES} samples, not {self.samples}; --pages writes several pages"
            )
        if self.pages < 1:
            raise ValueError(f"the number of pages is at least 1, not {self.pages}")

    @property
    def conditions(self) -> str:
        """The conditions for a sample, in words; "" without conditions."""
        part = f"a part {self.part!r}" if self.part else ""
        return " and ".join(filter(None, [part, f"a key {self.key!r}" if self.key else ""]))


@dataclass(frozen=True, slots=True)
class ChosenSamples:
    """Chosen samples: their indices in ascending order, by page.

    `matching` is the number of samples that match, and `unread` the number that could not be read.
    """

    pages: list[SampleIndices]
    matching: int
    unread: int = 0


def choose_samples(dataset: Dataset, choice: SampleChoice) -> ChosenSamples:
    """Draw the samples of each page. Raises ValueError if no sample matches."""
    if not choice.conditions:
        return ChosenSamples(_draw_pages(np.arange(dataset.count), choice), dataset.count)
    matching, unread = _find_matching(dataset, choice)
    if not len(matching):
        more = f"; {unread:,} could not be read" if unread else ""
        raise ValueError(f"{dataset.address}: none of {dataset.count:,} samples has {choice.conditions}{more}")
    return ChosenSamples(_draw_pages(matching, choice), len(matching), unread)


def _draw_pages(indices: SampleIndices, choice: SampleChoice) -> list[SampleIndices]:
    """Draw samples at random, and divide them among pages in the order of the dataset."""
    count = min(choice.samples * choice.pages, len(indices))
    drawn = np.sort(indices[Bijection(derive_key(choice.seed, "preview"), len(indices))(np.arange(count))])
    return np.split(drawn, np.arange(choice.samples, count, choice.samples))


def _find_matching(dataset: Dataset, choice: SampleChoice) -> tuple[SampleIndices, int]:
    """Return the samples that match, in order, and how many could not be read."""
    matching, unread = [], 0
    for index, shard, row in _located_samples(dataset):
        try:
            if _matches(dataset, shard, row, choice):
                matching.append(index)
        except (SavableError, IndexError):
            unread += 1
    return np.array(matching, dtype=np.int64), unread


def _located_samples(dataset: Dataset) -> Iterator[tuple[int, int, int]]:
    """Yield each sample's index in the dataset, its shard's number, and its row in the shard."""
    for start in range(0, dataset.count, _LOCATED_AT_ONCE):
        indices = np.arange(start, min(start + _LOCATED_AT_ONCE, dataset.count))
        shards, rows = dataset.locate(indices)
        yield from zip(indices.tolist(), shards.tolist(), rows.tolist(), strict=True)


def _matches(dataset: Dataset, shard: int, row: int, choice: SampleChoice) -> bool:
    """Return whether a sample has a part and a key that match the choice's patterns."""
    pattern = choice.part.lower()
    if pattern and not any(fnmatchcase(name.lower(), pattern) for name in dataset.extensions(shard, row)):
        return False
    return not choice.key or fnmatchcase(dataset.key(shard, row), choice.key)


_BINS = 24  # bins of a histogram
_MOST_PARTS = 40  # rows of the table of parts
_MOST_FAULTS = 50  # damaged shards in the list


@dataclass(frozen=True, slots=True)
class _PartRow:
    """Row of the table of parts: the number of samples, sizes in bytes, and a histogram in percent of its peak."""

    extension: str
    samples: int
    total: int
    least: int
    median: int
    greatest: int
    bars: Sequence[int]


def preview_dataset(shards: Shards, *, samples: int = 24, seed: int = 0, part: str = "", key: str = "") -> bytes:
    """Return the content, UTF-8, of the first page of `dataset_pages`.

    It has `samples` samples, or all if there are fewer.
    """
    return next(dataset_pages(shards, SampleChoice(samples, pages=1, seed=seed, part=part, key=key)))[1]  # the content


def dataset_pages(
    shards: Shards, choice: SampleChoice, name: str = "preview.html", **settings: Any
) -> Iterator[tuple[str, bytes]]:
    """Yield the file name and content, UTF-8, of each page.

    The pages "preview.html", "preview-2.html", … are linked to each other.

    Samples are in the order of the dataset. The first page also has the numbers of the dataset. Damaged samples are
    shown with their error. `settings` are those of the store. Raises `ShardError` if there is no sample, and ValueError
    if none matches.
    """
    dataset = open_any(shards, on_error="skip", **settings)
    chosen = choose_samples(dataset, choice)
    names = [name, *(f"{Path(name).stem}-{page}{Path(name).suffix}" for page in range(2, len(chosen.pages) + 1))]
    values_of_all_pages = {
        "title": dataset.address.rpartition("/")[2],
        "root": dataset.address,
        "samples": dataset.count,
        "wanted": choice.conditions,
        "shown": sum(map(len, chosen.pages)),
        "chosen": chosen,
        "names": [quote(each) for each in names],
    }
    for page, indices in enumerate(chosen.pages):
        statistics = _statistics(dataset) if page == 0 else {}
        broken, read_count = np.zeros(0, np.int64), 0
        if page == 0 and not choice.conditions and not is_remote(dataset.address):
            broken, read_count = _find_unreadable(dataset, choice.seed)
        broken_not_chosen = np.setdiff1d(broken, np.concatenate(chosen.pages))[:_MOST_BROKEN]
        shown = np.sort(np.concatenate([indices, broken_not_chosen]))
        values = {"broken": len(broken), "read": read_count, "cards": _cards(dataset, shown), "page": page}
        yield names[page], render("dataset.html.jinja", **values_of_all_pages, **statistics, **values)


_SLOW_PARTS = (*AUDIO_PARTS, *VIDEO_PARTS)
_MOST_READ = 500  # most samples that are read to find damaged ones
_MOST_BROKEN = 12  # damaged samples that are shown in addition to the chosen ones


def _find_unreadable(dataset: Dataset, seed: int) -> tuple[SampleIndices, int]:
    """Return some samples with a part that cannot be shown, ascending, and how many samples were read to find them."""
    order = Bijection(derive_key(seed, "unreadable"), dataset.count)
    indices = np.sort(order(np.arange(min(_MOST_READ, dataset.count))))
    samples = zip(indices.tolist(), _open_samples(dataset, indices), strict=True)
    return np.array([index for index, sample in samples if _is_broken(sample)], np.int64), len(indices)


def _is_broken(sample: Sample) -> bool:
    """Return whether a part of a sample cannot be shown.

    Audio and video are not checked, because that would take long.
    """
    budget = Budget(0)
    try:
        return any(part_entry(sample, part, budget).fault for part in sample if part_type(part) not in _SLOW_PARTS)
    except (SavableError, ValueError, OSError, IndexError):
        return True


def _open_samples(dataset: Dataset, indices: SampleIndices) -> list[Sample]:
    """Open samples by their indices."""
    refs = np.zeros(len(indices), dtype=REF)
    refs["index"] = indices
    return dataset.open_samples(refs)


def _cards(dataset: Dataset, indices: SampleIndices) -> list[Card]:
    """Return the cards of these samples, those with an error first."""
    samples = zip(_open_samples(dataset, indices), indices.tolist(), strict=True)
    cards = [sample_card(sample, index, Budget(PAGE_BYTES // len(indices))) for sample, index in samples]
    return sorted(cards, key=lambda card: not card.faulty)


def _statistics(dataset: Dataset) -> dict[str, Any]:
    """Return the sizes, splits, parts and damaged shards of a dataset, as values of the template."""
    faults = [(name, fault.removeprefix(f"{name}: ")) for name, fault in dataset.faults]
    sizes, counts = dataset.entries.sizes, dataset.entries.samples
    part_sizes = sorted(_part_sizes(dataset).items(), key=lambda entry: (-len(entry[1]), entry[0]))
    rows = [_part_row(extension, sizes_of_part) for extension, sizes_of_part in part_sizes]
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
    """Return by split a text like "8,000 samples", or the error as "not readable"."""
    try:
        return {name: f"{count:,} samples" for name, count in split_counts(dataset).items()}
    except ShardError as error:
        return {"not readable": first_line(error)}


def _part_sizes(dataset: Dataset) -> dict[str, NDArray[np.int64]]:
    """Return the sizes of parts by extension, or {} if one of the examined samples is damaged."""
    try:
        return dataset.part_sizes()[0]
    except ShardError:
        return {}


def _part_row(extension: str, sizes: NDArray[np.int64]) -> _PartRow:
    """Return the row of a part. Bins of its histogram have equal widths in the logarithm of the size."""
    least, greatest = int(sizes.min()), int(sizes.max())
    counts, _ = np.histogram(np.log1p(sizes), bins=_BINS) if greatest > least else (np.zeros(0, dtype=np.int64), None)
    bars = [-(-100 * int(count) // int(counts.max())) for count in counts]
    return _PartRow(extension, len(sizes), int(sizes.sum()), least, int(np.median(sizes)), greatest, bars)
