"""An evaluation of a known length."""

from __future__ import annotations

from typing import Any

import torch

import savable_pipeline as sp
from savable_pipeline import custom


class Numbers(sp.TaskEncoder):
    """An encoder whose batch is a dict of the samples' numbers, and of random numbers for each of them and for the
    batch.
    """

    global_rng = False
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], rng.random()

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"id": torch.tensor([number for number, _ in items]), "drawn": [drawn for _, drawn in items]}


def counted_pipeline(shards: str, lane: sp.Lane, *, size: int = 2, shuffle: bool = True) -> custom.Stage:
    """Return a reader, an encoder and a batcher, with one row per sample."""
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane, epochs=1, shuffle=shuffle), Numbers()), size=size)
