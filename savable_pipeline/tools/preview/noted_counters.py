"""`NotedCounters`: what the counters say that each rank noted in a ledger: totals, and their course over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.run.ledger.records import Numbers
from savable_pipeline.tools.preview.given_counts import PIECES

_NS = 1e9
_UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
Course = list[tuple[float, float]]


class NotedCounters:
    """Sums of differences within each file, since counters go on from start to start in one process."""

    def __init__(self, ledger: LedgerFiles) -> None:
        self.totals: Counter[str] = Counter()  # of counters, over all ranks
        self.last: dict[str, float] = {}  # the largest that any file ends with, as of percentiles
        self.names: dict[str, str] = {}  # of the numbers in `last` that have one
        self.seconds = 0.0  # of all ranks together
        self.worker_seconds = 0.0  # the same, for each of their workers
        self.worker_work_s = 0.0  # of those, the time in which they made batches
        self._spans: list[tuple[int, Numbers, Numbers]] = []  # rank, and two records one after the other
        for start, records in ledger.numbers():
            self._spans += [(start.rank, first, second) for first, second in pairwise(records)]
            if len(records) > 1:
                self._sum(records[0], records[-1])

    def _sum(self, first: Numbers, last: Numbers) -> None:
        seconds = (last.at_ns - first.at_ns) / _NS
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

    def of_stages(self, before: str) -> dict[str, float]:
        """The totals whose names begin so, by the rest of the name, the largest first."""
        found = {name[len(before) :]: total for name, total in self.totals.items() if name.startswith(before)}
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def waits(self) -> tuple[Course, Course]:
        """The share of the time in which trainers waited, by the time in `unit`: the mean, the worst rank."""
        mean, worst = [], []
        for at, spans in self._pieces():
            by_rank: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for rank, first, second in spans:
                by_rank[rank][0] += second.numbers["wait_s"] - first.numbers["wait_s"]
                by_rank[rank][1] += (second.at_ns - first.at_ns) / _NS
            shares = [min(1.0, waited / max(passed, 1e-9)) for waited, passed in by_rank.values()]
            mean.append((at, sum(shares) / len(shares)))
            worst.append((at, max(shares)))
        return mean, worst

    def fills(self) -> Course:
        """The share of the packs that holds tokens, by the time in `unit`."""
        found = []
        for at, spans in self._pieces():
            tokens, room = (sum(_grown(span, f"OnlinePacker/{name}") for span in spans) for name in ("tokens", "room"))
            if tokens + room:
                found.append((at, tokens / (tokens + room)))
        return found

    @property
    def unit(self) -> str:
        """The unit of times since the first start, which is at 0."""
        length = self._period[1] / _NS
        return next((unit for unit, seconds in _UNITS.items() if length >= 2 * seconds), "seconds")

    @property
    def _period(self) -> tuple[int, int]:
        """When the first record was made, and how much later the last one, in ns."""
        begin = min((first.at_ns for _, first, _ in self._spans), default=0)
        return begin, max(1, max((second.at_ns for *_, second in self._spans), default=0) - begin)

    def _pieces(self) -> list[tuple[float, list[tuple[int, Numbers, Numbers]]]]:
        """The pairs of records in at most `PIECES` pieces of the time, with the end of each piece in `unit`."""
        begin, length = self._period
        found = defaultdict(list)
        for span in self._spans:
            found[min(PIECES - 1, (span[2].at_ns - begin) * PIECES // length)].append(span)
        whole = length / _NS / _UNITS[self.unit]
        return [((piece + 1) * whole / PIECES, found[piece]) for piece in sorted(found)]


def _grown(span: tuple[int, Numbers, Numbers], name: str) -> float:
    _, first, second = span
    return second.numbers.get(name, 0) - first.numbers.get(name, 0)
