"""One of four processes, two data-parallel ranks of two peers each, under torchrun.

The command is `-m tests.support.toy_mesh SHARDS FOLDER HOW LAYOUT …`. HOW is "groups" or "mesh". With "mesh", the
loader
gets a slice of a device mesh, and each process saves a checkpoint of torch.distributed.checkpoint; both take seconds to
import. The results for each layout, "tp", "pp" or "cp", are in FOLDER/LAYOUT_R.pt.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.context_parallel import cut_context, join_context
from task_encoders.parts.token_packing import batch_tokens, document, pack_tokens, padded_length
from tests.support.streams import next_hashes

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 4}
STEPS, AFTER = 5, 4


@contextlib.contextmanager
def two_fake_ranks() -> Iterator[None]:
    """Initialize torch.distributed as rank 0 of 2, without a rank 1. Collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Letters(sp.TaskEncoder):
    """An encoder of text as bytes, with each document padded for two context-parallel ranks."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return document(torch.tensor(list(sample["txt"])))

    def length(self, item: Any) -> int:
        return padded_length(len(item["tokens"]), 4)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return pack_tokens(items, multiple=4)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return batch_tokens(items, pad=0, length=32)


def packed_pipeline(shards: str, lane: sp.Lane, *, epochs: int | None = None) -> custom.Stage:
    """Return packs of short texts."""
    items = sp.Encode(sp.TarShardReader(shards, lane, epochs=epochs), Letters())
    return sp.Batcher(sp.OnlinePacker(items, max_length=32, open_packs=3), size=2)


def find_groups(how: str, layout: str) -> tuple[Any, Any]:
    """Return a loader's `ranks`, with its data-parallel rank, and the group of the peers that share it."""
    if how == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", layout))
        return mesh["dp"], mesh.get_group(layout)
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    peers, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    return group, peers


def run(shards: str, folder: Path, how: str, layout: str) -> dict[str, Any]:
    """Train a few steps, save, and continue; then run a finite epoch, in "pp" on the first stage alone."""
    ranks, peers = find_groups(how, layout)
    loader = sp.SavableLoader(partial(packed_pipeline, shards), ranks=ranks, **SETTINGS)
    seen: dict[str, Any] = {"peer": dist.get_rank(peers), "before": next_hashes(loader, STEPS)}
    seen["state"], seen["global"] = loader.state_dict(), loader.global_state_dict()
    if how == "mesh":
        import torch.distributed.checkpoint as dcp

        dcp.save({"data": loader}, checkpoint_id=folder / f"checkpoint_{layout}")
    batches = [next(loader) for _ in range(AFTER)]
    seen["after"] = [digest(batch) for batch in batches]
    if layout == "cp":
        seen["joined"] = [digest(exchanged(batch, peers)) for batch in batches]
    finite = sp.SavableLoader(partial(packed_pipeline, shards, epochs=1), ranks=ranks, **SETTINGS)
    seen["epoch"] = next_hashes(finite, 1000) if layout != "pp" or seen["peer"] == 0 else None
    return seen


def exchanged(batch: dict[str, Any], peers: Any) -> dict[str, Any]:
    """Return the whole batch, gathered from the parts of the context-parallel ranks."""
    size = dist.get_world_size(peers)
    part = cut_context(batch, dist.get_rank(peers), size)
    assert part["tokens"].shape[1] * size == batch["tokens"].shape[1]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, part, group=peers)
    return join_context(parts)


def main(shards: str, folder: str, how: str, *layouts: str) -> None:
    dist.init_process_group("gloo")
    for layout in layouts:
        torch.save(run(shards, Path(folder), how, layout), Path(folder) / f"{layout}_{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
