"""What the processes of a loader hold in memory, by the kernel's own account, beside the peers.

    python tools/bench/memory.py loaders --workers 2 --ranks 1 4    ours and the peers, JSON of 1 kB
    python tools/bench/memory.py loaders --method spawn             workers that are fresh interpreters
    python tools/bench/memory.py samples                            10**6 and 10**8 samples
    python tools/bench/memory.py blend                              1 and 35 sources
    python tools/bench/memory.py sharing                            1 and 4 ranks that share batches: CPU time, memory

Each trainer is a process of its own that imports torch, takes `--batches` batches, keeps the last and waits. Then
/proc/PID/smaps_rollup of it and of all processes below it is read: unshared is what is mapped by that process alone,
shared what others have too, such as the code of libraries and what a fork has left common; PSS divides the latter by
those that share it. All ranks of a node are measured at once. Other programs on the machine that have torch mapped make
more of it shared.

The ranks of `sharing` take batches of 9.6 MB, read them and sleep. The first rank has two workers. One rank and four
take turns, with a barrier in each step and without. `next` includes the time to drop the batch before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
from data import prepared
from many_shards import make_dataset
from ours import FunctionEncoder, pipeline
from rich.table import Table
from rounds import Bench, children, console, main, processor_s, ratios

import savable_pipeline as sp


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a process, in bytes; its threads and open descriptors."""

    unshared: int
    shared: int
    pss: int
    threads: int
    descriptors: int
    index: tuple[int, int]  # bytes of the index of a dataset: mapped, and of these in memory


def memory_of(pid: int) -> ProcessMemory:
    """Read the memory, threads and descriptors of a process."""
    sums = mappings(Path(f"/proc/{pid}/smaps_rollup").read_text(), "[rollup]")
    mapped = mappings(Path(f"/proc/{pid}/smaps").read_text(), ".nv-meta")
    threads, descriptors = (sum(1 for _ in Path(f"/proc/{pid}/{name}").iterdir()) for name in ("task", "fd"))
    unshared, shared = (sums[f"{kind}_Clean"] + sums[f"{kind}_Dirty"] for kind in ("Private", "Shared"))
    return ProcessMemory(unshared, shared, sums["Pss"], threads, descriptors, (mapped["Size"], mapped["Rss"]))


def mappings(text: str, path: str) -> Counter[str]:
    """The bytes by name of smaps, of the mappings whose first lines hold these letters."""
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
    return [each for child in children(pid) for each in (child, *below(child))]


@dataclass(frozen=True, slots=True)
class Node:
    """The processes of all ranks."""

    trainers: list[ProcessMemory]
    workers: list[ProcessMemory]
    others: list[ProcessMemory]  # fork servers and resource trackers

    @property
    def pss(self) -> int:
        """Bytes of all."""
        return sum(each.pss for each in (*self.trainers, *self.workers, *self.others))


