"""What a shared batch costs: started by `forked_ranks`, which calls `main` on each rank.

Each peer takes batches of 9.6 MB by steps that read them and sleep. It writes, for the steps after the first ones, the
processor seconds in `next`, those of its workers, the seconds of a step, and the bytes (PSS) of batches in its memory
and that of its workers.
"""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support.toy_peers import descendants, groups_of

STEPS, WARM, STEP_S = 150, 20, 0.06


class Images(sp.TaskEncoder):
    """Random images of 1.2 MB, sorted in part to cost as much as decoding."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        image = rng.numpy.random((640, 480), dtype=np.float32)
        image[:32].sort(axis=1)
        return torch.from_numpy(image)


def pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    """Batches of eight images."""
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Images()), size=8)


def cpu_s(pid: int) -> float:
    """The processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def batch_bytes(pid: int) -> int:
    """A process's share of the memory of batches."""
    entries = re.split(r"\n(?=[0-9a-f]+-)", Path(f"/proc/{pid}/smaps").read_text())
    shared = [entry for entry in entries if "savable_pipeline batch" in entry.splitlines()[0]]
    return sum(int(re.search(r"^Pss:\s+(\d+)", entry, re.MULTILINE)[1]) << 10 for entry in shared)  # type: ignore[index]


def main(folder: str, shards: str) -> None:
    """Measure a group of all ranks; one of a single rank shares nothing."""
    dist.init_process_group("gloo")
    data, shared = groups_of(dist.get_world_size())
    made_by = partial(pipeline, shards)
    ranks = sp.Ranks.of(data, share=shared)
    loader = sp.SavableLoader(made_by, seed=3, lanes=4, num_workers=2, ranks=ranks)
    in_next, bytes_there, workers_s, started = 0.0, 0, 0.0, 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            workers = descendants(os.getpid())
            workers_s, started, in_next = sum(map(cpu_s, workers)), time.perf_counter(), 0.0
        before = time.thread_time()
        batch = next(loader)
        in_next += time.thread_time() - before
        batch.sum()
        if step % 10 == 9 and step > WARM:
            dist.barrier()
            bytes_there += sum(map(batch_bytes, [os.getpid(), *workers]))
            dist.barrier()
        else:
            time.sleep(STEP_S)
            dist.barrier()  # as the collectives of a step keep peers together
    spent = {"next_s": in_next, "workers_s": sum(map(cpu_s, workers)) - workers_s}
    seen = {**spent, "step_s": (time.perf_counter() - started) / STEPS, "bytes": bytes_there}
    torch.save(seen, Path(folder) / f"{dist.get_world_size()}_{dist.get_rank()}.pt")
    dist.barrier()
    loader.close()
    dist.destroy_process_group()
