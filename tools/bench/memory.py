"""Measure the memory of a loader's processes, as /proc reports it, and compare other loaders.

    python tools/bench/memory.py loaders --workers 2 --ranks 1 4    ours and the peers, JSON of 1 kB
    python tools/bench/memory.py loaders --method spawn             workers that are fresh interpreters
    python tools/bench/memory.py samples                            10**6 and 10**8 samples
    python tools/bench/memory.py blend                              1 and 35 sources
    python tools/bench/memory.py sharing                            1 and 4 ranks that share batches: CPU time, memory

Each trainer is a process that imports torch, consumes `--batches` batches, keeps the last one and waits. We then read
/proc/PID/smaps_rollup of the trainer and its descendants. "Unshared" is memory of that process alone. "Shared" is also
mapped by other processes, such as library code and pages inherited by fork. PSS (proportional set size) divides shared
memory by the number of processes that map it. All ranks of a node are measured at once. Other programs on the machine
that use torch change what is shared.

The ranks of `sharing` consume batches of 9.6 MB, read them and sleep. The first rank has two workers. It compares one
rank with four, with and without a barrier in each step. `next` includes the time to free the previous batch. The
control repeats the steps without a loader, so it shows what four ranks on these processors cost without sharing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import numpy as np
import peers
from data import prepare
from many_shards import make_dataset
from ours import FunctionEncoder, pipeline
from rich.table import Table
from rounds import Bench, children, console, cpu_seconds, main, ratios, run_ranks

import savable_pipeline as sp


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a process in bytes, and its numbers of threads and open file descriptors."""

    unshared: int
    shared: int
    pss: int
    threads: int
    descriptors: int
    index: tuple[int, int]  # bytes of a dataset's index that are mapped, and those of them in memory


def memory_of(pid: int) -> ProcessMemory:
    """Read the memory, threads and descriptors of a process."""
    sums = mappings(Path(f"/proc/{pid}/smaps_rollup").read_text(), "[rollup]")
    mapped = mappings(Path(f"/proc/{pid}/smaps").read_text(), ".nv-meta")
    threads, descriptors = (sum(1 for _ in Path(f"/proc/{pid}/{name}").iterdir()) for name in ("task", "fd"))
    unshared, shared = (sums[f"{kind}_Clean"] + sums[f"{kind}_Dirty"] for kind in ("Private", "Shared"))
    return ProcessMemory(unshared, shared, sums["Pss"], threads, descriptors, (mapped["Size"], mapped["Rss"]))


def mappings(text: str, path: str) -> Counter[str]:
    """Sum the fields of /proc/PID/smaps, in bytes, over the mappings whose first line contains `path`."""
    sums, is_counted = Counter[str](), False
    for line in text.splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_counted = path in line
        elif is_counted and rest[-1] == "kB":
            sums[name.rstrip(":")] += int(rest[0]) * 1024
    return sums


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, parents before their children."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


@dataclass(frozen=True, slots=True)
class Node:
    """Memory of the processes of all ranks of a node."""

    trainers: list[ProcessMemory]
    workers: list[ProcessMemory]
    others: list[ProcessMemory]  # fork servers and resource trackers

    @property
    def pss(self) -> int:
        """The PSS of all processes together, in bytes."""
        return sum(each.pss for each in (*self.trainers, *self.workers, *self.others))


def measure_node(loader: str, folder: Path, bench: Bench, *, workers: int, ranks: int = 1) -> Node:
    """Start the trainers of a node with a loader, wait until each has its batches, and measure them."""
    program = [sys.executable, peers.__file__, "batches", loader, str(folder), str(workers)]
    options = [str(ranks), str(bench.options.batches), bench.options.method]
    commands = [[*program, str(rank), *options] for rank in range(ranks)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for command in commands]
    try:
        for process in started:
            assert process.stdout is not None
            if "ready" not in map(str.strip, process.stdout):
                raise ChildProcessError(f"{loader} ended before it had its batches")
        return memory_of_node([process.pid for process in started])
    finally:
        for pid in [pid for process in started for pid in (*descendants(process.pid), process.pid)]:
            with contextlib.suppress(ProcessLookupError):  # the process exited with its parent
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()


