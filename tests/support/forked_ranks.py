"""Ranks as torchrun starts them, forked from one process that has imported torch once.

It is started by `python -m tests.support.forked_ranks MODULE WORLD_SIZES ARGUMENT …` and calls on each rank
`MODULE.main(ARGUMENT, …)`, for one world size after the other: "2,4".
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


def fork_ranks(module: str, world_size: int, *arguments: str) -> list[int | None]:
    """The exit codes of the ranks."""
    main = import_module(module).main
    store: Any = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(main, rank, world_size, store.port, arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timedelta(minutes=2).total_seconds())
    return [process.exitcode for process in ranks]


def _rank(main: Any, rank: int, world_size: int, port: int, arguments: tuple[str, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    main(*arguments)


if __name__ == "__main__":
    for world_size in map(int, sys.argv[2].split(",")):
        codes = fork_ranks(sys.argv[1], world_size, *sys.argv[3:])
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
