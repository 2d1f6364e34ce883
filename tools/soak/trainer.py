"""Start and stop a loader a thousand times, and kill and resume a trainer a hundred times.

Loaders must not leak processes, descriptors, shared memory or memory. The trainer's batches must be exact.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from multiprocessing.context import ForkContext
from pathlib import Path

import torch
from pipeline import soak_pipeline
from report import Row, descendants, difference, kill

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.batch_difference import digest

SEED, LANES = 3, 12
WARM_UP = 0.1  # the fraction of starts before memory is first measured
GROWTH_KB = 2048  # tolerated growth of the allocator; a thousand leaked loaders would need far more
SAVE_EVERY = 3  # steps between two checkpoints


def starts(shards: Path, numbers: dict[str, int]) -> Iterator[Row]:
    """Start a loader, take at most one batch and stop it, `numbers[method]` times for each start method."""
    for method, number in numbers.items():
        pipeline = partial(soak_pipeline, str(shards))
        with sp.SavableLoader(pipeline, seed=SEED, lanes=LANES) as loader:
            expected = digest(next(loader))
        # The first start also starts processes that Python keeps for all spawned processes.
        problem = _start_and_stop(pipeline, method, 1, expected)
        before, shared_before = _resources(), _shared_files()
        measured = []
        for count in range(number):
            problem = problem or _start_and_stop(pipeline, method, count, expected)
            if count + 1 in (max(2, int(number * WARM_UP)), number):
                measured.append(_memory())
        (early_kb, early_maps), (late_kb, late_maps) = measured
        now = _resources()
        leaks = [f"{now[name]} instead of {before[name]} {name}" for name in before if now[name] != before[name]]
        leaks += [f"{path} is left" for path in _shared_files() - shared_before]
        if late_kb - early_kb > GROWTH_KB or late_maps > early_maps + 4:
            leaks.append("memory has grown")
        memory = f"RSS {late_kb - early_kb:+,} kB, {late_maps - early_maps:+} mappings"
        yield Row("starts", method, f"{number:,} starts and stops", memory, problem or ", ".join(leaks))


def _start_and_stop(pipeline: partial[custom.Stage], method: str, count: int, expected: str) -> str:
    """Start and stop a loader for the time number `count`. Return a problem, or ""."""
    loader = sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, num_workers=1, workers=sp.Workers(start_method=method))
    problem = "" if count % 4 == 3 or digest(next(loader)) == expected else f"start {count}: another first batch"
    if count % 2:
        loader.close()
    del loader  # every other loader is not closed, but garbage-collected
    leaks = descendants(os.getpid())
    return problem or (f"start {count}: processes {leaks} are left" if leaks else "")


def _resources() -> dict[str, int]:
    """Return the numbers of descendants and of open descriptors, by name."""
    gc.collect()
    return {"processes": len(descendants(os.getpid())), "descriptors": len(list(Path("/proc/self/fd").iterdir()))}


def _memory() -> tuple[int, int]:
    """Return the resident memory in kB, and the number of mappings."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]), len(Path("/proc/self/maps").read_text().splitlines())


def _shared_files() -> set[Path]:
    """Return the files in /dev/shm of this library and of Python's shared memory."""
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("savable", "psm_"))}


def trainer(shards: Path, folder: Path, kills: int) -> Iterator[Row]:
    """Kill a trainer at random moments, and resume it with another number of workers each time."""
    context = multiprocessing.get_context("fork")
    folder.mkdir()
    rng = random.Random(os.urandom(8))
    problem, resumed, repeated = "", 0, 0
    slots: dict[int, str] = {}
    for count in range(kills):
        log = folder / f"{count}.log"
        before = _checkpoint_slot(folder)
        outcome = _run_and_kill(context, shards, folder, log, count % 4, rng)
        problem = problem or outcome
        lines = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        resumed += bool(lines) and before > 0
        if lines and int(lines[0][0]) != before:
            problem = problem or f"kill {count}: resumed at slot {lines[0][0]}, but the checkpoint is of slot {before}"
        for slot, hashed in lines:
            repeated += int(slot) in slots
            if slots.setdefault(int(slot), hashed) != hashed:
                problem = problem or f"slot {slot} was another batch after kill {count}"
    with sp.SavableLoader(partial(soak_pipeline, str(shards)), seed=SEED, lanes=LANES) as loader:
        expected = [digest(batch) for batch in islice(loader, len(slots))]
    problem = problem or difference(expected, [slots.get(slot) for slot in range(len(slots))])
    compared = f"{len(slots):,} slots, {repeated} of them again"
    yield Row("trainer", "0 to 3 workers", f"{kills} kills, {resumed} resumed at a checkpoint", compared, problem)


def _run_and_kill(
    context: ForkContext, shards: Path, folder: Path, log: Path, num_workers: int, rng: random.Random
) -> str:
    """Run a trainer and kill it after a random time. Return the problem if it ended before, or left workers running."""
    log.touch()
    process = context.Process(target=_train, args=(shards, folder, log, num_workers))
    process.start()
    assert process.pid is not None
    time.sleep(rng.uniform(0.02, 0.8))
    workers = descendants(process.pid)
    kill(process.pid, os.getpid())
    process.join()
    if process.exitcode != -9:
        return f"the trainer ended by itself, with {process.exitcode}"
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        if time.monotonic() > deadline:
            return f"workers {workers} outlived their trainer by 10 s"
        time.sleep(0.005)
    return ""


def _train(shards: Path, folder: Path, log: Path, num_workers: int) -> None:
    """Train from the last checkpoint on, and log the hash of each slot's batch."""
    pipeline = partial(soak_pipeline, str(shards))
    with sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, num_workers=num_workers) as loader, log.open("a") as file:
        slot = _checkpoint_slot(folder)
        if slot:
            loader.load_state_dict(torch.load(folder / "checkpoint.pt")["data"])
        for batch in loader:
            print(slot, digest(batch), file=file, flush=True)
            slot += 1
            if slot % SAVE_EVERY == 0:
                torch.save({"slot": slot, "data": loader.state_dict()}, folder / "aside.pt")
                (folder / "aside.pt").replace(folder / "checkpoint.pt")


def _checkpoint_slot(folder: Path) -> int:
    """Return the slot of the last checkpoint; 0 if there is none."""
    path = folder / "checkpoint.pt"
    return int(torch.load(path)["slot"]) if path.exists() else 0
