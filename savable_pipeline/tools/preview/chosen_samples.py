"""Which samples of a dataset its pages show: drawn from all shards, or from those that match, and parted into pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import Bijection, derive_key
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.errors import SavableError

MOST_SAMPLES = 500  # of a page
_AT_ONCE = 1 << 16

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """What a user wants to see: at most `pages` pages of `samples` samples, drawn by `seed`.

    `part` and `key` are shell patterns, of the name of a part, where case does not matter, and of a key; "": any.
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
    def words(self) -> str:
        """What a sample must have; "" for nothing."""
        parts = [f"a part {self.part!r}"] * bool(self.part) + [f"a key {self.key!r}"] * bool(self.key)
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The numbers of the samples of each page, ascending; of `matching` samples, `unread` could not be asked."""

    pages: list[Numbers]
    matching: int
    unread: int = 0


def chosen_samples(dataset: Dataset, wanted: SampleChoice) -> Chosen:
    """Raises ValueError if no sample matches."""
    if not wanted.words:
        return Chosen(_paged(np.arange(dataset.count), wanted), dataset.count)
    places, unread = _matching(dataset, wanted)
    if not len(places):
        more = f"; {unread:,} could not be read" if unread else ""
        raise ValueError(f"{dataset.address}: none of {dataset.count:,} samples has {wanted.words}{more}")
    return Chosen(_paged(places, wanted), len(places), unread)


def _paged(numbers: Numbers, wanted: SampleChoice) -> list[Numbers]:
    shown = min(wanted.samples * wanted.pages, len(numbers))
    drawn = np.sort(numbers[Bijection(derive_key(wanted.seed, "preview"), len(numbers))(np.arange(shown))])
    return np.split(drawn, np.arange(wanted.samples, shown, wanted.samples))


def _matching(dataset: Dataset, wanted: SampleChoice) -> tuple[Numbers, int]:
    """The samples that match, in order, and how many could not be read: all are looked at, in the order of shards."""
    found, unread = [], 0
    for number, shard, row in _rows(dataset):
        try:
            if _matches(dataset, shard, row, wanted):
                found.append(number)
        except (SavableError, IndexError):
            unread += 1
    return np.array(found, dtype=np.int64), unread


def _rows(dataset: Dataset) -> Iterator[tuple[int, int, int]]:
    for start in range(0, dataset.count, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, dataset.count))
        shards, rows = dataset.locate(numbers)
        yield from zip(numbers.tolist(), shards.tolist(), rows.tolist(), strict=True)


def _matches(dataset: Dataset, shard: int, row: int, wanted: SampleChoice) -> bool:
    part = wanted.part.lower()
    if part and not any(fnmatchcase(name.lower(), part) for name in dataset.extensions(shard, row)):
        return False
    return not wanted.key or fnmatchcase(dataset.key(shard, row), wanted.key)
