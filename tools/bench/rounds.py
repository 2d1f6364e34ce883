"""Runs several loaders in turn, several times, and compares them: ratios within a round hold, absolute rates do not.

Beside the rate it takes the processor time of this process and all below it. On a machine that is free, a loader that
keeps the processors busy is as fast as that is small; on one that others use, it is the steadier of the two.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data import console
from rich.table import Table

ROUNDS, SECONDS = 5, 2.0  # each contender is measured so often, and so long each time if its batches are short
_DRAIN_S = 0.3  # taken before each measure: what the workers had made ahead while others ran


class Contender(Protocol):
    """Something whose rate is measured."""

    def run(self, seconds: float) -> tuple[float, float]:
        """Go on for so many seconds; gives the units done and the seconds it took."""

    def close(self) -> None:
        """End its processes and threads."""


@dataclass
class Loader:
    """Batches of a loader. `use` looks at one and gives the units in it; `end` closes the loader."""

    batches: Iterator[Any]
    use: Callable[[Any], float]
    end: Callable[[], Any] = lambda: None

    def run(self, seconds: float) -> tuple[float, float]:
        """Take batches."""
        units, start = 0.0, time.perf_counter()
        while (took := time.perf_counter() - start) < seconds:
            units += self.use(next(self.batches))
        return units, took

    def close(self) -> None:
        """End it."""
        self.batches = iter(())
        self.end()


def compete(
    title: str, unit: str, makers: dict[str, Callable[[], Contender]], *, seconds: float = SECONDS
) -> dict[str, Any]:
    """Rates and processor times of all, in turn, and their ratios to the first: medians, and the spread of rounds."""
    running = {name: made for name, make in makers.items() if (made := _made(name, make)) is not None}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    for contender in running.values():
        contender.run(seconds / 2)  # starts it and fills its buffers
    for _ in range(ROUNDS):
        for name, contender in running.items():
            rounds[name].append(_measured(contender, seconds))
    for contender in running.values():
        contender.close()
    first = next(iter(rounds.values()))
    table = Table(title, f"{unit}/s", "the first / it", "spread", "processor µs", "it / the first", "spread")
    result = {}
    for name, found in rounds.items():
        rates = [own / its for (own, _), (its, _) in zip(first, found, strict=True)]
        costs = [its / own for (_, own), (_, its) in zip(first, found, strict=True)]
        rate = statistics.median(rate for rate, _ in found)
        cost = statistics.median(cost for _, cost in found)
        result[name] = {f"{unit}/s": rate, "first/it": spread(rates), "us": cost, "us it/first": spread(costs)}
        cells = [f"{rate:,.1f}", *_cells(rates), f"{cost:,.1f}", *_cells(costs)]
        table.add_row(name, *cells)
    console.print(table)
    return result


def _measured(contender: Contender, seconds: float) -> tuple[float, float]:
    """Units a second, and the processor's microseconds a unit."""
    contender.run(_DRAIN_S)
    before = processor_s(os.getpid())
    units, took = contender.run(seconds)
    return units / took, (processor_s(os.getpid()) - before) / units * 1e6


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far, and of all that live below it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        children = Path(f"/proc/{pid}/task").glob("*/children")
        below = [int(child) for file in children for child in file.read_text().split()]
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_s, below))


def spread(values: list[float]) -> list[float]:
    """Lowest, median and highest."""
    return [min(values), statistics.median(values), max(values)]


def _cells(ratios: list[float]) -> tuple[str, str]:
    low, middle, high = spread(ratios)
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def _made(name: str, make: Callable[[], Contender]) -> Contender | None:
    try:
        return make()
    except ImportError as error:
        console.print(f"{name} is left out: {error}")
        return None


@contextlib.contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Adds the seconds that the block takes."""
    start = time.perf_counter()
    yield
    into.append(time.perf_counter() - start)
