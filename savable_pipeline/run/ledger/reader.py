"""`LedgerFiles`: the batches of a run, read from the files of all its starts.

A start is one run of the program, with a file for each rank. When a run is resumed, earlier starts' batches after the
position where it resumes no longer count, because the model that trained on them was discarded. They stay in the
files, and are read as `lost`.

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
from savable_pipeline.run.ledger import records
from savable_pipeline.stages.batch_samples import BatchSamples

EpochSlot = tuple[int, int]  # (epoch, slot)
_NEVER: EpochSlot = (1 << 62, 0)  # later than any position


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """Batch that a rank got.

    `lost`: whether the run was later resumed from before this batch. `start_number`: the index of its start, the same
    for ranks that started together. `facts`: the facts of the run at that time.
    """

    batch: records.Batch
    start: records.Start
    lost: bool
    start_number: int = 0
    facts: RunFacts = NO_FACTS

    @property
    def step(self) -> int:
        """Index of the batch among those of its rank in the epoch."""
        return self.batch.slot // self.start.world_size


@dataclass(frozen=True, slots=True)
class _LedgerFile:
    path: Path
    start: records.Start
    cut: EpochSlot  # earliest position from which a later start resumes; later batches of this file are lost
    start_number: int


class LedgerFiles:
    """The ledger in a folder.

    Raises `SavableError` if there is none, or if its files are of several runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob(f"*{records.SUFFIX}"))
        starts = [(path, start) for path in paths if (start := _start_of(path)) is not None]
        if not starts:
            raise SavableError(f"{folder}: no ledger. SavableLoader(ledger=...) writes one.")
        if len({(start.seed, start.lanes) for _, start in starts}) > 1:
            raise SavableError(f"{folder}: ledgers of several runs (other seeds or lanes). Use one folder for each.")
        groups = _grouped(starts)
        self._files = _with_cuts(groups)
        # for each start of the run, the first records of the files of its ranks
        self.starts_together = [[start for _, start in group] for group in groups]

    @property
    def starts(self) -> list[records.Start]:
        """First record of each file, in the order of time."""
        return [file.start for file in self._files]

    @cached_property
    def sources(self) -> list[records.LedgerSource]:
        """Sources of all starts, by name."""
        found = {source.tag: source for start in self.starts for source in start.sources}
        return sorted(found.values(), key=lambda source: source.name)

    def batches(self) -> Iterator[RecordedBatch]:
        """Yield all batches file by file, in the order in which each rank got them."""
        for file in self._files:
            pending: RecordedBatch | None = None
            facts = NO_FACTS
            for record in records.read_records(file.path):
                if isinstance(record, records.Facts):
                    facts = record.facts
                if isinstance(record, records.Batch):
                    last = pending and pending.batch
                    # If a batch is recorded twice in a row, the first was interrupted before the trainer got it, so
                    # only the later record counts.
                    if pending and last and (last.position, last.again) != (record.position, record.again):
                        yield pending
                    pending = RecordedBatch(record, file.start, record.position >= file.cut, file.start_number, facts)
            if pending is not None:
                yield pending

    def numbers(self) -> Iterator[tuple[records.Start, list[records.Numbers]]]:
        """Yield each file's first record and its records of counters, in order.

        Old files may have no records of counters.
        """
        for file in self._files:
            numbers = [record for record in records.read_records(file.path) if isinstance(record, records.Numbers)]
            yield file.start, numbers

    def find(self, tag: int, indices: set[int]) -> Iterator[tuple[int, RecordedBatch, int]]:
        """Yield (sample index, batch, rows as a bit mask) for these samples of a source.

        In a batch that was repeated, only its repeated rows are searched.
        """
        wanted = np.array(sorted(tag << TAG_SHIFT | index for index in indices), dtype=np.int64)
        for found in self.batches():
            samples = found.batch.samples
            for index in np.intersect1d(samples.refs[:, 0], wanted).tolist():
                if rows := _rows_with(samples, index) & (found.batch.repeated_rows or -1):
                    yield untagged(index), found, rows

    def acknowledged(self) -> Iterator[tuple[int, records.Acknowledged]]:
        """Yield the records of acknowledgements, each with the number of its start."""
        for file in self._files:
            for record in records.read_records(file.path):
                if isinstance(record, records.Acknowledged):
                    yield file.start_number, record

    def batch_at(self, epoch: int, slot: int) -> RecordedBatch:
        """Return the batch of a slot that is not lost.

        Raises `SavableError` if there is none.
        """
        for found in self.batches():
            if found.batch.position == (epoch, slot) and not found.lost:
                return found
        raise SavableError(
            f"{self.folder}: slot {slot} of epoch {epoch} is not in the ledger. `savable ledger report` "
            "shows the range."
        )

    def state_before(self, epoch: int, slot: int) -> records.LaneAt | None:
        """Return the last state of the slot's lane at or before the slot, or None.

        States of lost batches do not count.
        """
        lane = slot % self.starts[0].lanes
        last: records.LaneAt | None = None
        for file in self._files:
            for record in records.read_records(file.path):
                if isinstance(record, records.LaneAt) and record.lane == lane and record.epoch == epoch:
                    position = (epoch, record.slot)
                    if position <= (epoch, slot) and position < file.cut and (last is None or record.slot >= last.slot):
                        last = record
        return last


