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
from savable_pipeline.tools.preview.page import PAGE_BYTES, Card, Room, first_line, render
from savable_pipeline.tools.preview.sample_entries import part_entry, sample_card

MOST_SAMPLES = 500  # per page
_AT_ONCE = 1 << 16  # samples that are located at a time

SampleNumbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """Choice of samples: at most `pages` pages of `samples` samples, drawn by `seed`.

    `part` and `key` are shell patterns that the name of a part (without regard to case) and the key must match. "":
    any.
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
        """The conditions for a sample, in words; "" without conditions."""
        parts = [f"a part {self.part!r}"] * bool(self.part) + [f"a key {self.key!r}"] * bool(self.key)
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Chosen samples: their indices in ascending order, by page.

    `matching` is the number of samples that match, and `unread` the number that could not be read.
    """

    pages: list[SampleNumbers]
    matching: int
    unread: int = 0


def chosen_samples(dataset: Dataset, choice: SampleChoice) -> Chosen:
    """Draw the samples of each page. Raises ValueError if no sample matches."""
    if not choice.words:
        return Chosen(_draw_pages(np.arange(dataset.count), choice), dataset.count)
    matching, unread = _find_matching(dataset, choice)
    if not len(matching):
        more = f"; {unread:,} could not be read" if unread else ""
        raise ValueError(f"{dataset.address}: none of {dataset.count:,} samples has {choice.words}{more}")
    return Chosen(_draw_pages(matching, choice), len(matching), unread)


def _draw_pages(numbers: SampleNumbers, choice: SampleChoice) -> list[SampleNumbers]:
    """Draw samples at random, and divide them among pages in the order of the dataset."""
    shown = min(choice.samples * choice.pages, len(numbers))
    drawn = np.sort(numbers[Bijection(derive_key(choice.seed, "preview"), len(numbers))(np.arange(shown))])
    return np.split(drawn, np.arange(choice.samples, shown, choice.samples))


def _find_matching(dataset: Dataset, choice: SampleChoice) -> tuple[SampleNumbers, int]:
    """Return the samples that match, in order, and how many could not be read."""
    found, unread = [], 0
    for number, shard, row in _rows(dataset):
        try:
            if _matches(dataset, shard, row, choice):
                found.append(number)
        except (SavableError, IndexError):
            unread += 1
    return np.array(found, dtype=np.int64), unread


def _rows(dataset: Dataset) -> Iterator[tuple[int, int, int]]:
    """Yield index, shard and row of each sample."""
    for start in range(0, dataset.count, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, dataset.count))
        shards, rows = dataset.locate(numbers)
        yield from zip(numbers.tolist(), shards.tolist(), rows.tolist(), strict=True)


def _matches(dataset: Dataset, shard: int, row: int, choice: SampleChoice) -> bool:
    """Return whether a sample has the part and the key that the user chose."""
    part = choice.part.lower()
    if part and not any(fnmatchcase(name.lower(), part) for name in dataset.extensions(shard, row)):
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
    """Return the first of `dataset_pages` as UTF-8.

    It has `samples` samples, or all if there are fewer.
    """
    return next(dataset_pages(shards, SampleChoice(samples, 1, seed, part, key)))[1]


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
    chosen = chosen_samples(dataset, choice)
    names = [name, *(f"{Path(name).stem}-{page}{Path(name).suffix}" for page in range(2, len(chosen.pages) + 1))]
    about = {
        "title": dataset.address.rpartition("/")[2],
        "root": dataset.address,
        "samples": dataset.count,
        "wanted": choice.words,
        "shown": sum(map(len, chosen.pages)),
        "chosen": chosen,
        "names": [quote(each) for each in names],
    }
    for page, numbers in enumerate(chosen.pages):
        dataset_numbers = _numbers(dataset) if page == 0 else {}
        broken, read = np.zeros(0, np.int64), 0
        if page == 0 and not choice.words and not is_remote(dataset.address):
            broken, read = _unreadable(dataset, choice.seed)
        others = np.setdiff1d(broken, np.concatenate(chosen.pages))[:_MOST_BROKEN]
        shown = np.sort(np.concatenate([numbers, others]))
        found = {"broken": len(broken), "read": read, "cards": _cards(dataset, shown)}
        yield names[page], render("dataset.html.jinja", **about, **dataset_numbers, **found, page=page)


_SLOW_PARTS = (*AUDIO_PARTS, *VIDEO_PARTS)
_MOST_READ = 500  # most samples that are read to find damaged ones
_MOST_BROKEN = 12  # damaged samples that are shown in addition to the chosen ones


def _unreadable(dataset: Dataset, seed: int) -> tuple[SampleNumbers, int]:
    """Return some samples with a part that cannot be shown, ascending, and how many samples were read to find them."""
    order = Bijection(derive_key(seed, "unreadable"), dataset.count)
    numbers = np.sort(order(np.arange(min(_MOST_READ, dataset.count))))
    samples = zip(numbers.tolist(), _open_samples(dataset, numbers), strict=True)
    return np.array([number for number, sample in samples if _is_broken(sample)], np.int64), len(numbers)


def _is_broken(sample: Sample) -> bool:
    """Return whether a part cannot be shown.

    Audio and video, which take long, are not checked.
    """
    room = Room(0)
    try:
        return any(part_entry(sample, part, room).fault for part in sample if part_type(part) not in _SLOW_PARTS)
    except (SavableError, ValueError, OSError, IndexError):
        return True


def _open_samples(dataset: Dataset, numbers: SampleNumbers) -> list[Sample]:
    """Open samples by their indices."""
    refs = np.zeros(len(numbers), dtype=REF)
    refs["index"] = numbers
    return dataset.open_samples(refs)


def _cards(dataset: Dataset, numbers: SampleNumbers) -> list[Card]:
    """Return the cards of these samples, those with an error first."""
    drawn = zip(_open_samples(dataset, numbers), numbers.tolist(), strict=True)
    cards = [sample_card(sample, number, Room(PAGE_BYTES // len(numbers))) for sample, number in drawn]
    return sorted(cards, key=lambda card: not card.faulty)


def _numbers(dataset: Dataset) -> dict[str, Any]:
    """Return the numbers of a dataset for its page."""
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
    """Return the number of samples of each split, in words, or an error."""
    try:
        return {name: f"{count:,} samples" for name, count in split_counts(dataset).items()}
    except ShardError as error:
        return {"not readable": first_line(error)}


def _sizes(dataset: Dataset) -> dict[str, NDArray[np.int64]]:
    """Return the sizes of parts; none if a sample that is read is damaged."""
    try:
        return dataset.part_sizes()[0]
    except ShardError:
        return {}


def _part_rows(sizes: dict[str, NDArray[np.int64]]) -> list[_PartRow]:
    ranked = sorted(sizes, key=lambda extension: (-len(sizes[extension]), extension))
    return [_part_row(extension, sizes[extension]) for extension in ranked]


def _part_row(extension: str, sizes: NDArray[np.int64]) -> _PartRow:
    """Return the row of a part. Bins of its histogram have equal widths in the logarithm of the size."""
    least, greatest = int(sizes.min()), int(sizes.max())
    counts, _ = np.histogram(np.log1p(sizes), bins=_BINS) if greatest > least else (np.zeros(0, dtype=np.int64), None)
    bars = [-(-100 * int(count) // int(counts.max())) for count in counts]
    return _PartRow(extension, len(sizes), int(sizes.sum()), least, int(np.median(sizes)), greatest, bars)
