"""Turns of a blend: exact shares in every lane and over every round, by integers that no release changes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from savable_pipeline.blend_order import TokenTurns, Turns, integer_weights, lags_at, reduced

WEIGHTS = st.lists(st.integers(1, 10) | st.integers(1, 2000), min_size=1, max_size=9)


def worst(chosen: Sequence[int], weights: Sequence[int]) -> Fraction:
    """How far any source is from its share after any of these turns, in samples."""
    counts, furthest, total = [0] * len(weights), Fraction(0), sum(weights)
    for step, source in enumerate(chosen, start=1):
        counts[source] += 1
        off = max(abs(count * total - step * weight) for count, weight in zip(counts, weights, strict=True))
        furthest = max(furthest, Fraction(off, total))
    return furthest


def test_a_small_sequence_is_what_it_was() -> None:
    assert Turns([5, 2, 1], [0, 0, 0]).plan(16) == [0, 0, 1, 0, 2, 0, 0, 1] * 2
    assert Turns([1], [0]).plan(3) == [0, 0, 0]
    assert Turns([1, 1, 1], [0, 0, 0]).plan(6) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("weights", "golden"),
    [
        ([7, 2, 1], "27c5ed0ee2eea1b1"),
        ([123, 45, 678, 9, 10], "33f7db6a907b5642"),
        ([1, 999], "fe7dcdb614b8f9cd"),
    ],
)
def test_a_thousand_turns_of_three_lanes_are_what_they_were(weights: list[int], golden: str) -> None:
    chosen: list[int] = []
    for lags in lags_at(weights, [0, 17, 401]):
        chosen += Turns(weights, lags).plan(1000)
    assert xxh3_64_hexdigest(bytes(chosen)) == golden


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(0, 1500))
def test_in_every_lane_every_prefix_is_within_one_and_a_half_samples(weights: list[int], begin: int) -> None:
    (lags,) = lags_at(weights, [begin])
    assert sum(lags) == 0
    assert worst(Turns(weights, lags).plan(400), weights) <= Fraction(3, 2)
    assert worst(Turns(weights, [0] * len(weights)).plan(400), weights) <= 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=3), st.integers(0, 1023), st.sampled_from([1, 3, 16]))
def test_up_to_three_sources_are_within_that_over_the_lanes_of_every_round(
    weights: list[int], phase: int, stride: int
) -> None:
    lanes, rounds = 24, 8
    plans = [
        Turns(weights, lags).plan(rounds * stride)
        for lags in lags_at(weights, range(phase, phase + lanes * stride, stride))
    ]
    for start in range(0, rounds * stride, stride):
        taken = [source for plan in plans for source in plan[start : start + stride]]
        for source, weight in enumerate(weights):
            assert abs(taken.count(source) - Fraction(len(taken) * weight, sum(weights))) <= Fraction(3, 2)


def test_a_rare_source_does_not_come_in_all_lanes_at_once() -> None:
    plans = [Turns([999, 1], lags).plan(2000) for lags in lags_at([999, 1], range(96))]
    rounds = [sum(column) for column in zip(*plans, strict=True)]
    assert max(rounds) == 1
    assert sum(rounds) == 2 * 96


@given(WEIGHTS, st.lists(st.integers(0, 30), max_size=8))
def test_however_many_turns_are_planned_at_a_time_they_are_the_same(weights: list[int], pieces: list[int]) -> None:
    turns, chosen = Turns(weights, [0] * len(weights)), []
    for n in pieces:
        plan = turns.plan(n + 5)[:n]
        turns.take(plan)
        chosen += plan
    assert chosen == Turns(weights, [0] * len(weights)).plan(sum(pieces))


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


@pytest.mark.parametrize("wrong", [0, -1, "some", float("nan"), float("inf"), None, "1/0"])
def test_what_is_no_weight_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="the weight of 'a' must be"):
        integer_weights({"a": wrong, "b": 1})  # type: ignore[dict-item]
