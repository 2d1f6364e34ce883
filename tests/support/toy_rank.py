"""One rank of a distributed run, by torchrun or `forked_ranks`: `tests.support.toy_rank SHARDS FOLDER`.

It does everything below in order, and writes its results to FOLDER/rankR_of_W.pt. If FOLDER/checkpoint exists, it
continues from there, else it saves one.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import savable_pipeline as sp
from tests.support.streams import next_hashes
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 12}
STEPS = 5  # before the checkpoint: 5 steps of 2 ranks end at slot 10, which 4 ranks do not divide


def main(shards: str, into: str) -> None:
    folder = Path(into)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen: dict[str, Any] = {}
    endless, finite = partial(toy_pipeline, shards), partial(toy_pipeline, shards, epochs=1)

    # A finite run to its end, twice, and a step of the third epoch; with workers at two ranks, without at four.
    with sp.SavableLoader(finite, num_workers=1 if world_size == 2 else 0, **SETTINGS) as loader:
        seen["epochs"] = [next_hashes(loader, 1000), next_hashes(loader, 1000), next_hashes(loader, 1)]
        seen["end"] = {**loader.state_dict()}

    # Checkpoints of torch.distributed.checkpoint, which fill a template of the own state with the saved one.
    counted = partial(counted_pipeline, shards)
    runs = {"endless": (endless, {}), "finite": (finite, {}), "padded": (counted, {"tail": "pad"})}
    for name, (pipeline, more) in runs.items():
        loader = sp.SavableLoader(pipeline, **SETTINGS, **more)
        checkpoint = folder / f"checkpoint_{name}"
        if checkpoint.exists():
            state = {"data": loader.state_dict()}
            dcp.load(state, checkpoint_id=checkpoint)
            loader.load_state_dict(state["data"])
        else:
            next_hashes(loader, STEPS)
            seen[f"global_{name}"] = loader.global_state_dict()
            seen[f"own_{name}"] = loader.state_dict()
            dist.barrier()
            dcp.save({"data": loader.state_dict()}, checkpoint_id=checkpoint)
        seen[name] = next_hashes(loader, 6 if name == "endless" else 1000)
        seen[f"{name}_next"] = [] if name == "endless" else next_hashes(loader, 1000)

    # Evaluations that the ranks stop at different batches.
    for name, pipeline in (("counted", counted), ("packed", finite)):
        with sp.SavableLoader(pipeline, on_iter="restart", tail="pad", num_workers=rank % 2, **SETTINGS) as loader:
            seen[f"passes_{name}"] = [next_hashes(loader, n) for n in (1 + rank, 1000, 2 * rank, 1, 1000)]
    torch.save(seen, folder / f"rank{rank}_of_{world_size}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
