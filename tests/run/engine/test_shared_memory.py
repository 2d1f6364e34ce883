"""What forked workers share with the trainer stays shared."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import savable_pipeline as sp
from savable_pipeline import custom


class _LookedAt(sp.TaskEncoder):
    """Items that say how many objects a garbage collection looks at."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return len(gc.get_objects())

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def _pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), _LookedAt(), check=0.0), size=1)


def test_garbage_collection_in_a_forked_worker_ignores_the_trainers_objects(make_shards: Any) -> None:
    owned: list[list[int]] = [[] for _ in range(50_000)]
    with sp.SavableLoader(partial(_pipeline, str(make_shards([8]))), seed=1, lanes=2, num_workers=1) as loader:
        assert next(iter(loader))[0] < len(owned) / 2
    assert len(gc.get_objects()) > len(owned)  # the trainer's own collections are as before
