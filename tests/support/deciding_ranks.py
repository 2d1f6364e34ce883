"""Ranks that decide on equal lengths, then on different ones: `tests.support.deciding_ranks SHARDS FOLDER`.

Each writes what it was told, and its batches, to FOLDER/rankR.json.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from tests.support.toy_pipelines import toy_pipeline

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 4}
LENGTHS = [(7, 6), (9, 9), (8, 10_000)]  # lengths on which ranks 0 and 1 decide, in order


def main(shards: str, folder: str) -> None:
    """Run one rank of two."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    said: list[int | str] = []
    with sp.SavableLoader(partial(toy_pipeline, shards), **SETTINGS) as loader:
        batches = [digest(next(loader))]
        for lengths in LENGTHS:
            try:
                said.append(loader.reconfigure(max_length=lengths[rank]))
            except ValueError as error:
                said.append(str(error))
            batches += [digest(next(loader)) for _ in range(6)]
        slot = loader.global_state_dict()["slot"]
    Path(folder, f"rank{rank}.json").write_text(json.dumps({"said": said, "batches": batches, "slot": slot}))
    dist.barrier()
    dist.destroy_process_group()
