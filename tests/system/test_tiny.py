"""The whole thing in a minute: read, shuffle, encode, pack, batch, save, resume with other workers."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.testing import assert_exact_resume


class TinyEncoder(sp.TaskEncoder):
    """A sample's number and a random one; packs and batches are lists of them."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return sp.Skip("unlucky") if number % 13 == 0 else (number, rng.random(), float(torch.rand(())))

    def length(self, item: Any) -> int:
        return 1 + item[0] % 7

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    samples: custom.Stage = sp.TarShardReader(str(shards), lane)
    samples = sp.ShuffleBuffer(samples, size=20)
    items = sp.Encode(samples, TinyEncoder())
    packs = sp.OnlinePacker(items, max_length=20, open_packs=3)
    return sp.Batcher(packs, size=2)


def test_a_run_killed_after_five_batches_goes_on_as_if_it_had_not_been(make_shards: Any) -> None:
    build = partial(pipeline, make_shards([40, 1, 70]))
    with sp.SavableLoader(build, seed=7, lanes=6) as loader:
        expected = [batch for _, batch in zip(range(30), loader, strict=False)]

    checkpoint = io.BytesIO()
    with sp.SavableLoader(build, seed=7, lanes=6, num_workers=2) as loader:
        before = [batch for _, batch in zip(range(5), loader, strict=False)]
        torch.save({"data": loader.state_dict()}, checkpoint)

    checkpoint.seek(0)
    with sp.SavableLoader(build, seed=7, lanes=6, num_workers=1) as loader:
        loader.load_state_dict(torch.load(checkpoint, weights_only=True)["data"])
        after = [batch for _, batch in zip(range(25), loader, strict=False)]
    assert before + after == expected


@pytest.mark.long
def test_every_cut_and_chains_of_cuts_with_other_workers_and_ranks_are_exact(make_shards: Any) -> None:
    build = partial(pipeline, make_shards([40, 1, 70]))
    assert assert_exact_resume(build, lanes=12, workers=(0, 1, 2), world_sizes=(1, 2, 3, 4)) > 30
