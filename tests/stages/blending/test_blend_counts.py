"""Counts of all lanes of a blend: right in each lane and over all of them, and never fewer than before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from savable_pipeline.stages.blending.blend_counts import LaneCounts

RARE = st.integers(1, 10) | st.integers(1, 2000)
WEIGHTS = st.lists(RARE, min_size=1, max_size=9)


def off(weights: list[int], lanes: int, stride: int, pieces: int) -> tuple[float, float]:
    """How far off the worst lane is and how far the worst sum over lanes, in samples, after each of so many pieces."""
    counts = LaneCounts(weights, lanes, stride=stride)
    found = np.array([counts.at(piece * stride) for piece in range(pieces + 1)])  # (pieces + 1, lanes, sources)
    steps, total = np.arange(pieces + 1) * stride, sum(weights)
    assert (found[0] == 0).all()
    assert (np.diff(found, axis=0) >= 0).all()
    assert (found.sum(axis=2) == steps[:, None]).all()
    due = steps[:, None] * np.array(weights)
    by_lane = np.abs(found * total - due[:, None]).max()
    return by_lane / total, np.abs(found.sum(axis=1) * total - due * lanes).max() / total


def test_a_small_case_is_what_it_was() -> None:
    counts = LaneCounts([2, 1, 1], 4, stride=4)
    assert [counts.at(step).tolist() for step in (0, 4, 8)] == [[[0, 0, 0]] * 4, [[2, 1, 1]] * 4, [[4, 2, 2]] * 4]
    halved = LaneCounts([6, 1, 1], 3, stride=4)
    assert halved.at(4).tolist() == [[3, 0, 1], [3, 0, 1], [3, 1, 0]]
    assert halved.at(8).tolist() == [[6, 1, 1], [6, 1, 1], [6, 1, 1]]
    assert halved.at(12).tolist() == [[9, 1, 2], [9, 1, 2], [9, 2, 1]]


def test_many_lanes_are_what_they_were() -> None:
    counts = LaneCounts([123, 45, 678, 9, 10], 96, stride=8)
    found = np.array([counts.at(step) for step in range(0, 1024, 8)])
    assert xxh3_64_hexdigest(found.astype("<i8").tobytes()) == "d30ba0a83cfb7ce5"


@settings(max_examples=60, deadline=None, derandomize=True)  # a bound found by search
@given(WEIGHTS, st.integers(1, 60), st.sampled_from([1, 3, 8, 32]))
def test_lanes_are_within_one_and_a_half_samples_and_their_sum_is_near(
    weights: list[int], lanes: int, stride: int
) -> None:
    lane, over_lanes = off(weights, lanes, stride, 60)
    assert lane <= 1.5
    assert over_lanes <= 3


@pytest.mark.parametrize(
    "weights", [[4, 3, 2, 1], [50, 30, 10, 5, 5], [30, 20, 15, 10, 8, 7, 5, 3, 1, 1], [1] * 12, [60, 25, 10, 4, 1]]
)
def test_of_usual_weights_the_sum_over_lanes_is_within_one_and_a_half_samples_too(weights: list[int]) -> None:
    lane, over_lanes = off(weights, 96, 8, 400)
    assert lane <= 1.5
    assert over_lanes <= 1.5


def test_of_random_mixtures_nine_in_ten_have_the_sum_over_lanes_within_one_and_a_half_and_none_is_over_2_7() -> None:
    """What docs/packing-and-blending.md promises of the sums."""
    draw, sums = random.Random(0), []
    for _ in range(100):
        largest = draw.choice([10, 2_000, 10**6])
        weights = [draw.randint(1, largest) for _ in range(draw.randint(2, 12))]
        sums.append(off(weights, draw.choice([1, 2, 3, 8, 12, 24, 96]), 8, 100)[1])
    assert sum(most <= 1.5 for most in sums) >= 90
    assert max(sums) <= 2.7


def test_up_to_two_sources_and_wherever_all_come_often_the_closed_form_is_within_one() -> None:
    for weights, stride in [([1, 999], 1), ([700, 300], 3), ([5, 4, 3, 3], 8), ([1], 1)]:
        lane, over_lanes = off(weights, 96, stride, 200)
        assert lane < 1, weights
        assert over_lanes < 1, weights


@pytest.mark.parametrize("weights", [[10**17, 3 * 10**17 + 1, 7, 10**9], [1, 2, 3, 4]])
def test_any_step_is_found_without_those_before_it(weights: list[int]) -> None:
    one_by_one, at_once = (LaneCounts(weights, 5, stride=4) for _ in range(2))
    for step in range(0, 800, 4):
        found = one_by_one.at(step)
    assert (at_once.at(796) == found).all()
    assert (at_once.at(4 * 10**12).sum(axis=1) == 4 * 10**12).all()