def memory_of_node(trainers: list[int]) -> Node:
    """Read the memory of trainers and of their descendants. A descendant without children is a worker."""
    workers: list[ProcessMemory] = []
    others: list[ProcessMemory] = []
    for trainer in trainers:
        for pid in descendants(trainer):
            is_tracker = b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
            (others if children(pid) or is_tracker else workers).append(memory_of(pid))
    return Node([memory_of(pid) for pid in trainers], workers, others)


HEADS = ("trainer, unshared", "shared", "worker, unshared", "shared", "others, unshared", "node, PSS")


def loaders(bench: Bench) -> None:
    """Print the memory of our loader and of others, by workers and ranks."""
    for ranks in bench.options.ranks:
        for workers in bench.options.workers:
            table = Table("MB", *HEADS, title=f"{workers} workers a rank, {ranks} ranks")
            data_sets = {name: data_set for name, (data_set, _) in peers.LOADERS.items()}
            for name, data_set in {"savable_pipeline": "few-json", **data_sets}.items():
                if bench.only not in name:
                    continue
                try:
                    node = measure_node(name, prepare(bench.data, data_set), bench, workers=workers, ranks=ranks)
                    table.add_row(name, *cells(node))
                except (ChildProcessError, ImportError) as error:
                    console.print(error)
            console.print(table)


def samples(bench: Bench) -> None:
    """Print the memory for 10**6 and 10**8 samples, with which it must not grow."""
    table = Table("samples, MB", "shards", *HEADS, "index, mapped", "in memory of a worker")
    for shards, per_shard in ((1_000, 1_000), (1_000, 100_000), (100_000, 1_000)):
        with tempfile.TemporaryDirectory(dir=bench.data) as folder:
            make_dataset(Path(folder) / "many", shards, per_shard)
            node = measure_node("samples", Path(folder) / "many", bench, workers=2)
        table.add_row(
            f"{shards * per_shard:,}", f"{shards:,}", *cells(node), *map(format_megabytes, node.workers[0].index)
        )
    console.print(table)


def blend(bench: Bench) -> None:
    """Print the memory of blends of 1 and 35 sources in 96 lanes."""
    table = Table("MB", *HEADS, "trainer's threads, descriptors", "worker's")
    for workers in (0, 2):
        for sources in (1, 35):
            node = measure_node(f"blend of {sources}", prepare(bench.data, "few-json"), bench, workers=workers)
            threads_and_descriptors = [
                f"{max(p.threads for p in processes)}, {max(p.descriptors for p in processes)}" if processes else ""
                for processes in (node.trainers, node.workers)
            ]
            table.add_row(f"{sources} sources, {workers} workers", *cells(node), *threads_and_descriptors)
    console.print(table)


MEASURED_STEPS, WARM_STEPS, STEP_SLEEP_S = 120, 60, 0.06


def sharing(bench: Bench) -> None:
    """Compare four ranks that share batches with one rank."""
    for sort_count in (4, 40):  # how often `sorted_pixels` sorts, so that batches are cheap or expensive to build
        for barrier in (True, False):
            measure = partial(measure_sharing, bench, sort_count=sort_count, barrier=barrier)
            one_rank, four_ranks = zip(*([measure(1), measure(4)] for _ in range(bench.rounds)), strict=True)
            build_ms = statistics.median(costs["CPU time of workers"] for costs in one_rank) * 1e3
            title = f"batches that take {build_ms:.0f} ms to build, steps with{'' if barrier else 'out'} a barrier"
            table = Table("four ranks against one", "ratio", title=title, title_justify="left")
            for name in one_rank[0]:
                table.add_row(name, ratios([costs[name] for costs in four_ranks], [costs[name] for costs in one_rank]))
            console.print(table)


def measure_sharing(bench: Bench, ranks: int, sort_count: int, *, barrier: bool) -> dict[str, float]:
    """Run ranks that share batches, and return the costs per step, summed over the ranks."""
    costs_by_rank = run_ranks(sharing_rank, ranks, ranks, sort_count, barrier, str(prepare(bench.data, "json")))
    return {name: sum(costs[name] for costs in costs_by_rank) for name in costs_by_rank[0]}


