"""`LedgerFiles`: what a run was given, read from the files of all its starts.

A resumed run begins new files, and batches given after the place where it resumes no longer count: they went to a
model that was thrown away. They are kept in the files, and marked here as `lost`.

    start 1    slots 0 ─────────────▶ 950, killed
    start 2           from 800 ────────────────────▶          slots 800 to 949 of start 1 are lost
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.data.dataset.ref import TAG_SHIFT, untagged
from savable_pipeline.errors import SavableError
from savable_pipeline.run.ledger.records import (
    SUFFIX,
    Acknowledged,
    Batch,
    Facts,
    LaneAt,
    LedgerSource,
    Numbers,
    Record,
    Start,
    read_records,
)
from savable_pipeline.stages.batch_samples import BatchSamples

Place = tuple[int, int]  # epoch and slot
_NEVER: Place = (1 << 62, 0)


@dataclass(frozen=True, slots=True)
class GivenBatch:
    """A batch that was given to a rank. `lost`: the run was later resumed from a place before it.

    `began`: the number of the start among all, alike for ranks that began together. `facts`: those of the run then.
    """

    batch: Batch
    start: Start
    lost: bool
    began: int = 0
    facts: RunFacts = NO_FACTS

    @property
    def step(self) -> int:
        """The number of the batch among those of its rank in the epoch."""
        return self.batch.slot // self.start.world_size


@dataclass(frozen=True, slots=True)
class _LedgerFile:
    path: Path
    start: Start
    cut: Place  # where a later start continues
    began: int

    def records(self) -> Iterator[Record]:
        return read_records(self.path)


class LedgerFiles:
    """The ledger in a folder. Raises `SavableError` if there is none, or its files are of several runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob(f"*{SUFFIX}"))
        starts = [(path, start) for path in paths if (start := _start_of(path)) is not None]
        if not starts:
            raise SavableError(f"{folder}: no ledger. SavableLoader(ledger=...) writes one.")
        if len({(start.seed, start.lanes) for _, start in starts}) > 1:
            raise SavableError(f"{folder}: ledgers of several runs (other seeds or lanes). Use one folder for each.")
        groups = _together(starts)
        self._files = _with_cuts(groups)
        self.together = [[start for _, start in group] for group in groups]  # the starts of ranks that began together

    @property
    def starts(self) -> list[Start]:
        """The first record of each file, in the order of time."""
        return [file.start for file in self._files]

    @cached_property
    def sources(self) -> list[LedgerSource]:
        """The sources of all starts, by name."""
        found = {source.tag: source for start in self.starts for source in start.sources}
        return sorted(found.values(), key=lambda source: source.name)

    def batches(self) -> Iterator[GivenBatch]:
        """All batches in the order in which they were given by each rank, file by file."""
        for file in self._files:
            held: GivenBatch | None = None
            facts = NO_FACTS
            for record in file.records():
                if isinstance(record, Facts):
                    facts = record.facts
                if isinstance(record, Batch):
                    last = held and held.batch
                    if held and last and (last.place, last.again) != (record.place, record.again):  # else broken off
                        yield held
                    held = GivenBatch(record, file.start, record.place >= file.cut, file.began, facts)
            if held is not None:
                yield held

    def numbers(self) -> Iterator[tuple[Start, list[Numbers]]]:
        """The counters in each file, in the order of time; files of older releases have none."""
        for file in self._files:
            yield file.start, [record for record in file.records() if isinstance(record, Numbers)]

    def find(self, tag: int, indices: set[int]) -> Iterator[tuple[int, GivenBatch, int]]:
        """Each batch that one of these samples of a source was in: its index, the batch, and its rows there, as bits.

        Of a batch given again, only rows that came again.
        """
        wanted = np.array(sorted(tag << TAG_SHIFT | index for index in indices), dtype=np.int64)
        for given in self.batches():
            samples = given.batch.samples
            for index in np.intersect1d(samples.refs[:, 0], wanted).tolist():
                if rows := _rows_with(samples, index) & (given.batch.came_again or -1):
                    yield untagged(index), given, rows

    def acknowledged(self) -> Iterator[tuple[int, Acknowledged]]:
        """What was acknowledged, with the number of the start in which it was."""
        for file in self._files:
            for record in file.records():
                if isinstance(record, Acknowledged):
                    yield file.began, record

    def batch_at(self, epoch: int, slot: int) -> GivenBatch:
        """The batch of a slot that is not lost. Raises `SavableError` if there is none."""
        for given in self.batches():
            if given.batch.place == (epoch, slot) and not given.lost:
                return given
        raise SavableError(
            f"{self.folder}: slot {slot} of epoch {epoch} is not in the ledger. `savable ledger report` "
            "shows the range."
        )

    def state_before(self, epoch: int, slot: int) -> LaneAt | None:
        """The last state of the slot's lane at or before the slot that counts; None if the ledger has none."""
        lane = slot % self.starts[0].lanes
        best: LaneAt | None = None
        for file in self._files:
            for record in file.records():
                if isinstance(record, LaneAt) and record.lane == lane and record.epoch == epoch:
                    place = (epoch, record.slot)
                    if place <= (epoch, slot) and place < file.cut and (best is None or record.slot >= best.slot):
                        best = record
        return best


def _rows_with(samples: BatchSamples, index: int) -> int:
    """The rows with a sample, as bits."""
    items = np.flatnonzero(samples.refs[:, 0] == index)
    rows = items if samples.rows is None else samples.rows[items]
    return sum(1 << row for row in set(rows.tolist()))


def _start_of(path: Path) -> Start | None:
    """None for a file that a crash left empty."""
    record = next(read_records(path), None)
    return record if isinstance(record, Start) else None


def _together(starts: list[tuple[Path, Start]]) -> list[list[tuple[Path, Start]]]:
    """The starts in the order of time; those of ranks that began together are neighbours.

    Ranks that can talk write one number. Those that cannot have numbers of their own: from the last start back, each
    rank's is joined with the latest of the other ranks that continued at the same place.
    """
    numbered: dict[int, list[tuple[Path, Start]]] = {}
    for path, start in sorted(starts, key=lambda entry: (entry[1].number, entry[1].rank)):
        numbered.setdefault(start.number, []).append((path, start))
    groups: list[list[tuple[Path, Start]]] = []  # the last one first
    alone: dict[tuple[Place, int], list[int]] = {}  # those of ranks that cannot talk, by place and world size
    earlier: dict[int, int] = {}  # by rank, the first group before all of its starts so far
    for group in reversed(numbered.values()):
        start, at = group[0][1], len(groups)
        if len(group) == 1:
            alike = alone.setdefault((start.place, start.world_size), [])
            at = next((each for each in alike if each >= earlier.get(start.rank, 0)), at)
            alike += [at] if at == len(groups) else []
        if at == len(groups):
            groups.append([])
        groups[at] = sorted(groups[at] + group, key=_rank)
        earlier |= {other.rank: at + 1 for _, other in group}
    return groups[::-1]


def _rank(entry: tuple[Path, Start]) -> int:
    return entry[1].rank


def _with_cuts(groups: list[list[tuple[Path, Start]]]) -> list[_LedgerFile]:
    """The files in the order of time, each with the least place at which a later start of the run continued."""
    cut, files = _NEVER, []
    for began, group in reversed(list(enumerate(groups))):
        files += [_LedgerFile(path, start, cut, began) for path, start in reversed(group)]
        cut = min(cut, min(start.place for _, start in group))
    return files[::-1]
