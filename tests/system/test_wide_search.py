"""The promise over every store, blend, packing and balance, by property; workers killed, ledgers kept, shards joining.

A few examples by default; `pytest -m long tests/system/test_wide_search.py` searches for about half an hour.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.resume_search import examples, shard_sizes
from tests.support.wide_search import check_disturbed, check_wide_endless, check_wide_finite, wide_pipelines

seeds = st.integers(0, 2**63)
lane_counts = st.sampled_from([1, 2, 12])
disturbances = st.fixed_dictionaries(
    {
        "ids": st.booleans(),
        "ledger": st.booleans(),
        "epoch_slots": st.sampled_from([None, 12, 36]),
        "skips": st.booleans(),
        "grows": st.booleans(),
    }
)
long = [pytest.mark.long, pytest.mark.timeout(3600)]


def marked(test: Any) -> Any:
    """A test of the long search."""
    for mark in long:
        test = mark(test)
    return test


@examples(3)
@given(sizes=shard_sizes, chosen=wide_pipelines, seed=seeds)
def test_cuts_of_a_few_endless_runs_are_exact(sizes: list[int], chosen: dict[str, Any], seed: int) -> None:
    check_wide_endless(sizes, chosen, seed, 2, steps=12, chains=1)


@examples(2, shrink=False)
@given(sizes=shard_sizes, chosen=wide_pipelines, seed=seeds, how=disturbances)
def test_a_few_disturbed_chains_are_exact(sizes: list[int], chosen: dict[str, Any], seed: int, how: Any) -> None:
    check_disturbed(sizes, chosen, seed, slots=24, most_workers=0, again=1, **how)


@marked
@examples(150)
@given(sizes=shard_sizes, chosen=wide_pipelines, seed=seeds, lanes=lane_counts)
def test_endless_runs(sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int) -> None:
    check_wide_endless(sizes, chosen, seed, lanes)


@marked
@examples(40, shrink=False)
@given(
    size=st.integers(60, 200),
    chosen=wide_pipelines,
    epochs=st.sampled_from([1, 1.5, 2, 2.5]),
    seed=seeds,
    tail=st.sampled_from(["stop", "pad"]),
)
def test_finite_runs(size: int, chosen: dict[str, Any], epochs: float, seed: int, tail: str) -> None:
    check_wide_finite(size, chosen, epochs, seed, tail)


@marked
@examples(100, shrink=False)
@given(sizes=shard_sizes, chosen=wide_pipelines, seed=seeds, how=disturbances)
def test_disturbed_chains(sizes: list[int], chosen: dict[str, Any], seed: int, how: Any) -> None:
    check_disturbed(sizes, chosen, seed, most_workers=0, **how)


@marked
@examples(60, shrink=False)
@given(sizes=shard_sizes, chosen=wide_pipelines, seed=seeds, how=disturbances)
def test_chains_in_workers_that_are_killed(sizes: list[int], chosen: dict[str, Any], seed: int, how: Any) -> None:
    check_disturbed(sizes, chosen, seed, kills=True, **how)
