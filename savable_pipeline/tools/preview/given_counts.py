"""`GivenCounts`: what the batches in a ledger say: sources in the course of the run, and the costs of each step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from savable_pipeline.data.dataset.sample import TAG_SHIFT
from savable_pipeline.run.ledger.reader import GivenBatch, LedgerFiles
from savable_pipeline.run.ledger.records import Start, unpack_column
from savable_pipeline.stages.batch_samples import Integers
from savable_pipeline.stages.cost import waiting_share

PIECES = 48  # of the run, in pictures


@dataclass(frozen=True, slots=True)
class Piece:
    """Batches of successive slots: samples of each source, samples of all before it, and the start they were of."""

    samples: list[int]
    before: int
    start: Start


@dataclass(frozen=True, slots=True)
class Step:
    """A step of all ranks: the costs of their batches, of which each rank waits for the largest."""

    number: int
    costs: list[int]


class GivenCounts:
    """The batches of a ledger that count, in the order of their slots. Lost ones are only counted."""

    def __init__(self, ledger: LedgerFiles) -> None:
        self.sources = ledger.sources
        self._column = {source.tag: place for place, source in enumerate(self.sources)}
        self.lost = 0
        self.by_start: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # of each start's number: given, and lost
        kept = []
        for given in ledger.batches():
            self.by_start[given.start.number][given.lost] += 1
            self.lost += given.lost
            if not given.lost:
                kept.append((given.batch.place, self._samples_of(given), given))
        kept.sort(key=lambda entry: entry[0])
        self._given = [given for *_, given in kept]
        self._samples = np.array([samples for _, samples, _ in kept], dtype=np.int64).reshape(-1, len(self.sources))

    def _samples_of(self, given: GivenBatch) -> list[int]:
        """The number of samples of each source in a batch."""
        found = [0] * len(self.sources)
        if given.batch.items:
            indices: Integers = unpack_column(given.batch.indices, given.batch.items)
            tags, counts = np.unique(indices >> TAG_SHIFT, return_counts=True)
            for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
                found[self._column[tag]] = count
        return found

    @property
    def batches(self) -> int:
        """The number of batches that count."""
        return len(self._given)

    @property
    def samples(self) -> list[int]:
        """The samples of each source."""
        found: list[int] = self._samples.sum(axis=0).tolist()
        return found

    def pieces(self) -> list[Piece]:
        """The run in at most `PIECES` pieces of about as many batches."""
        bounds = np.linspace(0, self.batches, min(PIECES, self.batches) + 1).astype(int).tolist()
        before = np.concatenate([[0], self._samples.sum(axis=1).cumsum()]).tolist()
        return [
            Piece(self._samples[begin:end].sum(axis=0).tolist(), before[begin], self._given[begin].start)
            for begin, end in pairwise(bounds)
        ]

    @cached_property
    def steps(self) -> list[Step]:
        """The steps of several ranks of which all costs are known."""
        found: dict[tuple[tuple[int, int], int, int, int], list[int]] = defaultdict(list)
        for given in self._given:
            start, batch = given.start, given.batch
            first = start.slot if batch.epoch == start.epoch else 0
            step = (batch.slot - first) // start.world_size
            found[start.place, start.world_size, batch.epoch, step].append(batch.cost)
        whole = [costs for (_, ranks, *_), costs in found.items() if len(costs) == ranks > 1 and min(costs) > 0]
        return [Step(number, costs) for number, costs in enumerate(whole)]


def waiting(steps: list[Step]) -> float:
    """The share of the ranks' time in which they wait for the slowest one, if a step takes as long as its cost."""
    return waiting_share(step.costs for step in steps)
