"""Measures what workers cost beside their work: state, start, and how much N of them do.

    python tools/bench/workers.py              all of it, about three minutes
    python tools/bench/workers.py cost         processor time of state a batch, and of the trainer's thread a batch
    python tools/bench/workers.py first        seconds from `iter()` to the first batch, by start method
    python tools/bench/workers.py scaling      N workers against one, on lanes that N does and does not divide
    python tools/bench/workers.py threads      two threads against two processes: 1 MB blobs as bytes, and JPEG decoded
                                               without Python's lock; idle and beside a busy trainer; and their memory

This module imports no torch, since spawned workers import it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from data import FOLDER, console, prepared
from pipelines import FunctionEncoder, decode_json, filled, imported, nothing, pipeline, slept
from rich.table import Table
from rounds import Contender, Loader, compete, timed
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.state.lane_state import LaneState, pack_state
from savable_pipeline.run.transport import batch_pickle as wire
from savable_pipeline.run.transport.segments import SegmentReader, SegmentWriter

BATCH_S = 0.01  # of a trainer that takes 100 batches a second
REPEATS = 300


def cost(folder: Path) -> None:
    """What a batch costs beside making it."""
    tars = prepared(folder, "json")
    table = Table("one lane, buffer", *_PARTS, "all, µs", "of 10 ms", title="processor time of state, a batch")
    for buffer in (10_000, 100_000):
        parts = state_parts(tars, buffer)
        whole = sum(parts)
        table.add_row(
            f"{buffer:,}", *(f"{part:.0f}" for part in parts), f"{whole:.0f}", f"{whole / BATCH_S / 1e4:.2f} %"
        )
    console.print(table)
    encoder = FunctionEncoder(nothing, filled)
    with sp.SavableLoader(partial(pipeline, str(tars), encoder, 1, 0), seed=1, num_workers=2) as loader:
        busy, rested = trainer_times(loader)
    console.print(f"trainer's thread, a batch of 9.6 MB: {busy:.0f} µs in a loop, {rested:.0f} µs after it slept 20 ms")


_PARTS = ("save_state", "pack", "pickle", "into shared memory", "out of it")


def state_parts(tars: Path, buffer: int) -> list[float]:
    """Processor microseconds, by `_PARTS`, of a batch's state; the last three for a delivery of nothing else."""
    stage = pipeline(str(tars), FunctionEncoder(nothing, list), 256, buffer, sp.Lane())
    writer, reader = SegmentWriter(), SegmentReader()
    rows = []
    for _ in range(REPEATS):
        next(stage)
        times = [time.thread_time_ns()]
        stages = stage.save_state()
        times.append(time.thread_time_ns())
        state = pack_state(LaneState(0, 0, 1, True, stages))
        times.append(time.thread_time_ns())
        pieces, _ = wire.dumps(Delivery(None, state, True))
        times.append(time.thread_time_ns())
        written = writer.write([], pieces)
        times.append(time.thread_time_ns())
        if written.fd is not None:
            reader.add(written.segment, written.fd)
        wire.loads(reader.read(written.segment, written.spans)[0], [])
        times.append(time.thread_time_ns())
        rows.append([after - before for before, after in pairwise(times)])
    return [statistics.median(column) / 1000 for column in zip(*rows, strict=True)]


def trainer_times(loader: sp.SavableLoader) -> tuple[float, float]:
    """Processor microseconds of the trainer's thread a batch: of one that does nothing, and of one that has just slept.

    What sleeps finds its caches used by others.
    """
    batches = iter(loader)
    busy, rested = [], []
    for _ in range(10):
        before = time.thread_time()
        for _ in range(100):
            next(batches)
        busy.append((time.thread_time() - before) / 100)
    for _ in range(100):
        time.sleep(0.02)
        before = time.thread_time()
        next(batches)
        rested.append(time.thread_time() - before)
    return statistics.median(busy[1:]) * 1e6, statistics.median(rested) * 1e6


def first(folder: Path) -> None:
    """Two workers' first batch, beside two bare interpreters that import the same."""
    run = partial(pipeline, str(prepared(folder, "json")), FunctionEncoder(decode_json, imported), 256, 10_000)
    table = Table("first batch of text", "median, s", "lowest", "highest", title="start of two workers")
    times: dict[str, list[float]] = {"two interpreters that import the same": []}
    modules: dict[str, list[str]] = {}
    for _ in range(10):
        with timed(next(iter(times.values()))):
            two_interpreters("workers")
        for method in ("fork", "forkserver", "spawn"):
            with sp.SavableLoader(run, seed=1, num_workers=2, workers=sp.Workers(start_method=method)) as loader:
                time.sleep(1.0)  # as a model is built meanwhile
                with timed(times.setdefault(f"{method}, from iter()", [])):
                    modules[method] = next(iter(loader))
    for name, found in times.items():
        table.add_row(name, *(f"{value:.3f}" for value in (statistics.median(found), min(found), max(found))))
    console.print(table)
    large = ["torch", "torchvision", "torchdata", "webdataset", "typer", "rich", "PIL", "numpy"]
    held = ", ".join(name for name in large if name in modules["spawn"])
    console.print(f"a spawned worker has imported {len(modules['spawn'])} modules; of the large ones: {held}")


