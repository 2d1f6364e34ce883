"""A rank that torchrun restarts several times, with varying numbers of ranks.

The command is `-m tests.support.toy_elastic SHARDS FOLDER`. The model of FOLDER/checkpoint.pt counts by slot what it
was
trained on, with the hashes of these batches. It trains until a file FOLDER/enough exists.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from tests.support.toy_pipelines import toy_pipeline

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 12}
MOST, EVERY = 20_000, 3  # number of slots that can be counted; steps between two checkpoints


def main(shards: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (folder / f"{rank}_of_{world_size}.pid").write_text(str(os.getpid()))
    loader = sp.SavableLoader(partial(toy_pipeline, shards), **SETTINGS)
    saved = folder / "checkpoint.pt"
    model = torch.zeros(2, MOST, dtype=torch.int64)
    slot = 0
    if saved.exists():
        state = torch.load(saved)
        model, slot = state["model"], state["data"]["slot"]
        loader.load_state_dict(state["data"])
    step, enough = 0, False
    while not enough:
        own = slot + (rank - slot) % world_size
        gradient = torch.zeros_like(model)
        gradient[:, own] = torch.tensor([1, int(digest(next(loader))[:10], 16)])
        gradient[0, -1] = (folder / "enough").exists()
        dist.all_reduce(gradient)
        enough, gradient[0, -1] = bool(gradient[0, -1]), 0
        model, slot, step = model + gradient, slot + world_size, step + 1
        if step % EVERY == 0 or enough:
            data = loader.global_state_dict()
            if rank == 0:
                torch.save({"model": model, "data": data}, saved.with_suffix(".aside"))
                saved.with_suffix(".aside").replace(saved)
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
