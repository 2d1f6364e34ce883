"""Chains of killed runs whose ranks share batches, each in other groups: `killed_peers SHARDS FIRST LAST`.

For each seed, four ranks share by 4, then by 2, then not at all, and one process resumes alone. In each run, a rank or
a
worker is killed, before a step or at any moment. The command prints a line per seed, and its exit code is not 0 if a
batch differs from those of an uninterrupted run. All processes are forked from one that has imported torch.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import savable_pipeline as sp
from savable_pipeline.errors import SavableError
from savable_pipeline.stages.batch_difference import digest
from tests.support.forked_ranks import FORK, fork_ranks
from tests.support.peer_threads import unshared_loader
from tests.support.streams import next_hashes
from tests.support.toy_peers import descendants, groups_of

STEPS, LONGEST_S = 12, 1.2  # steps of a run, and the longest time before a kill


def main(folder: str, shards: str, state: str, size: str, seed: str) -> None:
    """Run one rank: take batches from a state on, and save it now and then, until this rank or another is killed.

    The first rank writes the state of all. Each batch is logged before the next is taken.
    """
    drawn, rank = random.Random(int(seed)), int(os.environ["RANK"])
    victim, step, hits_worker = drawn.randrange(4), drawn.randrange(1, STEPS), drawn.random() < 0.4
    moment, workers = drawn.choice([None, drawn.uniform(0, LONGEST_S)]), drawn.randrange(3)

    def kill() -> None:
        found = descendants(os.getpid()) if hits_worker else []
        with suppress(ProcessLookupError):
            os.kill(drawn.choice(found or [os.getpid()]), signal.SIGKILL)

    dist.init_process_group("gloo")
    data, shared = groups_of(int(size))
    dist.barrier()  # a rank that is killed earlier leaves gloo waiting
    if rank == victim and moment is not None:
        timer = threading.Timer(moment, kill)
        timer.daemon = True
        timer.start()
    with Path(folder, f"{rank}.batches").open("w") as file, suppress(SavableError, RuntimeError):
        ranks = sp.Ranks.of(data, share=shared)
        loader = unshared_loader(Path(shards), ranks=ranks, num_workers=workers, workers=sp.Workers(timeout=8))
        if Path(state).exists():
            loader.load_state_dict(torch.load(state))
        for taken in range(STEPS):
            if taken == step and rank == victim and moment is None:
                kill()
            batch = next(loader)
            print(loader.trace().slot, digest(batch), file=file, flush=True)
            if taken % 3 == 2:
                saved = loader.global_state_dict()
                if rank == 0:
                    torch.save(saved, f"{state}.new")
                    Path(f"{state}.new").replace(state)
    os._exit(0)


def _run(*arguments: str) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    fork_ranks(main, 4, *arguments)
    return 0


def _run_in_process(call: Callable[..., int], *arguments: Any) -> int:
    """Return the exit code of a function in a process of its own, so that this one has no threads."""
    process = FORK.Process(target=lambda: sys.exit(call(*arguments)))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def batches_of(folder: Path) -> list[tuple[int, str]]:
    """Return the slots and digests that the ranks of a run logged. A killed rank's last line may be incomplete."""
    lines = [line for file in folder.glob("*.batches") for line in file.read_text().splitlines(True)]
    return [(int(slot), found) for slot, found in (line.split() for line in lines if line.endswith("\n"))]


def chain(shards: str, seed: int) -> int:
    """Run one chain, and print its result. Returns 1 if a batch is wrong."""
    drawn, seen = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "state.pt")
        for size in (4, 2, 1):
            (run := Path(folder, str(size))).mkdir()
            _run_in_process(_run, str(run), shards, str(state), str(size), str(drawn.randrange(1 << 30)))
            seen += batches_of(run)
        resumed = unshared_loader(Path(shards))
        if state.exists():
            resumed.load_state_dict(torch.load(state))
    start = resumed.state_dict()["slot"]
    seen += enumerate(next_hashes(resumed, 3), start)
    expected = next_hashes(unshared_loader(Path(shards)), max(slot for slot, _ in seen) + 1)
    wrong = [f"slot {slot}" for slot, found in seen if found != expected[slot]]
    print(seed, len(seen), "batches, saved at", start, *wrong, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(sum(_run_in_process(chain, sys.argv[1], seed) for seed in range(int(sys.argv[2]), int(sys.argv[3]))))
