"""Pipelines for `savable verify-resume` over the shards in $SHARDS: a correct one, and one with each mistake."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import savable_pipeline as sp
from savable_pipeline import custom


class Toy(sp.TaskEncoder):
    """An encoder of a sample's number and `value`. A batch is a list of items, so torch is not needed."""

    global_rng = False

    def __init__(self, value: Callable[[sp.Rng], Any]) -> None:
        self.value = value

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"], "value": self.value(rng)}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class Counter:
    """An encoder that counts its calls."""

    calls = 0

    def __call__(self, rng: sp.Rng) -> int:
        self.calls += 1
        return self.calls


class Noise(Toy):
    """An encoder of images, uint8 (3, 8, 8), from torch's unseeded generator."""

    def __init__(self) -> None:
        super().__init__(self.draw)

    def draw(self, rng: sp.Rng) -> Any:
        import torch

        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        return torch.randint(256, (3, 8, 8), dtype=torch.uint8, generator=generator)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        import torch

        return {"image": torch.stack([item["value"] for item in items])}


def pipeline_of(encoder: sp.TaskEncoder, epochs: int | None = None) -> Callable[[sp.Lane], custom.Stage]:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.TarShardReader(os.environ["SHARDS"], lane, epochs=epochs)
        return sp.Batcher(sp.Encode(samples, encoder, check=0.0), size=3)

    return pipeline


OWN = random.Random()
good = pipeline_of(Toy(lambda rng: rng.random()), epochs=1)
keeps_state = pipeline_of(Toy(Counter()))
reads_the_clock = pipeline_of(Toy(lambda rng: time.time_ns()))
iterates_a_set = pipeline_of(Toy(lambda rng: list({"amber", "birch", "cedar", "dusk", "ember", "fern", "gold"})))
unseeded_numpy = pipeline_of(Toy(lambda rng: np.random.default_rng().random()))
unseeded_python = pipeline_of(Toy(lambda rng: OWN.random()))
unseeded_torch = pipeline_of(Noise())


def make_loader() -> sp.SavableLoader:
    print("what the user's code prints is no answer")
    return sp.SavableLoader(good, seed=3, lanes=2, num_workers=1, ledger=f"{os.environ.get('SHARDS')}-ledger")


number = 7
