"""Timer of all benchmarks. It compares several ways to do the same work.

The ways take turns. One turn of each is a round, which measures a `Cost` per way: wall time, and the CPU time of the
process and its descendants. CPU time varies less than wall time on a machine that others use. Tables show the median,
minimum and maximum over the rounds, also as ratios to the first way in the same round. Compare ratios between
machines, not absolute times. A way whose library is not installed is skipped with a message.
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

# The processes are idle if they use at most IDLE_CPU_S of CPU time in two consecutive intervals of IDLE_INTERVAL_S.
IDLE_INTERVAL_S, IDLE_CPU_S = 0.2, 0.015
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl: orphans become our children, so that wait4 reports their CPU time
console = Console(width=140)


@dataclass(frozen=True)
class Cost:
    """Cost of one round: units of work done, seconds taken, and peak memory of one process (0 if not measured)."""

    units: float
    wall_s: float
    cpu_s: float
    memory: int = 0  # bytes


Way: TypeAlias = Callable[[], Cost]


@dataclass
class Loader:
    """Batches of a loader under test.

    Args:
        batches: The batches.
        use: Reads a batch and returns the number of units in it, such as samples or megabytes.
        end: Called after the measurement.
        warm: The number of units to consume before the measurement.
    """

    batches: Iterator[Any]
    use: Callable[[Any], float] = len
    end: Callable[[], Any] = lambda: None
    warm: float = 0


@dataclass(frozen=True)
class Bench:
    """Settings of the command line.

    Args:
        rounds: How often each way is measured.
        seconds: How long a loader is measured in a round.
        only: Measure the first way and those with this text in their name.
        data: The folder of the test data.
        options: All arguments, including those of one benchmark alone.
    """

    rounds: int
    seconds: float
    only: str
    data: Path
    options: argparse.Namespace

    def loaders(self, title: str, unit: str, makers: Mapping[str, Callable[[], Loader]]) -> None:
        """Compare loaders, each in its own process. `unit` names what `Loader.use` counts."""
        self.compare(title, unit, {name: in_own_process(make, self.seconds) for name, make in makers.items()})

    def compare(self, title: str, unit: str, ways: Mapping[str, Way]) -> None:
        """Measure all ways in turns, and print a table of their costs."""
        first = next(iter(ways))
        costs_by_way: dict[str, list[Cost]] = {name: [] for name in ways if name == first or self.only in name}
        for _ in range(self.rounds):
            for name in list(costs_by_way):
                try:
                    costs_by_way[name].append(ways[name]())
                except (ImportError, ChildProcessError) as error:
                    console.print(f"{name} is skipped: {str(error)[-500:]}", markup=False)
                    del costs_by_way[name]
        headings = (f"wall time per {unit}", "ratio to first", f"CPU time per {unit}", "ratio to first", "memory")
        table = Table("", *headings, title=title, title_justify="left")
        for name, costs in costs_by_way.items():
            baseline = costs_by_way.get(first, costs)
            wall, first_wall = ([cost.wall_s / cost.units for cost in row] for row in (costs, baseline))
            cpu, first_cpu = ([cost.cpu_s / cost.units for cost in row] for row in (costs, baseline))
            cells = (_format_time(wall), ratios(wall, first_wall), _format_time(cpu), ratios(cpu, first_cpu))
            memory = max(cost.memory for cost in costs)
            table.add_row(name, *cells, f"{memory / 1e6:,.0f} MB" if memory else "")
        console.print(table)


def spread(values: list[float]) -> str:
    """Format the median, minimum and maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratios(values: list[float], base: list[float]) -> str:
    """Format the ratios of each round's value to its base; "" if a base is 0."""
    return spread([value / divisor for value, divisor in zip(values, base, strict=True)]) if all(base) else ""


def _format_time(values: list[float]) -> str:
    """Format the median of some times in seconds, in the largest unit in which it is at least 1."""
    seconds = statistics.median(values)
    scale, unit = next(((n, name) for n, name in ((1, "s"), (1e3, "ms")) if seconds * n >= 1), (1e6, "µs"))
    return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:,.0f} {unit}"


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process and its running descendants have used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # the process has just ended
        return 0.0
    user_ticks, system_ticks = map(int, fields[11:13])
    return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children(pid)))


def children(pid: int) -> list[int]:
    """Return the ids of the running child processes."""
    with contextlib.suppress(OSError):
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text().split()]
    return []


def called(call: Callable[[], Any], units: float = 1) -> Way:
    """Return a way that calls a function in this process."""

    def way() -> Cost:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        return Cost(units, time.perf_counter() - wall, time.process_time() - cpu)

    return way


