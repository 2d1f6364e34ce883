"""Stands in for torchrun in tests: `python -m tests.support.forked_ranks N FILE ARGUMENT …`.

It imports torch once and forks the ranks, with the variables of torchrun in their environment: torchrun would import it
in each of them.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from functools import partial

import torch.distributed.checkpoint
import torch.nn.parallel

import savable_pipeline  # noqa: F401
from tests.trainers.drive import child, ended


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run(rank: int, world_size: int, port: int, command: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    sys.stdout.flush()


def main(world_size: int, command: list[str]) -> None:
    port = free_port()
    children = [child(partial(run, rank, world_size, port, command)) for rank in range(world_size)]
    if sum(ended(pid) != 0 for pid in children):
        raise SystemExit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
