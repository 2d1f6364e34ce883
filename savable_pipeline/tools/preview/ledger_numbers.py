"""Numbers of a run from its ledger: batches, counters and proportions of sources."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from savable_pipeline.data.dataset.ref import TAG_SHIFT
from savable_pipeline.errors import SavableError
from savable_pipeline.run.ledger.reader import LedgerFiles, RecordedBatch
from savable_pipeline.run.ledger.records import Numbers, Start, unpack_column
from savable_pipeline.run.state.fingerprint import unpack_fingerprint
from savable_pipeline.stages.batch_samples import Integers
from savable_pipeline.stages.blending.schedule import Schedule, TargetCounts
from savable_pipeline.stages.cost import waiting_share

PIECES = 48  # number of pieces into which diagrams divide a run


@dataclass(frozen=True, slots=True)
class RunPiece:
    """Piece of a run: numbers of samples of its successive batches, by source.

    `before` is the number of samples before the piece, and `start` the start of its first batch.
    """

    samples: list[int]
    before: int
    start: Start


@dataclass(frozen=True, slots=True)
class CostStep:
    """Step of all ranks: the costs of their batches.

    All ranks wait for the one with the largest cost.
    """

    number: int
    costs: list[int]


class BatchCounts:
    """Batches of a ledger in the order of slots, without lost ones.

    A batch is lost if the run was resumed from before it. Lost batches are only counted.
    """

    def __init__(self, ledger: LedgerFiles) -> None:
        self.sources = ledger.sources
        self._column_of_tag = {source.tag: column for column, source in enumerate(self.sources)}
        self.lost = 0
        # [number of yielded batches, number of lost ones], by the number of a start
        self.yielded_and_lost: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        counted = []  # position, numbers of samples by source, and record of each batch
        for recorded in (each for each in ledger.batches() if not each.batch.again):
            self.yielded_and_lost[recorded.start.number][recorded.lost] += 1
            self.lost += recorded.lost
            if not recorded.lost:
                counted.append((recorded.batch.position, self._samples_of(recorded), recorded))
        counted.sort(key=lambda entry: entry[0])
        self._recorded = [recorded for *_, recorded in counted]
        # int64 (batches, sources)
        self._samples = np.array([samples for _, samples, _ in counted], dtype=np.int64).reshape(-1, len(self.sources))

    def _samples_of(self, recorded: RecordedBatch) -> list[int]:
        """Count the samples of each source in a batch."""
        samples = [0] * len(self.sources)
        if recorded.batch.items:
            indices: Integers = unpack_column(recorded.batch.indices, recorded.batch.items)
            tags, counts = np.unique(indices >> TAG_SHIFT, return_counts=True)
            for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
                samples[self._column_of_tag[tag]] = count
        return samples

    @property
    def batches(self) -> int:
        """The number of batches, without lost ones."""
        return len(self._recorded)

    @property
    def samples(self) -> list[int]:
        """The number of samples of each source."""
        return [int(total) for total in self._samples.sum(axis=0)]

    def pieces(self) -> list[RunPiece]:
        """Return the run in at most `PIECES` pieces with about equally many batches."""
        bounds = np.linspace(0, self.batches, min(PIECES, self.batches) + 1).astype(int).tolist()
        before = np.concatenate([[0], self._samples.sum(axis=1).cumsum()]).tolist()
        return [
            RunPiece(self._samples[begin:end].sum(axis=0).tolist(), before[begin], self._recorded[begin].start)
            for begin, end in pairwise(bounds)
        ]

    @cached_property
    def steps(self) -> list[CostStep]:
        """The steps of several ranks whose costs are all known."""
        # by position of the start, number of ranks, epoch, and step since the start or in the epoch
        costs_by_step: dict[tuple[tuple[int, int], int, int, int], list[int]] = defaultdict(list)
        for recorded in self._recorded:
            start, batch = recorded.start, recorded.batch
            first_slot = start.slot if batch.epoch == start.epoch else 0
            step = (batch.slot - first_slot) // start.world_size
            costs_by_step[start.position, start.world_size, batch.epoch, step].append(batch.cost)
        full = [costs for (_, ranks, *_), costs in costs_by_step.items() if len(costs) == ranks > 1 and min(costs) > 0]
        return [CostStep(number, costs) for number, costs in enumerate(full)]


def waiting_fraction(steps: list[CostStep]) -> float:
    """Return the fraction of time in which ranks wait for the slowest one.

    A step is assumed to take as long as its cost.
    """
    return waiting_share(step.costs for step in steps)


_NS_PER_S = 1e9
_UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
TimeSeries = list[tuple[float, float]]  # time and value


class CounterTotals:
    """How much the counters of a run have increased.

    The increases of all files of its ledger are summed.

    Counters do not restart if a loader starts again in the same process, so only differences within a file count.
    """

    def __init__(self, ledger: LedgerFiles) -> None:
        self.totals: Counter[str] = Counter()  # totals of counters over all ranks
        self.last: dict[str, float] = {}  # last values of gauges such as percentiles, the largest of all files
        self.names: dict[str, str] = {}  # names of the samples that numbers in `last` are about, such as the slowest
        self.seconds = 0.0  # rank-seconds
        self.worker_seconds = 0.0  # worker-seconds of all ranks
        self.worker_work_s = 0.0  # worker-seconds in which batches were built
        self._spans: list[tuple[int, Numbers, Numbers]] = []  # rank, and two successive records
        self.cores = min((start.cores for start in ledger.starts), default=0)  # CPU cores of a machine; 0: unknown
        for start, records in ledger.numbers():
            self._spans += [(start.rank, first, second) for first, second in pairwise(records)]
            if len(records) > 1:
                self._add_interval(records[0], records[-1])

    def _add_interval(self, first: Numbers, last: Numbers) -> None:
        """Add the differences between two records of a file to the totals."""
        seconds = (last.at_ns - first.at_ns) / _NS_PER_S
        self.seconds += seconds
        if workers := last.numbers.get("num_workers", 0):
            self.worker_seconds += seconds * workers
            self.worker_work_s += last.numbers["work_s"] - first.numbers["work_s"]
        for name, number in last.numbers.items():
            self.totals[name] += number - first.numbers.get(name, 0)  # type: ignore[assignment]
            if number >= self.last.get(name, 0):
                self.last[name] = number
                if name in last.names:
                    self.names[name] = last.names[name]

    def of_stages(self, prefix: str) -> dict[str, float]:
        """Return the totals whose names start with `prefix`, the largest first.

        Their keys are the rest of the name.
        """
        totals = {name[len(prefix) :]: total for name, total in self.totals.items() if name.startswith(prefix)}
        return dict(sorted(totals.items(), key=lambda name_and_total: -name_and_total[1]))

    def waits(self) -> tuple[TimeSeries, TimeSeries]:
        """Return two series of the fraction of time in which trainers waited.

        Their x-axis is the time in `unit`.

        The first is the mean of all ranks, the second the rank that waited most.
        """
        mean, worst = [], []
        for end, spans in self._pieces():
            waited_s, passed_s = defaultdict[int, float](float), defaultdict[int, float](float)
            for rank, first, second in spans:
                waited_s[rank] += second.numbers["wait_s"] - first.numbers["wait_s"]
                passed_s[rank] += (second.at_ns - first.at_ns) / _NS_PER_S
            shares = [min(1.0, waited_s[rank] / max(passed_s[rank], 1e-9)) for rank in passed_s]
            mean.append((end, sum(shares) / len(shares)))
            worst.append((end, max(shares)))
        return mean, worst

    def packing_efficiencies(self) -> TimeSeries:
        """Return the series of the packing efficiency over the time in `unit`."""
        points = []
        for end, spans in self._pieces():
            tokens = sum(_increase(span, "OnlinePacker/tokens") for span in spans)
            unused = sum(_increase(span, "OnlinePacker/room") for span in spans)
            if tokens + unused:
                points.append((end, tokens / (tokens + unused)))
        return points

    @property
    def unit(self) -> str:
        """The unit of the time since the first start."""
        _, length_ns = self._period
        return next((unit for unit, seconds in _UNITS.items() if length_ns / _NS_PER_S >= 2 * seconds), "seconds")

    @property
    def _period(self) -> tuple[int, int]:
        """The time of the first record, and the time from it to the last record, in ns."""
        begin_ns = min((first.at_ns for _, first, _ in self._spans), default=0)
        return begin_ns, max(1, max((second.at_ns for *_, second in self._spans), default=0) - begin_ns)

    def _pieces(self) -> list[tuple[float, list[tuple[int, Numbers, Numbers]]]]:
        """Group the pairs of records into at most `PIECES` intervals, each with its end in `unit`."""
        begin_ns, length_ns = self._period
        by_piece = defaultdict(list)
        for rank, first, second in self._spans:
            by_piece[min(PIECES - 1, (second.at_ns - begin_ns) * PIECES // length_ns)].append((rank, first, second))
        length = length_ns / _NS_PER_S / _UNITS[self.unit]
        return [((piece + 1) * length / PIECES, by_piece[piece]) for piece in sorted(by_piece)]


def _increase(span: tuple[int, Numbers, Numbers], name: str) -> float:
    """Return by how much a counter increased between the two records of a span."""
    _, first, second = span
    return second.numbers.get(name, 0) - first.numbers.get(name, 0)


class ExpectedShares:
    """Proportions of sources that the settings of one start prescribe.

    `by` says what the proportions are of, "samples" or "tokens". It is "" without a `Blend`, or if the settings cannot
    be read.
    """

    def __init__(self, start: Start) -> None:
        try:
            fields: dict[str, Any] = unpack_fingerprint(start.fingerprint).fields
        except SavableError:
            fields = {}
        self.by = str(fields.get("Blend.by", ""))
        self._weights: dict[str, int] = fields.get("weights", {})
        schedule = fields.get("Blend.schedule")
        self.schedule = None if schedule is None else Schedule(**schedule)
        self.names = list(self._weights) or sorted(self.schedule.names if self.schedule else ())

    def of(self, begin: int, end: int) -> list[float]:
        """Return the fraction of each of `names` among draws `begin` to `end` of the run."""
        if self.schedule is None:
            return [weight / sum(self._weights.values()) for weight in self._weights.values()]
        targets = TargetCounts(self.schedule, self.names)
        draws = max(1, end - begin)
        counts = zip(targets.at(begin), targets.at(begin + draws), strict=True)
        return [(after - before) / (draws * targets.unit) for before, after in counts]


def sum_by_name(names: Sequence[str], sources: Sequence[str], numbers: Sequence[float]) -> list[float]:
    """Sum numbers of sources for each of `names`.

    "text" is the sum of "text" and "text/web".
    """
    return [
        sum(number for source, number in zip(sources, numbers, strict=True) if f"{source}/".startswith(f"{name}/"))
        for name in names
    ]
