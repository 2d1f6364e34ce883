"""The promise, by property: random data, random pipelines, random cuts, chains of resumes, other workers and ranks."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import write_numbered_shards
from tests.toy_pipelines import SOURCES, numbers, toy_pipeline

shard_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=6)
pipelines = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "block_size": st.integers(1, 9),
        "window": st.sampled_from([None, 1, 2, 32]),
        "buffer": st.sampled_from([None, 1, 2, 7, 30, 200]),
        "blend": st.sampled_from([None, None, "readers", "branches", "nested"]),
        "pack": st.sampled_from([None, "buckets", "sequential", "first_fit", "best_fit", "first_fit_decreasing"]),
        "max_length": st.integers(4, 40),
        "max_images": st.sampled_from([None, 2, 5]),
        "too_long": st.sampled_from(["truncate", "split"]),
        "max_held_bytes": st.sampled_from([0, 1500, 1 << 30]),
        "open_packs": st.integers(1, 4),
        "size": st.integers(1, 5),
        "skip": st.sampled_from([0, 2, 7]),
        "fan_out": st.sampled_from([0, 1, 5]),
        "drop_last": st.booleans(),
    }
)
many = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
few = settings(  # each example starts many processes: report the one found, do not look for a smaller
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def with_enough(sizes: list[int], chosen: dict[str, Any]) -> list[int]:
    """Sample 1 is never skipped and 5 samples make one that is not; so every dataset gets five more."""
    return [*sizes, 5] if chosen["skip"] else sizes


@many
@given(sizes=shard_sizes, chosen=pipelines, seed=st.integers(0, 2**64 - 1), lanes=st.sampled_from([1, 2, 12]))
def test_every_cut_of_an_endless_run_and_chains_of_resumes_are_exact(
    sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), with_enough(sizes, chosen))
        pipeline = partial(toy_pipeline, folder, **chosen)
        worlds = [world for world in (1, 2, 3, 4) if lanes % world == 0]
        assert_exact_resume(pipeline, seed=seed, lanes=lanes, steps=20, world_sizes=worlds)


@pytest.mark.timeout(1200)  # 12 examples start hundreds of processes: minutes where all cores are busy
@few
@given(sizes=shard_sizes, chosen=pipelines, seed=st.integers(0, 2**32))
def test_chains_of_resumes_with_other_workers_and_ranks_are_exact(
    sizes: list[int], chosen: dict[str, Any], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), with_enough(sizes, chosen))
        pipeline = partial(toy_pipeline, folder, **chosen)
        assert_exact_resume(
            pipeline, seed=seed, steps=20, workers=(0, 1, 2, 3), world_sizes=(1, 2, 3, 4), chains=1, after=1
        )


@pytest.mark.timeout(1200)  # 12 examples start hundreds of processes: minutes where all cores are busy
@few
@given(size=st.integers(60, 200), chosen=pipelines, epochs=st.integers(1, 2), seed=st.integers(0, 2**32))
def test_finite_runs_and_the_epochs_after_them_are_exact(
    size: int, chosen: dict[str, Any], epochs: int, seed: int
) -> None:
    chosen = {**chosen, "drop_last": False, "skip": 0, "block_size": min(chosen["block_size"], 4)}
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), [size, 1, 3])
        pipeline = partial(toy_pipeline, folder, epochs=epochs, **chosen)
        assert_exact_resume(pipeline, seed=seed, lanes=6, steps=40, workers=(0, 1, 2), world_sizes=(1, 2, 3), after=2)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods_are_exact(make_shards: Any, method: str) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    with sp.SavableLoader(pipeline, seed=3, lanes=12) as loader:
        expected = [batch for _, batch in zip(range(12), loader, strict=False)]
        reference = [str(batch) for batch in expected]
    state = None
    found: list[str] = []
    for steps in (5, 7):
        with sp.SavableLoader(pipeline, seed=3, lanes=12, num_workers=2, multiprocessing_context=method) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found += [str(batch) for _, batch in zip(range(steps), loader, strict=False)]
            state = loader.state_dict()
    assert found == reference


@many
@given(sizes=shard_sizes, chosen=pipelines, lanes=st.integers(1, 13), seed=st.integers(0, 2**32))
def test_an_epoch_gives_every_sample_once_over_all_lanes(
    sizes: list[int], chosen: dict[str, Any], lanes: int, seed: int
) -> None:
    chosen = {**chosen, "skip": 0, "fan_out": 0, "drop_last": False}
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), sizes)
        given = Counter[int]()
        for lane in range(lanes):
            for batch in toy_pipeline(folder, sp.Lane(lane, lanes, seed), epochs=1, **chosen):
                given.update(numbers(batch))
        assert given == Counter(dict.fromkeys(range(sum(sizes)), SOURCES[chosen["blend"]]))


@pytest.mark.parametrize(
    ("pack", "blend"), [("best_fit", None), ("sequential", "branches"), ("first_fit_decreasing", "readers")]
)
def test_a_run_that_is_cut_all_the_time_gives_every_sample_once(make_shards: Any, pack: str, blend: str | None) -> None:
    how = {"pack": pack, "blend": blend, "max_length": 8, "too_long": "split"}
    pipeline = partial(toy_pipeline, str(make_shards([30, 80, 1, 50])), epochs=1, skip=0, fan_out=0, size=1, **how)
    given = Counter[int]()
    state, draw = None, np.random.default_rng(0)
    ended = False
    while not ended:
        with sp.SavableLoader(pipeline, seed=5, lanes=1, num_workers=int(draw.integers(0, 3))) as loader:
            if state is not None:
                loader.load_state_dict(state)
            wanted = int(draw.integers(0, 4))
            batches = [batch for _, batch in zip(range(wanted), loader, strict=False)]
            for batch in batches:
                given.update(numbers(batch))
            ended = len(batches) < wanted
            state = loader.state_dict()
    assert given == Counter(dict.fromkeys(range(161), SOURCES[blend]))
