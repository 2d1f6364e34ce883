"""The promise, searched for long: users' own stages, sources that end, all start methods, real ranks.

`pytest -m long tests/system/test_resume_search.py` runs it: about 20 minutes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.exclude_search import check_excluded_from_a_cut_on, check_excluded_in_an_epoch, exclusions
from tests.support.resume_search import (
    check_chains,
    check_endless,
    check_finite,
    check_once,
    examples,
    pipelines,
    shard_sizes,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
seeds = st.integers(0, 2**64 - 1)


@examples(150)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds, lanes=st.sampled_from([1, 2, 12]))
def test_endless_runs(sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int) -> None:
    check_endless(sizes, chosen, seed, lanes)


@examples(25, shrink=False)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds)
def test_chains_in_other_workers(sizes: list[int], chosen: dict[str, Any], seed: int) -> None:
    check_chains(sizes, chosen, seed)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@examples(4, shrink=False)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds)
def test_chains_under_other_start_methods(sizes: list[int], chosen: dict[str, Any], seed: int, method: str) -> None:
    check_chains(sizes, chosen, seed, workers=(0, 1, 2), world_sizes=(1, 2), multiprocessing_context=method)


@examples(15, shrink=False)
@given(size=st.integers(60, 200), chosen=pipelines, epochs=st.integers(1, 2), seed=seeds)
def test_finite_runs(size: int, chosen: dict[str, Any], epochs: int, seed: int) -> None:
    check_finite(size, chosen, epochs, seed)


@examples(150)
@given(sizes=shard_sizes, chosen=pipelines, seed=seeds, lanes=st.integers(1, 3), excluded=exclusions)
def test_excluded_from_a_cut_on(
    sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int, excluded: dict[str, Any]
) -> None:
    check_excluded_from_a_cut_on(sizes, chosen, seed, lanes=lanes, **excluded)


@examples(400)
@given(size=st.integers(40, 150), chosen=pipelines, seed=seeds, excluded=exclusions)
def test_excluded_in_an_epoch(size: int, chosen: dict[str, Any], seed: int, excluded: dict[str, Any]) -> None:
    check_excluded_in_an_epoch(size, chosen, seed, **excluded)


@examples(100)
@given(sizes=shard_sizes, chosen=pipelines, lanes=st.integers(1, 13), seed=seeds)
def test_each_sample_comes_once(sizes: list[int], chosen: dict[str, Any], lanes: int, seed: int) -> None:
    check_once(sizes, chosen, lanes, seed)


@pytest.mark.parametrize("world_size", [2, 3])
def test_finite_runs_of_real_ranks(world_size: int, tmp_path: Path) -> None:
    """Ranks under torchrun: random pipelines, each cut at random steps, resumed by all ranks, over epochs' ends."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    seed = random.randrange(1 << 32)
    print("seed", seed)
    arguments = ["-m", "tests.support.ranks_search", str(tmp_path), str(seed), "20"]
    run = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("exact") == 20