def _rows_with(samples: BatchSamples, index: int) -> int:
    """Return the rows that have the sample with this tagged index, as bits."""
    items = np.flatnonzero(samples.refs[:, 0] == index)
    rows = items if samples.rows is None else samples.rows[items]
    return sum(1 << row for row in set(rows.tolist()))


def _start_of(path: Path) -> records.Start | None:
    """Return the first record of a file, or None if a crash left it empty."""
    record = next(records.read_records(path), None)
    return record if isinstance(record, records.Start) else None


def _grouped(starts: list[tuple[Path, records.Start]]) -> list[list[tuple[Path, records.Start]]]:
    """Group the files of ranks that started together, in the order of time.

    Ranks that can communicate write the same number into their files. Ranks that cannot have numbers of their own. From
    the last start back, the file of such a rank is grouped with the latest files of other ranks that resumed from the
    same position.
    """
    numbered: dict[int, list[tuple[Path, records.Start]]] = {}
    for path, start in sorted(starts, key=lambda entry: (entry[1].number, entry[1].rank)):
        numbered.setdefault(start.number, []).append((path, start))
    groups: list[list[tuple[Path, records.Start]]] = []  # the latest first
    # indices of the groups of ranks that cannot communicate, by position and world size
    alone: dict[tuple[EpochSlot, int], list[int]] = {}
    earlier: dict[int, int] = {}  # by rank, the index of the first group that is before all of its starts so far
    for group in reversed(numbered.values()):
        (_, start), index = group[0], len(groups)  # a new group, unless this file fits one that exists
        if len(group) == 1:
            candidates = alone.setdefault((start.position, start.world_size), [])
            index = next((each for each in candidates if each >= earlier.get(start.rank, 0)), index)
            candidates += [index] if index == len(groups) else []
        if index == len(groups):
            groups.append([])
        groups[index] = sorted(groups[index] + group, key=_rank)
        earlier |= {other.rank: index + 1 for _, other in group}
    return groups[::-1]


def _rank(entry: tuple[Path, records.Start]) -> int:
    return entry[1].rank


def _with_cuts(groups: list[list[tuple[Path, records.Start]]]) -> list[_LedgerFile]:
    """Return the files in the order of time.

    The `cut` of each is the earliest position from which a later start resumes.
    """
    cut, files = _NEVER, []
    for start_number, group in reversed(list(enumerate(groups))):
        files += [_LedgerFile(path, start, cut, start_number) for path, start in reversed(group)]
        cut = min(cut, min(start.position for _, start in group))
    return files[::-1]
