"""Subsets: by share, range or count; the same ones always, and none in two that do not overlap."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savable_pipeline.data.shards.selection import Selection
from savable_pipeline.errors import ShardError
from tests.support.toy_dataset import drain, readers

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8)
SHARES = st.lists(st.floats(0.0, 1.0), max_size=4)


def selected(sizes: list[int], subset: Any = None, names: list[str] | None = None, **more: Any) -> list[int]:
    firsts = np.cumsum([0, *sizes])
    try:
        selection = Selection(names or [f"{i}.tar" for i in range(len(sizes))], firsts, subset=subset, **more)
    except ShardError:
        return []
    found = selection.locate(np.arange(selection.count)).tolist()
    assert found == sorted(set(found))  # in the dataset's order, none twice
    return found


@settings(max_examples=settings.default.max_examples // 3)
@given(SIZES, SHARES)
def test_adjacent_ranges_are_disjoint_and_cover_everything(sizes: list[int], shares: list[float]) -> None:
    cuts = sorted({0.0, 1.0, *shares})
    parts = [selected(sizes, (low, high)) for low, high in itertools.pairwise(cuts)]
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(sum(sizes)))


@settings(max_examples=settings.default.max_examples // 3)
@given(SIZES, st.integers(1, 320))
def test_subset_by_count_has_that_many_samples(sizes: list[int], count: int) -> None:
    assert len(selected(sizes, count)) == (count if count <= sum(sizes) else 0)


def test_fraction_has_about_its_size_and_contains_smaller_ones() -> None:
    sizes = [7] * 3000
    tenth, fifth = selected(sizes, 0.1), selected(sizes, 0.2)
    assert abs(len(tenth) - 2100) < 100
    assert set(tenth) < set(fifth)
    assert len(selected([10_000], 0.1)) in (1000, 1001)


def test_subset_of_a_shard_is_independent_of_added_shards_and_order() -> None:
    few = selected([50, 50], 0.3, ["a.tar", "c.tar"])
    more = selected([50, 50, 50], 0.3, ["a.tar", "b.tar", "c.tar"])
    assert [i for i in more if i < 50] == [i for i in few if i < 50]
    assert [i - 50 for i in more if i >= 100] == [i for i in few if i >= 50]
    assert [i for i in few if i < 50] != [i - 50 for i in few if i >= 50]


def test_subset_applies_to_the_split() -> None:
    excluded = {"1.tar": np.arange(1, 20)}
    found = selected([20, 20, 20], 11, shards=["1.tar", "2.tar"], excluded=excluded)
    assert len(found) == 11 and all(i == 20 or i >= 40 for i in found)


@pytest.mark.parametrize("subset", [0.25, (0.5, 0.75), 30])
def test_lanes_of_any_order_yield_the_subset_once_per_epoch(subset: Any) -> None:
    sizes = [13, 0, 41, 70]
    expected = selected(sizes, subset, [f"{i:04d}.tar" for i in range(4)])
    for settings_ in ({"shuffle": False}, {"block_size": 1, "window": None}, {"block_size": 4, "window": 2}):
        make = readers(sizes, lanes=3, seed=1, epochs=2, subset=subset, **settings_)  # type: ignore[arg-type]
        given_ = [pair for lane in range(3) for pair in drain(make(lane), chunk=7)]
        assert sorted(given_) == sorted((index, epoch) for index in expected for epoch in (0, 1))
        assert make(0).population == len(expected)


@pytest.mark.parametrize("subset", [0, -1, 0.0, 1.5, -0.1, (0.5, 0.5), (0.7, 0.3), (0.1, 2), True, "0.1", (0.1,)])
def test_invalid_subset_is_rejected(subset: Any) -> None:
    with pytest.raises(ValueError, match=r"subset=.*Pass a fraction"):
        readers([10], subset=subset)(0)


def test_empty_and_too_large_subsets_are_errors() -> None:
    with pytest.raises(ShardError, match="there are only 10 samples"):
        readers([10], subset=11)(0)
    with pytest.raises(ShardError, match="leave no sample"):
        readers([1], subset=1e-9)(0)


def test_reader_of_a_subset_resumes_exactly() -> None:
    make = readers([50, 60], lanes=2, subset=0.4)
    whole = make(1).take(60).tolist()
    reader = make(1)
    reader.take(23)
    after = make(1)
    after.restore_state(reader.save_state())
    assert after.take(37).tolist() == whole[23:]
