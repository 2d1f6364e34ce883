"""The timer of all benchmarks: ways to do the same work take turns, and each is shown beside the first.

A round of a way is a `Cost`. Beside the clock it has the processor time of the process and of all below it: on a
machine that others use it is the steadier of the two. Ratios are taken within a round and hold, absolute times do not;
shown are medians, and the least and greatest of the rounds. A way that is not installed is left out with a word.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

CALM_S, CALM = 0.2, 0.015  # at rest is who uses so few processor seconds in this time, twice
_SUBREAPER = 36  # prctl: processes whose parent ended become ours, so that their time is counted
console = Console(width=140)


@dataclass(frozen=True)
class Cost:
    """Of one round: units of work, the seconds that they took, and the most memory of one process where it is known."""

    units: float
    clock_s: float
    processor_s: float
    memory: int = 0  # bytes


Way: TypeAlias = Callable[[], Cost]


@dataclass
class Loader:
    """Batches of a loader. `use` looks at one and gives the units in it; the first `warm` units are not counted."""

    batches: Iterator[Any]
    use: Callable[[Any], float] = len
    end: Callable[[], Any] = lambda: None
    warm: float = 0


@dataclass(frozen=True)
class Bench:
    """How often and how long is measured, what of it, and where the data lies: what the command line says."""

    rounds: int
    seconds: float
    only: str
    data: Path
    options: argparse.Namespace

    def loaders(self, title: str, unit: str, makers: Mapping[str, Callable[[], Loader]]) -> None:
        """Compare loaders, each in a process of its own."""
        self.compare(title, unit, {name: apart(make, self.seconds) for name, make in makers.items()})

    def compare(self, title: str, unit: str, ways: Mapping[str, Way]) -> None:
        """Let all take turns, and print a table of their costs."""
        first = next(iter(ways))
        found: dict[str, list[Cost]] = {name: [] for name in ways if name == first or self.only in name}
        for _ in range(self.rounds):
            for name in list(found):
                try:
                    found[name].append(ways[name]())
                except (ImportError, ChildProcessError) as error:
                    console.print(f"{name} is left out: {str(error)[-500:]}", markup=False)
                    del found[name]
        heads = (f"clock, a {unit}", "beside the first", f"processor, a {unit}", "beside the first", "memory")
        table = Table("", *heads, title=title, title_justify="left")
        for name, costs in found.items():
            both = [
                ([each.clock_s / each.units for each in row], [each.processor_s / each.units for each in row])
                for row in (costs, found.get(first, costs))
            ]
            cells = [cell for own, base in zip(*both, strict=True) for cell in (_time(own), ratios(own, base))]
            memory = max(each.memory for each in costs)
            table.add_row(name, *cells, f"{memory / 1e6:,.0f} MB" if memory else "")
        console.print(table)


def spread(values: list[float]) -> str:
    """The median, and the least and the greatest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratios(values: list[float], base: list[float]) -> str:
    """The ratios of rounds."""
    return spread([own / other for own, other in zip(values, base, strict=True)]) if all(base) else ""


def _time(values: list[float]) -> str:
    middle = statistics.median(values)
    scale, unit = next((pair for pair in ((1, "s"), (1e3, "ms")) if middle * pair[0] >= 1), (1e6, "µs"))
    return f"{middle * scale:.3g} {unit}" if middle * scale < 1000 else f"{middle * scale:,.0f} {unit}"


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far, and of all that live below it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_s, children(pid)))


def children(pid: int) -> list[int]:
    """The processes right below one."""
    with contextlib.suppress(OSError):
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text().split()]
    return []


def called(call: Callable[[], Any], units: float = 1) -> Way:
    """A call in this process."""

    def way() -> Cost:
        clock, processor = time.perf_counter(), time.process_time()
        call()
        return Cost(units, time.perf_counter() - clock, time.process_time() - processor)

    return way


def apart(make: Callable[[], Loader], seconds: float) -> Way:
    """A loader in a process of its own, from full queues to full queues: nothing counts that is made for another."""

    def way() -> Cost:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_measured, args=(make, seconds, sender))
        process.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            found = "it ended"
        process.join()
        if not isinstance(found, Cost):
            raise ChildProcessError(found)
        return found

    return way


def _measured(make: Callable[[], Loader], seconds: float, sender: Any) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        loader = make()
        next(loader.batches)
    except (ImportError, RuntimeError) as error:
        sender.send(f"{error}".splitlines()[0])
        return
    _taken(loader, seconds / 2, loader.warm)
    before, _ = _at_rest()
    start = time.perf_counter()
    units = _taken(loader, seconds)
    after, end = _at_rest()
    sender.send(Cost(units, end - start, after - before))
    loader.end()


def _taken(loader: Loader, seconds: float, least: float = 0) -> float:
    units, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds or units < least:
        units += loader.use(next(loader.batches))
    return units


def _at_rest() -> tuple[float, float]:
    """Processor seconds, once all queues are full, and when they became so."""
    calm, last, since = 0, processor_s(os.getpid()), time.perf_counter()
    while calm < 2:
        time.sleep(CALM_S)
        now = processor_s(os.getpid())
        calm = calm + 1 if now - last <= CALM else 0
        last, since = now, since if calm else time.perf_counter()
    return last, since


def command(words: list[str], units: float, before: Callable[[], Any] = lambda: None) -> Way:
    """A command after `before()`, with the time of every process that it leaves behind."""

    def way() -> Cost:
        before()
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        begun = time.perf_counter()
        with tempfile.TemporaryFile() as output:
            try:
                first = subprocess.Popen(words, stdout=output, stderr=output).pid
            except OSError as error:
                raise ChildProcessError(error) from None
            total, memory, clock_s, failed = 0.0, 0, 0.0, 0
            with contextlib.suppress(ChildProcessError):  # no more
                while True:
                    pid, status, used = os.wait4(-1, 0)
                    total += used.ru_utime + used.ru_stime
                    memory = max(memory, used.ru_maxrss * 1024)
                    if pid == first:
                        clock_s, failed = time.perf_counter() - begun, status
            if failed:
                output.seek(0)
                raise ChildProcessError((output.read().decode().strip().splitlines() or ["no message"])[-1])
        return Cost(units, clock_s, total, memory)

    return way


def main(doc: str | None, measures: Mapping[str, Callable[[Bench], Any]], **options: Any) -> None:
    """The command line of a benchmark: `options` are further ones, by name, with their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", choices=[*measures, []], default=[], help="all of it unless given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a loader is measured in a round")
    parser.add_argument("--only", default="", help="the first and what has this in its name")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "savable_pipeline_bench")
    for name, default in options.items():
        kind = type(default[0]) if default and isinstance(default, list) else str if default == [] else type(default)
        parser.add_argument(f"--{name}", default=default, type=kind, nargs="+" if isinstance(default, list) else None)
    parsed = parser.parse_args()
    parsed.data.mkdir(parents=True, exist_ok=True)
    console.print(f"{os.cpu_count()} processors, Python {sys.version.split()[0]}")
    for name in parsed.measures or measures:
        measures[name](Bench(parsed.rounds, parsed.seconds, parsed.only, parsed.data, parsed))
