"""Ranks with torchrun's environment, forked from one process that has imported torch once.

The command is `python -m tests.support.forked_ranks MODULE WORLD_SIZES ARGUMENT …`. It calls
`MODULE.main(ARGUMENT, …)` on each rank, for one world size after the other, such as "2,4".
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


def fork_ranks(main: Callable[..., Any], world_size: int, *arguments: str) -> list[int | None]:
    """Return the exit codes of the ranks: None for a rank that did not end and was killed."""
    ports = [FORK.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        FORK.Process(target=_rank, args=(main, rank, world_size, port, arguments))
        for rank, (port, _) in enumerate(ports)
    ]
    for process in ranks:
        process.start()
    # Started after the forks, because its threads may hold a lock on which a forked process would wait forever.
    store: Any = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, told in ports:
        told.send(store.port)
    for process in ranks:
        process.join(timedelta(minutes=2).total_seconds())
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


def _rank(main: Any, rank: int, world_size: int, port: Any, arguments: tuple[str, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.recv()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    main(*arguments)


def _run(module: str, world_size: int, *arguments: str) -> None:
    codes = fork_ranks(import_module(module).main, world_size, *arguments)
    if any(code != 0 for code in codes):
        sys.exit(f"the ranks ended with {codes}")


if __name__ == "__main__":
    for world_size in map(int, sys.argv[2].split(",")):
        run = FORK.Process(target=_run, args=(sys.argv[1], world_size, *sys.argv[3:]))
        run.start()  # in a process of its own, so that this one has no threads
        run.join()
        if run.exitcode:
            sys.exit(run.exitcode)
