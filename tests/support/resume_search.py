"""The search for a batch that differs: random data, random pipelines, random cuts, chains, other workers and ranks."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import write_numbered_shards
from tests.support.toy_pipelines import SOURCES, numbers, toy_pipeline

shard_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=6)
pipelines = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "block_size": st.integers(1, 9),
        "window": st.sampled_from([None, 1, 2, 32]),
        "buffer": st.sampled_from([None, 1, 2, 7, 30, 200]),
        "blend": st.sampled_from([None, None, "readers", "branches", "nested", "ending"]),
        "pack": st.sampled_from([None, "buckets", "sequential", "first_fit", "best_fit", "first_fit_decreasing"]),
        "max_length": st.integers(4, 40),
        "max_images": st.sampled_from([None, 2, 5]),
        "too_long": st.sampled_from(["truncate", "split"]),
        "max_held_bytes": st.sampled_from([0, 1500, 1 << 30]),
        "open_packs": st.integers(1, 4),
        "size": st.integers(1, 5),
        "skip": st.sampled_from([0, 5, 7]),
        "fan_out": st.sampled_from([0, 1, 5]),
        "drop_last": st.booleans(),
        "max_cost": st.sampled_from([None, None, 30, 300]),
        "hold": st.sampled_from([None, None, 1, 3, 8]),
        "tells": st.booleans(),
        "own": st.sampled_from([(), (), ("samples",), ("items",), ("batches",), ("samples", "items", "batches")]),
    }
)


def examples(count: int, *, shrink: bool = True) -> settings:
    """Settings for `count` examples. Those that start many processes report the one found, without a smaller one."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else []))
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), phases=phases)


def with_enough(sizes: list[int], chosen: dict[str, Any], lanes: int) -> list[int]:
    """Sizes with which each lane gets samples that the encoder does not skip, in file order too.

    In file order all passes of a lane may be alike: it has at least two blocks, which are not skipped both, since no
    number of lanes is a multiple of 5 or 7.
    """
    return [*sizes, 2 * lanes * chosen["block_size"] + 5] if chosen["skip"] else sizes


def check_endless(sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int) -> None:
    """Every cut of 20 steps of an endless run, and chains, in one process with all numbers of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), with_enough(sizes, chosen, lanes))
        pipeline = partial(toy_pipeline, folder, **chosen)
        worlds = [world for world in (1, 2, 3, 4) if lanes % world == 0]
        assert_exact_resume(pipeline, seed=seed, lanes=lanes, steps=20, world_sizes=worlds)


def check_chains(sizes: list[int], chosen: dict[str, Any], seed: int, **settings: Any) -> None:
    """Chains of resumes of an endless run in 0 to 3 workers."""
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), with_enough(sizes, chosen, lanes=12))
        pipeline = partial(toy_pipeline, folder, **chosen)
        wide: dict[str, Any] = {"workers": (0, 1, 2, 3), "world_sizes": (1, 2, 3, 4)}
        assert_exact_resume(pipeline, seed=seed, steps=20, chains=1, after=1, **{**wide, **settings})


def check_finite(size: int, chosen: dict[str, Any], epochs: int, seed: int) -> None:
    """Every cut of a finite run and of the epochs after it, and chains."""
    chosen = {**chosen, "drop_last": False, "skip": 0, "block_size": min(chosen["block_size"], 4)}
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), [size, 1, 3])
        pipeline = partial(toy_pipeline, folder, epochs=epochs, **chosen)
        assert_exact_resume(pipeline, seed=seed, lanes=6, steps=40, workers=(0, 1, 2), world_sizes=(1, 2, 3), after=2)


def check_once(sizes: list[int], chosen: dict[str, Any], lanes: int, seed: int) -> None:
    """An epoch gives each sample once over all lanes."""
    chosen = {**chosen, "skip": 0, "fan_out": 0, "drop_last": False, "own": ()}
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), sizes)
        given = Counter[int]()
        for lane in range(lanes):
            for batch in toy_pipeline(folder, sp.Lane(lane, lanes, seed), epochs=1, **chosen):
                given.update(numbers(batch))
        assert given == Counter(dict.fromkeys(range(sum(sizes)), SOURCES[chosen["blend"]]))
