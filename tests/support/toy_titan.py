"""One of four processes, two data-parallel ranks of two peers, with a fake of torchtitan's dataloader.

`forked_ranks` starts it with FOLDER and SHARDS. torchtitan passes each process its data-parallel rank and calls
`config.build`. Here, ranks 0 and 2 belong to the first data-parallel rank.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from savable_pipeline.stages.batch_difference import digest
from tests.support.peer_threads import unshared_loader


class BaseDataLoader:
    """torchtitan's base class, whose config builds its dataloader."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Settings of the dataloader."""

        def build(self, **given: Any) -> Any:
            """Build the dataloader."""
            from savable_pipeline.trainers.torchtitan import SavableDataLoader

            return SavableDataLoader(self, **given)  # type: ignore[arg-type]


def main(folder: str, shards: str) -> None:
    """Take six batches as torchtitan's trainer does, and write them to a file."""
    tyro: Any = ModuleType("tyro")
    tyro.conf = SimpleNamespace(Suppress="suppressed")
    titan: Any = ModuleType("torchtitan.components.dataloader")
    titan.BaseDataLoader = BaseDataLoader
    for name in ("torchtitan", "torchtitan.components"):
        sys.modules[name] = ModuleType(name)
    sys.modules |= {"tyro": tyro, titan.__name__: titan}
    from savable_pipeline.trainers.torchtitan import SavableDataLoader

    def make(*, ranks: Any, infinite: bool, tokenizer: None, seq_len: int, local_batch_size: int) -> Any:
        return unshared_loader(Path(shards), ranks=ranks, num_workers=1)

    dist.init_process_group("gloo")
    config = SavableDataLoader.Config(make=make, convert=lambda batch: (batch, batch["id"]))
    sizes = {"tokenizer": None, "seq_len": 8, "local_batch_size": 4}
    data = config.build(dp_world_size=2, dp_rank=dist.get_rank() % 2, **sizes)
    batches = iter(data)
    seen: dict[str, Any] = {"batches": [digest(next(batches)[0]) for _ in range(6)], "state": data.state_dict()}
    seen["workers"] = data.loader.stats()["num_workers"]
    torch.save(seen, Path(folder) / f"{dist.get_rank()}.pt")
    dist.barrier()
    data.close()
    dist.destroy_process_group()