def two_interpreters(module: str) -> None:
    """Start two bare interpreters side by side that import a module, and wait for them."""
    here = Path(__file__).parent
    search = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"import {module}"]
    started = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": search}) for _ in range(2)]
    for process in started:
        process.wait()


def scaling(folder: Path) -> None:
    """Batches/s of an encoder that sleeps 40 ms a batch."""
    tars = prepared(folder, "json")

    def made(lanes: int, workers: int) -> Callable[[], Contender]:
        def make() -> Contender:
            run = partial(pipeline, str(tars), FunctionEncoder(nothing, slept), 1, 0)
            loader = sp.SavableLoader(run, seed=1, lanes=lanes, num_workers=workers)
            return Loader(iter(loader), lambda batch: 1 / workers, loader.close)

        return make

    for lanes, several in [(96, (3, 5, 7)), (6, (4,)), (12, (8,))]:
        makers = {f"{workers} workers": made(lanes, workers) for workers in (1, *several)}
        compete(f"{lanes} lanes, an encoder that sleeps", "batch", makers)


def as_bytes(sample: Mapping[str, bytes]) -> bytes:
    """A blob as it is."""
    return sample["bin"]


def decoded(sample: Mapping[str, bytes]) -> Any:
    """A JPEG as uint8 (3, 224, 224), by code that lets go of Python's lock."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional

    image = decode_jpeg(torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8), ImageReadMode.RGB)
    return functional.resize(image, [224, 224], antialias=True)


def megabytes(batch: list[bytes]) -> float:
    """Read every byte; gives how many there were."""
    for blob in batch:
        xxh3_64_intdigest(blob)
    return sum(map(len, batch)) / 1e6


def busily(use: Callable[[Any], float], batch: Any) -> float:
    """The same by a trainer that computes in Python for 5 ms a batch."""
    found, until = use(batch), time.perf_counter() + 0.005
    while time.perf_counter() < until:
        pass
    return found


def threads(folder: Path) -> None:
    """Threads, processes and spdl's threads, two of each."""
    import peers
    import torch

    torch.set_num_threads(1)
    tasks: dict[str, tuple[Path, str, Any, Any, int, Callable[[Any], float], str]] = {
        "blobs of 1 MB as bytes": (prepared(folder, "blobs"), "bin", as_bytes, list, 8, megabytes, "MB"),
        "JPEG, decode_jpeg": (prepared(folder, "images"), "jpg", decoded, None, 64, len, "image"),
    }
    for name, (tars, part, decode, collate, size, plain, unit) in tasks.items():
        for trainer, use in (("", plain), (", a busy trainer", partial(busily, plain))):
            run = partial(pipeline, str(tars), FunctionEncoder(decode, collate), size, 0)

            def ours(method: str, run: Any = run, use: Callable[[Any], float] = use) -> Contender:
                loader = sp.SavableLoader(run, seed=1, workers=sp.Workers(2, start_method=method))
                return Loader(iter(loader), use, loader.close)

            def others(tars: Path = tars, part: str = part, decode: Any = decode, collate: Any = collate or torch.stack,
                       size: int = size, use: Callable[[Any], float] = use) -> Contender:  # fmt: skip
                pool = peers.Threads(tars, part, decode, collate, size=size, threads=2)
                return Loader(iter(pool), use, pool.close)

            makers: dict[str, Callable[[], Contender]] = {
                "threads": partial(ours, "thread"),
                "processes": partial(ours, "fork"),
                "spdl, threads": others,
            }
            compete(f"{name}{trainer}", unit, makers)
    memory_of_both(tasks["JPEG, decode_jpeg"][0])


def memory_of_both(tars: Path) -> None:
    """Megabytes (PSS) of the trainer and its workers, that two of them add, after 50 batches of images."""
    import psutil

    def pss() -> float:
        this = psutil.Process()
        return float(sum(each.memory_full_info().pss for each in (this, *this.children(recursive=True)))) / 1e6

    run = partial(pipeline, str(tars), FunctionEncoder(decoded, None), 64, 0)
    for method in ("thread", "fork", "spawn"):
        before = pss()
        with sp.SavableLoader(run, seed=1, workers=sp.Workers(2, start_method=method)) as loader:
            batches = iter(loader)
            for _ in range(50):
                next(batches)
            console.print(f"two workers, {method}: {pss() - before:.0f} MB more")


def main() -> None:
    measures: dict[str, Callable[[Path], Any]] = {
        "cost": cost, "first": first, "scaling": scaling, "threads": threads
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*measures, []], default=[])
    parser.add_argument("--data", type=Path, default=FOLDER)
    args = parser.parse_args()
    console.print(f"{os.cpu_count()} processors, Python {sys.version.split()[0]}")
    for name in args.what or measures:
        measures[name](args.data)


if __name__ == "__main__":
    main()
