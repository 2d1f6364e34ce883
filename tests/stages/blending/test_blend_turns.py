"""Turns of a blend: exact shares in every lane and over every round, by integers that no release changes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from savable_pipeline.core.weights import integer_weights, reduced
from savable_pipeline.stages.blending.blend_counts import LaneCounts
from savable_pipeline.stages.blending.blend_turns import LaneTurns, TokenTurns, Turns, lags_at

WEIGHTS = st.lists(st.integers(1, 10) | st.integers(1, 2000), min_size=1, max_size=9)


def worst(chosen: Sequence[int], weights: Sequence[int], every: int = 1) -> Fraction:
    """How far any source is from its share after any of these turns, looked at after each `every`, in samples."""
    counts, furthest, total = [0] * len(weights), Fraction(0), sum(weights)
    for step, source in enumerate(chosen, start=1):
        counts[source] += 1
        off = max(abs(count * total - step * weight) for count, weight in zip(counts, weights, strict=True))
        furthest = max(furthest, Fraction(off, total)) if step % every == 0 else furthest
    return furthest


def test_a_small_sequence_is_what_it_was() -> None:
    assert Turns([5, 2, 1]).plan(16) == [0, 0, 1, 0, 2, 0, 0, 1] * 2
    assert Turns([1]).plan(3) == [0, 0, 0]
    assert Turns([1, 1, 1]).plan(6) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("weights", "golden"),
    [
        ([7, 2, 1], "dcd6ecf7ea4f1dd2"),
        ([123, 45, 678, 9, 10], "472c3dc267573e04"),
        ([1, 999], "da539860750c1042"),
    ],
)
def test_a_thousand_turns_alone_and_of_three_lanes_are_what_they_were(weights: list[int], golden: str) -> None:
    chosen = Turns(weights).plan(1000)
    lanes = LaneCounts(weights, 96, stride=8)
    for place in (0, 17, 95):
        chosen += LaneTurns(weights, lanes, place, key=place).plan(1000)
    assert xxh3_64_hexdigest(bytes(chosen)) == golden


@settings(max_examples=150, deadline=None)
@given(WEIGHTS)
def test_alone_every_prefix_is_within_one_sample(weights: list[int]) -> None:
    assert worst(Turns(weights).plan(400), weights) <= 1


@settings(max_examples=60, deadline=None, derandomize=True)  # a bound found by search
@given(WEIGHTS, st.integers(1, 40), st.sampled_from([1, 3, 8]), st.data())
def test_in_every_lane_the_shares_are_within_one_and_a_half_samples_at_multiples_of_the_stride(
    weights: list[int], lanes: int, stride: int, data: st.DataObject
) -> None:
    turns = LaneTurns(weights, LaneCounts(weights, lanes, stride=stride), data.draw(st.integers(0, lanes - 1)), key=7)
    chosen = turns.plan(400)
    assert worst(chosen, weights, every=stride) <= Fraction(3, 2)
    assert worst(chosen, weights) <= Fraction(5, 2) + Fraction(stride, 4)


@pytest.mark.parametrize("stride", [4, 8, 32])
def test_between_two_strides_a_lane_may_be_further_off_by_no_more_than_the_page_says(stride: int) -> None:
    """docs/packing-and-blending.md: 1.5 after every `stride` samples, between them 2.5 and a quarter of `stride`."""
    at_strides, between = Fraction(0), Fraction(0)
    for weights in ([4, 3, 2, 1], [7, 1, 1, 1], [123, 45, 678, 9]):
        counts = LaneCounts(weights, 12, stride=stride)
        for place in range(12):
            chosen = LaneTurns(weights, counts, place, key=place).plan(64 * stride)
            at_strides = max(at_strides, worst(chosen, weights, every=stride))
            between = max(between, worst(chosen, weights))
    assert at_strides <= Fraction(3, 2)
    assert Fraction(3, 2) < between <= Fraction(5, 2) + Fraction(stride, 4)


@pytest.mark.landing
def test_a_rare_source_does_not_come_in_all_lanes_at_once() -> None:
    lanes = LaneCounts([999, 1], 96, stride=1)
    plans = [LaneTurns([999, 1], lanes, place, key=place).plan(2000) for place in range(96)]
    rounds = [sum(column) for column in zip(*plans, strict=True)]
    assert max(rounds) == 1
    assert sum(rounds) == 2 * 96


@settings(max_examples=50, deadline=None)
@given(WEIGHTS, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_however_many_turns_are_planned_at_a_time_they_are_the_same(
    weights: list[int], pieces: list[int], alone: bool
) -> None:
    lanes = LaneCounts(weights, 7, stride=4)

    def make() -> Turns:
        return Turns(weights) if alone else LaneTurns(weights, lanes, 3, key=5)

    turns, chosen = make(), []
    for n in pieces:
        plan = turns.plan(n + 5)[:n]
        turns.take(plan)
        chosen += plan
    assert chosen == make().plan(sum(pieces))


def test_a_lag_is_how_far_a_source_is_behind_at_a_step() -> None:
    assert lags_at([5, 2, 1], [0, 1, 2, 4]) == [[0, 0, 0], [-3, 2, 1], [-6, 4, 2], [-4, 0, 4]]


@given(WEIGHTS, st.lists(st.integers(1, 100), min_size=300, max_size=300))
def test_by_tokens_a_source_is_within_two_of_the_longest_items(weights: list[int], lengths: list[int]) -> None:
    turns, total = TokenTurns(weights, [0] * len(weights)), sum(weights)
    for length in lengths:
        turns.took(turns.next(), length)
        given_tokens = sum(turns.counts)
        assert all(
            abs(count - Fraction(given_tokens * weight, total)) <= 2 * 100
            for count, weight in zip(turns.counts, weights, strict=True)
        )


def test_weights_are_integers_whatever_they_are_written_as() -> None:
    assert integer_weights({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert integer_weights({"a": "1/3", "b": "2/3"}) == {"a": 1, "b": 2}
    assert integer_weights({"a": 300, "b": 100}) == {"a": 3, "b": 1}
    assert integer_weights({"a": Fraction(1, 7), "b": 1e-3}) == {"a": 1000, "b": 7}
    assert reduced({}) == {}


def test_a_weight_of_0_is_off_and_one_source_at_least_is_on() -> None:
    assert integer_weights({"a": 0, "b": 0.5, "c": "0.25"}) == {"a": 0, "b": 2, "c": 1}
    with pytest.raises(ValueError, match="one weight at least must be above 0: 'a', 'b' have 0"):
        integer_weights({"a": 0, "b": 0.0})


@pytest.mark.parametrize("wrong", [-1, "some", float("nan"), float("inf"), None, "1/0"])
def test_what_is_no_weight_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="the weight of 'a' must be"):
        integer_weights({"a": wrong, "b": 1})  # type: ignore[dict-item]