def sorted_pixels(sort_count: int, sample: sp.Sample) -> Any:
    """Build an item of 1.2 MB. Sorting a part of it `sort_count` times costs about as much as decoding an image."""
    pixels = np.random.default_rng(sample.ref.index).random((640, 480), dtype=np.float32)
    for _ in range(sort_count):
        pixels[:32] = np.sort(pixels[:32][::-1], axis=0)[:, ::-1]
    return pixels


def sharing_rank(rank: int, ranks: int, sort_count: int, barrier: bool, folder: str, results: Any) -> None:
    """Train as one rank, and put its costs per step in `results`."""
    import torch.distributed as dist

    own_group, world = dist.new_subgroups_by_enumeration([[each] for each in range(ranks)])[0], dist.group.WORLD
    assert isinstance(own_group, dist.ProcessGroup) and isinstance(world, dist.ProcessGroup)
    build_lane = partial(pipeline, folder, FunctionEncoder(partial(sorted_pixels, sort_count)), size=8)
    wait = dist.barrier if barrier else lambda: None
    with sp.SavableLoader(build_lane, seed=1, num_workers=2, ranks=sp.Ranks.of(own_group, share=world)) as loader:
        memory_sum, batch, spent = 0, next(loader), {"next": 0.0, "read": 0.0}
        for step in range(-WARM_STEPS, MEASURED_STEPS):
            if step == 0:
                dist.barrier()
                workers_s, started = cpu_seconds(os.getpid()) - time.process_time(), time.perf_counter()
                spent = {"next": 0.0, "read": 0.0}
            before = time.process_time()
            batch = next(loader)
            after = time.process_time()
            batch.sum()
            spent["read"] += time.process_time() - after  # the first access also maps the pages
            spent["next"] += after - before
            if step < 0 and step % 5 == 0:  # never in a measured step, because it takes long
                dist.barrier()
                memory_sum += sum(batch_bytes(pid) for pid in [os.getpid(), *descendants(os.getpid())])
                dist.barrier()
            time.sleep(STEP_SLEEP_S)
            wait()
        step_s = time.perf_counter() - started
        workers_s = cpu_seconds(os.getpid()) - time.process_time() - workers_s  # CPU time
        dist.barrier()
    # The control: the same steps without a loader. Each rank reads its last batch again.
    plain_s = timeit("batch.sum(); time.sleep(STEP_SLEEP_S); wait()", number=MEASURED_STEPS, globals=globals() | vars())
    costs = {
        "memory of batches": memory_sum,
        "a step": step_s / ranks,
        "a step of the control, without a loader": plain_s / ranks,
        "a step, in steps of the control": step_s / plain_s * MEASURED_STEPS / ranks,
        "CPU time of workers": workers_s,
        "CPU time of workers and of the first rank's next": workers_s + (0 if rank else spent["next"]),
        "CPU time of next": spent["next"],
        "CPU time of workers, next and reading": workers_s + spent["next"] + spent["read"],
    }
    results.put({name: value / MEASURED_STEPS for name, value in costs.items()})


def batch_bytes(pid: int) -> int:
    """Return the memory of batches of a process, in bytes (PSS)."""
    return mappings(Path(f"/proc/{pid}/smaps").read_text(), "savable_pipeline batch")["Pss"]


def cells(node: Node) -> list[str]:
    """Format the mean memory of trainers, workers and others, and the PSS of all."""
    kinds = (node.trainers, node.workers, node.others)
    means: list[str] = []
    for processes in kinds:
        columns = ([process.unshared for process in processes], [process.shared for process in processes])
        means += [format_megabytes(statistics.mean(values)) if values else "–" for values in columns]
    return [*means[:5], format_megabytes(node.pss)]  # skip the shared memory of others


def format_megabytes(count: float) -> str:
    """Format a number of bytes as megabytes."""
    return f"{count / 1e6:,.0f}"


if __name__ == "__main__":
    measures = {"loaders": loaders, "samples": samples, "blend": blend, "sharing": sharing}
    main(__doc__, measures, workers=[0, 2, 8], ranks=[1, 4], batches=100, method="fork")
