"""The promise, by property: random data, random pipelines, random cuts, chains of resumes, other workers and ranks.

Very few examples each in the suite; `pytest --hypothesis-profile long tests/system/test_exact_resume.py` searches about
an hour, and with `-m long` too: under other start methods, killed workers and real ranks.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import savable_pipeline as sp
from tests.support.disturbed_runs import check_disturbed
from tests.support.draws import IS_LONG, scaled_examples
from tests.support.exact_search import (
    check_chains,
    check_endless,
    check_excluded_from_a_cut_on,
    check_excluded_in_an_epoch,
    check_finite,
    check_once,
    exclusions,
    pipelines,
    shard_sizes,
)
from tests.support.toy_pipelines import numbers, reads_of, toy_pipeline

pytestmark = pytest.mark.timeout(3 * settings().max_examples)  # 300 s, and longer for a long search
seeds = st.integers(0, 2**63)
disturbances = st.fixed_dictionaries(
    {
        "ids": st.booleans(),
        "ledger": st.booleans(),
        "epoch_slots": st.sampled_from([None, 12, 36]),
        "skips": st.booleans(),
        "grows": st.booleans(),
    }
)


@scaled_examples(12, suite=5)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds, lanes=st.sampled_from([1, 2, 12]))
def test_every_interruption_and_chain_of_resumes_of_an_endless_run_is_exact(
    sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int
) -> None:
    check_endless(sizes, chosen, seed, lanes, **({} if IS_LONG else {"after": 2}))


@scaled_examples(3, suite=2, shrink=False)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds)
def test_chains_of_resumes_with_other_workers_and_ranks_are_exact(
    sizes: list[int], chosen: dict[str, Any], seed: int
) -> None:
    check_chains(sizes, chosen, seed)


@scaled_examples(2, shrink=False)
@given(
    size=st.integers(60, 200),
    chosen=pipelines,
    epochs=st.sampled_from([1, 1.5, 2, 2.5]),
    seed=seeds,
    tail=st.sampled_from(["stop", "pad"]),
)
def test_finite_runs_and_the_epochs_after_them_are_exact(
    size: int, chosen: dict[str, Any], epochs: float, seed: int, tail: str
) -> None:
    check_finite(size, chosen, epochs, seed, tail, **({} if IS_LONG else {"steps": 24, "after": 1, "chains": 1}))


@scaled_examples(3, suite=2, shrink=False)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds, how=disturbances)
def test_runs_with_skips_ledgers_and_joining_shards_are_exact(
    sizes: list[int], chosen: dict[str, Any], seed: int, how: dict[str, Any]
) -> None:
    check_disturbed(sizes, chosen, seed, slots=24, most_workers=0, again=1, **how)


@scaled_examples(10, suite=5)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds, lanes=st.integers(1, 3), excluded=exclusions)
def test_samples_excluded_at_a_resume_are_not_yielded_and_no_other_moves(
    sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int, excluded: dict[str, Any]
) -> None:
    check_excluded_from_a_cut_on(sizes, chosen, seed, lanes=lanes, **excluded)


@scaled_examples(15, suite=8)
@given(size=st.integers(40, 150), chosen=pipelines, seed=seeds, excluded=exclusions)
def test_epoch_with_samples_excluded_at_a_resume_yields_all_others(
    size: int, chosen: dict[str, Any], seed: int, excluded: dict[str, Any]
) -> None:
    check_excluded_in_an_epoch(size, chosen, seed, **excluded)


@scaled_examples(20, suite=8)
@given(sizes=shard_sizes, chosen=pipelines, lanes=st.integers(1, 13), seed=seeds)
def test_epoch_yields_every_sample_once_over_all_lanes(
    sizes: list[int], chosen: dict[str, Any], lanes: int, seed: int
) -> None:
    check_once(sizes, chosen, lanes, seed)


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods_are_exact(make_shards: Any, method: str) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    with sp.SavableLoader(pipeline, seed=3, lanes=12) as loader:
        expected = [batch for _, batch in zip(range(12), loader, strict=False)]
        reference = [str(batch) for batch in expected]
    state = None
    found: list[str] = []
    for steps in (5, 7):
        with sp.SavableLoader(
            pipeline, seed=3, lanes=12, num_workers=2, workers=sp.Workers(start_method=method)
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found += [str(batch) for _, batch in zip(range(steps), loader, strict=False)]
            state = loader.state_dict()
    assert found == reference


@pytest.mark.parametrize(
    ("sizes", "pack", "blend"),
    [
        ([12, 20, 1, 9], "best_fit", None),
        pytest.param([30, 80, 1, 50], "best_fit", None, marks=pytest.mark.long),
        pytest.param([30, 80, 1, 50], "sequential", "items", marks=pytest.mark.long),
        pytest.param([30, 80, 1, 50], "first_fit_decreasing", "samples", marks=pytest.mark.long),
    ],
)
def test_continuously_interrupted_run_yields_every_sample_once(
    make_shards: Any, sizes: list[int], pack: str, blend: str | None
) -> None:
    how = {"pack": pack, "blend": blend, "max_length": 8, "too_long": "split"}
    pipeline = partial(toy_pipeline, str(make_shards(sizes)), epochs=1, skip=0, fan_out=0, size=1, **how)
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
            state = loader.state_dict()
            ended = state["epoch"] > 0
    assert given == Counter(dict.fromkeys(range(sum(sizes)), reads_of(blend)))


# Longer.


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@scaled_examples(4, shrink=False)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds)
def test_chains_of_resumes_with_other_start_methods_are_exact(
    sizes: list[int], chosen: dict[str, Any], seed: int, method: str
) -> None:
    check_chains(sizes, chosen, seed, workers=(0, 1, 2), world_sizes=(1, 2), start_method=method)


@pytest.mark.long
@scaled_examples(10, shrink=False)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds, how=disturbances)
def test_chains_of_resumes_with_killed_workers_are_exact(
    sizes: list[int], chosen: dict[str, Any], seed: int, how: Any
) -> None:
    check_disturbed(sizes, chosen, seed, kills=True, **how)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3])
def test_finite_runs_of_real_ranks_are_exact(world_size: int, tmp_path: Path) -> None:
    """Ranks under torchrun: random pipelines, each cut at random steps, resumed by all ranks, over epochs' ends."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    seed = random.randrange(1 << 32)
    print("seed", seed)
    arguments = ["-m", "tests.support.ranks_search", str(tmp_path), str(seed), "20"]
    run = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("exact") == 20