def run(name: str, folder: Path, bench: Bench, *, workers: int, ranks: int = 1) -> Node:
    """Start the trainers of a node, wait until each has its batches, and measure them."""
    words = [sys.executable, peers.__file__, "batches", name, str(folder), str(workers)]
    ends = [str(ranks), str(bench.options.batches), bench.options.method]
    started = [
        subprocess.Popen([*words, str(rank), *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            if "ready" not in map(str.strip, process.stdout):
                raise ChildProcessError(f"{name} ended before it had its batches")
        return measured([process.pid for process in started])
    finally:
        for pid in [pid for process in started for pid in (*below(process.pid), process.pid)]:
            with contextlib.suppress(ProcessLookupError):  # it ended when its parent did
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()


def measured(trainers: list[int]) -> Node:
    """A worker is a process below a trainer that has none below it, and is no resource tracker."""
    workers: list[ProcessMemory] = []
    others: list[ProcessMemory] = []
    for trainer in trainers:
        for pid in below(trainer):
            serves = children(pid) or b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
            (others if serves else workers).append(memory_of(pid))
    return Node([memory_of(pid) for pid in trainers], workers, others)


# What is measured.

HEADS = ("trainer, unshared", "shared", "worker, unshared", "shared", "others, unshared", "node, PSS")


def loaders(bench: Bench) -> None:
    """Print the memory of our loader and of its peers, by workers and ranks."""
    for ranks in bench.options.ranks:
        for workers in bench.options.workers:
            table = Table("MB", *HEADS, title=f"{workers} workers a rank, {ranks} ranks")
            for name, kind in {"savable_pipeline": "few-json", **{k: v[0] for k, v in peers.LOADERS.items()}}.items():
                if bench.only not in name:
                    continue
                try:
                    node = run(name, prepared(bench.data, kind), bench, workers=workers, ranks=ranks)
                    table.add_row(name, *cells(node))
                except (ChildProcessError, ImportError) as error:  # which says why
                    console.print(error)
            console.print(table)


def samples(bench: Bench) -> None:
    """Indexes of more and more samples: what a process holds must not grow with them."""
    table = Table("samples, MB", "shards", *HEADS, "index, mapped", "in memory of a worker")
    for shards, each in ((1_000, 1_000), (1_000, 100_000), (100_000, 1_000)):
        with tempfile.TemporaryDirectory(dir=bench.data) as folder:
            make_dataset(Path(folder) / "many", shards, each)
            node = run("samples", Path(folder) / "many", bench, workers=2)
        table.add_row(f"{shards * each:,}", f"{shards:,}", *cells(node), *map(megabytes, node.workers[0].index))
    console.print(table)


def blend(bench: Bench) -> None:
    """Many sources in 96 lanes."""
    table = Table("MB", *HEADS, "trainer's threads, descriptors", "worker's")
    for workers in (0, 2):
        for sources in (1, 35):
            node = run(f"blend of {sources}", prepared(bench.data, "few-json"), bench, workers=workers)
            busy = [
                f"{max(p.threads for p in all_)}, {max(p.descriptors for p in all_)}" if all_ else ""
                for all_ in (node.trainers, node.workers)
            ]
            table.add_row(f"{sources} sources, {workers} workers", *cells(node), *busy)
    console.print(table)


SHARE_STEPS, SHARE_WARM, SHARE_STEP_S = 120, 60, 0.06


def sharing(bench: Bench) -> None:
    """Four ranks that share batches, beside one alone."""
    for sorts in (4, 40):  # of an image, as the cost of building
        for barrier in (True, False):
            found = [[shared(bench, ranks, sorts, barrier=barrier) for ranks in (1, 4)] for _ in range(bench.rounds)]
            alone, four = ([each[number] for each in found] for number in (0, 1))
            build_ms = statistics.median(each["CPU time of workers"] for each in alone) * 1e3
            title = f"batches that take {build_ms:.0f} ms to build, steps with{'' if barrier else 'out'} a barrier"
            table = Table("four beside one", "ratio", title=title, title_justify="left")
            for name in alone[0]:
                table.add_row(name, ratios(*([each[name] for each in runs] for runs in (four, alone))))
            console.print(table)


def shared(bench: Bench, ranks: int, sorts: int, *, barrier: bool) -> dict[str, float]:
    """The costs of a step of ranks that share batches."""
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import spawn

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = get_context("spawn").SimpleQueue()
    words = (ranks, sorts, barrier, str(prepared(bench.data, "json")), port, results)
    spawn(sharing_rank, args=words, nprocs=ranks)  # type: ignore[no-untyped-call]
    found = [results.get() for _ in range(ranks)]
    return {name: sum(each[name] for each in found) for name in found[0]}


def image(sorts: int, sample: sp.Sample) -> Any:
    """1.2 MB, sorted in part so often, to cost as much as decoding."""
    pixels = np.random.default_rng(sample.ref.index).random((640, 480), dtype=np.float32)
    for _ in range(sorts):
        pixels[:32] = np.sort(pixels[:32][::-1], axis=0)[:, ::-1]
    return pixels


def sharing_rank(rank: int, ranks: int, sorts: int, barrier: bool, folder: str, port: int, results: Any) -> None:
    """One rank: the CPU time, memory and time of its steps, a part of those of all ranks."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    data, whole = dist.new_subgroups_by_enumeration([[each] for each in range(ranks)])[0], dist.group.WORLD
    assert isinstance(data, dist.ProcessGroup) and isinstance(whole, dist.ProcessGroup)
    encoder, spent = FunctionEncoder(partial(image, sorts)), {"next": 0.0, "read": 0.0}
    run = partial(pipeline, folder, encoder, 8, 0)
    with sp.SavableLoader(run, seed=1, num_workers=2, ranks=sp.Ranks.of(data, share=whole)) as loader:
        stored, batch = 0, next(loader)
        for step in range(-SHARE_WARM, SHARE_STEPS):
            if step == 0:
                dist.barrier()
                workers, started = processor_s(os.getpid()) - time.process_time(), time.perf_counter()
                spent = {"next": 0.0, "read": 0.0}
            before = time.process_time()
            batch = next(loader)
            after = time.process_time()
            batch.sum()
            spent["read"] += time.process_time() - after  # and map its pages
            spent["next"] += after - before
            if step < 0 and step % 5 == 0:  # apart from the steps that are timed
                dist.barrier()
                stored += sum(batch_bytes(pid) for pid in [os.getpid(), *below(os.getpid())])
                dist.barrier()
            time.sleep(SHARE_STEP_S)
            if barrier:
                dist.barrier()
        step_s = time.perf_counter() - started
        workers = processor_s(os.getpid()) - time.process_time() - workers
        dist.barrier()
    costs = {
        "memory of batches": stored,
        "a step": step_s / ranks,
        "CPU time of workers": workers,
        "CPU time of workers and of the first rank's next": workers + (0 if rank else spent["next"]),
        "CPU time of next": spent["next"],
        "CPU time of workers, next and reading": workers + spent["next"] + spent["read"],
    }
    results.put({name: value / SHARE_STEPS for name, value in costs.items()})
    dist.destroy_process_group()


def batch_bytes(pid: int) -> int:
    """A process's share of the memory of batches."""
    return mappings(Path(f"/proc/{pid}/smaps").read_text(), "savable_pipeline batch")["Pss"]


def cells(node: Node) -> list[str]:
    """What a process of each kind holds, the mean of them, and all together."""
    kinds = (node.trainers, node.workers, node.others)
    means = [
        megabytes(statistics.mean(values)) if values else "–"
        for processes in kinds
        for values in ([each.unshared for each in processes], [each.shared for each in processes])
    ]
    return [*means[:5], megabytes(node.pss)]


def megabytes(count: float) -> str:
    """As shown."""
    return f"{count / 1e6:,.0f}"


if __name__ == "__main__":
    measures = {"loaders": loaders, "samples": samples, "blend": blend, "sharing": sharing}
    main(__doc__, measures, workers=[0, 2, 8], ranks=[1, 4], batches=100, method="fork")