def in_own_process(make: Callable[[], Loader], seconds: float) -> Way:
    """Return a way that measures a loader in its own process.

    The measurement starts and ends with full queues, so that the batches built are those consumed.
    """

    def way() -> Cost:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_measure_in_child, args=(make, seconds, sender))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            result = "the process died"
        process.join()
        if not isinstance(result, Cost):
            raise ChildProcessError(result)
        return result

    return way


def _measure_in_child(make: Callable[[], Loader], seconds: float, sender: Any) -> None:
    """Send the `Cost` of a loader, or the message of the error that it raised."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        loader = make()
        next(loader.batches)
    except (ImportError, RuntimeError) as error:
        sender.send(f"{error}".splitlines()[0])
        return
    _consume(loader, seconds / 2, loader.warm)
    cpu_before, _ = _wait_until_idle()
    start = time.perf_counter()
    units = _consume(loader, seconds)
    cpu_after, end = _wait_until_idle()
    sender.send(Cost(units, end - start, cpu_after - cpu_before))
    loader.end()


def _consume(loader: Loader, seconds: float, min_units: float = 0) -> float:
    """Consume batches for some seconds, and at least `min_units`. Return the units consumed."""
    units, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds or units < min_units:
        units += loader.use(next(loader.batches))
    return units


def _wait_until_idle() -> tuple[float, float]:
    """Wait until all queues are full. Return the CPU seconds used so far, and when the processes became idle."""
    idle_intervals, last_cpu, idle_since = 0, cpu_seconds(os.getpid()), time.perf_counter()
    while idle_intervals < 2:
        time.sleep(IDLE_INTERVAL_S)
        cpu = cpu_seconds(os.getpid())
        idle_intervals = idle_intervals + 1 if cpu - last_cpu <= IDLE_CPU_S else 0
        last_cpu, idle_since = cpu, idle_since if idle_intervals else time.perf_counter()
    return last_cpu, idle_since


def command(arguments: list[str], units: float, before: Callable[[], Any] = lambda: None) -> Way:
    """Return a way that runs a command, and counts the CPU time of all processes that it starts.

    Args:
        arguments: The program and its arguments.
        units: The units of work that the command does.
        before: Called before the command, outside the measurement.
    """

    def way() -> Cost:
        before()
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        start = time.perf_counter()
        with tempfile.TemporaryFile() as output:
            try:
                first = subprocess.Popen(arguments, stdout=output, stderr=output).pid
            except OSError as error:
                raise ChildProcessError(error) from None
            cpu_s, memory, wall_s, failed = 0.0, 0, 0.0, 0
            with contextlib.suppress(ChildProcessError):  # raised by wait4 when no child is left
                while True:
                    pid, status, usage = os.wait4(-1, 0)
                    cpu_s += usage.ru_utime + usage.ru_stime
                    memory = max(memory, usage.ru_maxrss * 1024)
                    if pid == first:
                        wall_s, failed = time.perf_counter() - start, status
            if failed:
                output.seek(0)
                raise ChildProcessError((output.read().decode().strip().splitlines() or ["no message"])[-1])
        return Cost(units, wall_s, cpu_s, memory)

    return way


def run_ranks(train: Callable[..., None], ranks: int, *arguments: Any) -> list[Any]:
    """Run `train(rank, *arguments, results)` in one process per rank of a gloo group.

    Returns what the ranks have put in the queue `results`.
    """
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import spawn

    results = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/rendezvous"
        spawn(_join_and_train, args=(ranks, store, train, *arguments, results), nprocs=ranks)  # type: ignore[no-untyped-call]
    return [results.get() for _ in range(ranks)]


def _join_and_train(rank: int, ranks: int, store: str, train: Callable[..., None], *arguments: Any) -> None:
    """Join the process group of a run, and train as one of its ranks."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    train(rank, *arguments)
    torch.distributed.destroy_process_group()


def main(doc: str | None, measures: Mapping[str, Callable[[Bench], Any]], **options: Any) -> None:
    """Run the command line of a benchmark.

    Args:
        doc: The help text.
        measures: The measurements by name. The user may choose some.
        options: Names and defaults of further options.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", choices=[*measures, []], default=[], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a loader is measured in a round")
    parser.add_argument("--only", default="", help="measure the first way and those with this in their name")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "savable_pipeline_bench")
    for name, default in options.items():
        kind = type(default[0]) if default and isinstance(default, list) else str if default == [] else type(default)
        parser.add_argument(f"--{name}", default=default, type=kind, nargs="+" if isinstance(default, list) else None)
    parsed = parser.parse_args()
    parsed.data.mkdir(parents=True, exist_ok=True)
    console.print(f"{os.cpu_count()} processors, Python {sys.version.split()[0]}")
    for name in parsed.measures or measures:
        measures[name](Bench(parsed.rounds, parsed.seconds, parsed.only, parsed.data, parsed))
