"""Measures what the processes of a loader hold in memory, by the kernel's own account, beside the peers.

    python tools/bench/memory.py                                       all of it
    python tools/bench/memory.py loaders --workers 2 --ranks 1 4       ours and the peers, JSON of 1 kB
    python tools/bench/memory.py loaders --method spawn                workers that are fresh interpreters
    python tools/bench/memory.py samples                               10**6 and 10**8 samples
    python tools/bench/memory.py blend                                 1 and 35 sources

Each trainer is a process of its own that imports torch, takes `--batches` batches, keeps the last and waits. Then
/proc/PID/smaps_rollup of it and of all processes below it is read: unshared is what is mapped by that process alone,
shared what others have too, such as the code of libraries and what a fork has left common; PSS divides the latter by
those that share it. All ranks of a node are measured at once. Other programs on the machine that have torch mapped make
more of it shared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data import FOLDER, console, prepared
from memory_peers import LOADERS
from memory_runs import READY
from rich.table import Table

MB = 1e6


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of a process, in bytes; its threads and open descriptors."""

    unshared: int
    shared: int
    pss: int
    threads: int
    descriptors: int
    index: tuple[int, int, int]  # bytes of the index of a dataset: mapped, of these in memory, of these unshared


def held(pid: int) -> Held:
    """What a process holds now."""
    sums = rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
    threads = sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    unshared, shared = (sums[f"{kind}_Clean"] + sums[f"{kind}_Dirty"] for kind in ("Private", "Shared"))
    mapped = mappings(Path(f"/proc/{pid}/smaps").read_text(), ".nv-meta")
    index = (mapped["Size"], mapped["Rss"], mapped["Private_Clean"] + mapped["Private_Dirty"])
    return Held(unshared, shared, sums["Pss"], threads, descriptors, index)


def rollup(text: str) -> dict[str, int]:
    """The bytes by name of smaps_rollup."""
    lines = [line.split() for line in text.splitlines()[1:]]
    return {name.rstrip(":"): int(count) * 1024 for name, count, *_ in lines}


def mappings(text: str, path: str) -> Counter[str]:
    """The bytes by name of smaps, of the files whose paths hold these letters."""
    sums, counts = Counter[str](), False
    for line in text.splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            counts = path in line
        elif counts and rest[-1] == "kB":
            sums[name.rstrip(":")] += int(rest[0]) * 1024
    return sums


def below(pid: int) -> list[int]:
    """The processes below one, those that started others before them."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return [each for child in children for each in (child, *below(child))]


@dataclass(frozen=True, slots=True)
class Node:
    """The processes of all ranks."""

    trainers: list[Held]
    workers: list[Held]
    others: list[Held]  # fork servers and resource trackers

    @property
    def pss(self) -> int:
        """Bytes of all."""
        return sum(each.pss for each in (*self.trainers, *self.workers, *self.others))


def run(what: str, folder: Path, args: argparse.Namespace, *, workers: int, ranks: int = 1) -> Node:
    """Start the trainers of a node, wait until each has its batches, and measure them."""
    words = [sys.executable, str(Path(__file__).with_name("memory_runs.py")), what, str(folder)]
    words += ["--workers", str(workers), "--ranks", str(ranks), "--batches", str(args.batches), "--method", args.method]
    started = [
        subprocess.Popen([*words, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            if READY not in map(str.strip, process.stdout):
                raise ChildProcessError(f"{what} ended before it had its batches")
        return measured([process.pid for process in started])
    finally:
        for pid in [pid for process in started for pid in (*below(process.pid), process.pid)]:
            with contextlib.suppress(ProcessLookupError):  # it ended when its parent did
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()


def measured(trainers: list[int]) -> Node:
    """A worker is a process below a trainer that has none below it, and is no resource tracker."""
    workers: list[Held] = []
    others: list[Held] = []
    for trainer in trainers:
        for pid in below(trainer):
            serves = below(pid) or b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
            (others if serves else workers).append(held(pid))
    return Node([held(pid) for pid in trainers], workers, others)


# What is measured.


def loaders(args: argparse.Namespace) -> None:
    """Ours and the peers, for each number of workers and ranks."""
    for ranks in args.ranks:
        for workers in args.workers:
            table = Table(
                "MB", "trainer, unshared", "shared", "worker, unshared", "shared", "others, unshared", "node, PSS",
                title=f"{workers} workers a rank, {ranks} ranks",
            )  # fmt: skip
            for name in args.only or LOADERS:
                data = prepared(args.data, LOADERS[name][0])
                try:
                    node = run(name, data, args, workers=workers, ranks=ranks)
                except ChildProcessError as error:  # it said why
                    console.print(error)
                    continue
                cells = *pair(node.trainers), *pair(node.workers), pair(node.others)[0], megabytes(node.pss)
                table.add_row(name, *cells)
            console.print(table)


def samples(args: argparse.Namespace) -> None:
    """Indexes of more and more samples: what a process holds must not grow with them."""
    from many_shards import make_dataset

    table = Table(
        "samples, MB", "shards", "trainer, unshared", "shared", "worker, unshared", "shared", "others, unshared",
        "index, mapped", "in memory of a worker", "of its unshared",
    )  # fmt: skip
    for shards, each in ((1_000, 1_000), (1_000, 100_000), (100_000, 1_000)):
        with tempfile.TemporaryDirectory(dir=args.data) as folder:
            make_dataset(Path(folder) / "many", shards, each)
            node = run("samples", Path(folder) / "many", args, workers=2)
        cells = *pair(node.trainers), *pair(node.workers), pair(node.others)[0], *map(megabytes, node.workers[0].index)
        table.add_row(f"{shards * each:,}", f"{shards:,}", *cells)
    console.print(table)


def blend(args: argparse.Namespace) -> None:
    """Many sources in 96 lanes."""
    data = prepared(args.data, "few-json")
    table = Table("MB", "trainer, unshared", "threads", "descriptors", "worker, unshared", "threads", "descriptors")
    for workers in (0, 2):
        for sources in (1, 35):
            node = run(f"blend of {sources}", data, args, workers=workers)
            table.add_row(f"{sources} sources, {workers} workers", *busy(node.trainers), *busy(node.workers))
    console.print(table)


# Cells.


def megabytes(count: float) -> str:
    return f"{count / MB:,.0f}"


def pair(processes: list[Held]) -> tuple[str, str]:
    """Unshared and shared, the mean of the processes."""
    if not processes:
        return "–", "–"
    means = [statistics.mean(values) for values in ([p.unshared for p in processes], [p.shared for p in processes])]
    return megabytes(means[0]), megabytes(means[1])


def busy(processes: list[Held]) -> tuple[str, str, str]:
    """Unshared of one, its threads and descriptors, the most of any."""
    if not processes:
        return "–", "–", "–"
    threads, descriptors = (max(p.threads for p in processes), max(p.descriptors for p in processes))
    return pair(processes)[0], str(threads), str(descriptors)


def main() -> None:
    measures: dict[str, Callable[[argparse.Namespace], None]] = {"loaders": loaders, "samples": samples, "blend": blend}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*measures, []], default=[])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batches", type=int, default=100, help="that each rank takes, so that every lane has begun")
    parser.add_argument("--method", default="fork", choices=["fork", "forkserver", "spawn"])
    parser.add_argument("--only", nargs="+", choices=LOADERS)
    parser.add_argument("--data", type=Path, default=FOLDER)
    args = parser.parse_args()
    console.print(f"Python {sys.version.split()[0]}, {os.cpu_count()} processors")
    for name in args.what or measures:
        measures[name](args)


if __name__ == "__main__":
    main()
