"""Ranks that share batches, as processes that `forked_ranks` starts with a function of this file and its arguments.

Each rank writes the function's result to FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import savable_pipeline as sp
from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.savable_loader import run_of
from tests.support.peer_threads import unshared_loader
from tests.support.streams import next_hashes


def descendants(pid: int) -> list[int]:
    """Return the processes below one."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def groups_of(size: int) -> tuple[Any, Any]:
    """Return the data group and the sharing group of this process, where `size` consecutive processes share."""
    world = dist.get_world_size()
    data = [list(range(peer, world, size)) for peer in range(size)]
    shared = [list(range(first, first + size)) for first in range(0, world, size)]
    return dist.new_subgroups_by_enumeration(data)[0], dist.new_subgroups_by_enumeration(shared)[0]


def in_groups(shards: str, size: int, **settings: Any) -> sp.SavableLoader:
    """Return a loader of ranks of which `size` consecutive ones share batches."""
    data, shared = groups_of(size)
    return unshared_loader(Path(shards), ranks=sp.Ranks.of(data, share=shared), **settings)


def in_mesh(shards: str, **settings: Any) -> sp.SavableLoader:
    """Return a loader of two data-parallel ranks of two peers, by a device mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return unshared_loader(Path(shards), ranks=sp.Ranks.of(mesh, share=("tp",)), **settings)


def train(shards: str, how: str, workers: str) -> dict[str, Any]:
    """Take some batches, save, and take more; then run one epoch, at whose end the ranks vote."""
    make = in_mesh if how == "mesh" else lambda shards, **settings: in_groups(shards, int(how), **settings)
    with make(shards, num_workers=int(workers)) as loader:
        seen: dict[str, Any] = {"before": next_hashes(loader, 6)}
        seen["state"], seen["global"] = loader.state_dict(), loader.global_state_dict()
        seen["after"] = next_hashes(loader, 4)
        seen["links"] = [reader.is_local for reader in run_of(loader).backend._readers]  # type: ignore[attr-defined]
    with make(shards, num_workers=int(workers), epochs=1) as finite:
        seen["epoch"] = next_hashes(finite, 1000)
    return seen


STOPPED_TIMEOUT_S = 8.0  # time limit of a run in which a rank stops


def die(shards: str, victim: str, workers: str, kind: str = "SIGKILL") -> dict[str, Any]:
    """Take batches of one group until the victim gets a signal. The last survivor kills a victim that stopped."""
    store: Any = dist.distributed_c10d._get_default_store()
    timeout = sp.Workers(timeout=STOPPED_TIMEOUT_S if kind == "SIGSTOP" else 600)
    with in_groups(shards, dist.get_world_size(), num_workers=int(workers), workers=timeout) as loader:
        seen: dict[str, Any] = {"batches": next_hashes(loader, 3)}
        if dist.get_rank() == int(victim):
            torch.save(seen, f"{shards}/../{victim}.pt")
            store.set("victim", str(os.getpid()))
            os.kill(os.getpid(), getattr(signal, kind))
        started = time.monotonic()
        try:
            while True:
                seen["batches"] += next_hashes(loader, 1)
        except SavableError as error:
            seen["error"] = str(error)
        seen["state"], seen["waited_s"] = loader.state_dict(), time.monotonic() - started
        if store.add("survivors", 1) == dist.get_world_size() - 1:
            os.kill(int(store.get("victim")), signal.SIGKILL)
    return seen


def wrong_groups(shards: str) -> dict[str, Any]:
    """Open a loader whose data groups do not fit the sharing groups."""
    data, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    shared, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    dist.barrier()
    errors = []
    for _ in range(2):  # at the first attempt, no rank has published its groups
        try:
            sp.Ranks.of(data, share=shared)
        except ValueError as error:
            errors.append(str(error))
        dist.barrier()
    return {"errors": errors}


def main(function: str, folder: str, *arguments: str) -> None:
    """Run a function of this file."""
    dist.init_process_group("gloo")
    seen = globals()[function](*arguments)
    torch.save(seen, Path(folder) / f"{dist.get_rank()}.pt")
    if function != "die":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    main(*sys.argv[1:])
