"""Turns of a blend: shares in each lane and over all of them, by integers that no release changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

import savable_pipeline as sp
from savable_pipeline.core.weights import integer_weights, reduced
from savable_pipeline.stages.blending.schedule import Schedule, TargetCounts
from savable_pipeline.stages.blending.turns import (
    LaneDraws,
    TokenTurns,
    Turns,
    TurnsState,
    build_turns,
)
from savable_pipeline.stages.stage_info import StageInfo
from tests.support.draws import few_examples

WEIGHTS = st.lists(st.integers(1, 10) | st.integers(1, 2000), min_size=1, max_size=9)

LANE = 2.6  # the bounds of docs/mix.md, in samples
OVER_LANES = 1.2


def names_of(n: int) -> list[str]:
    return [f"{source:03}" for source in range(n)]


def schedule_of(weights: Sequence[int]) -> Schedule:
    return Schedule([(0, dict(zip(names_of(len(weights)), weights, strict=True)))])


def lanes_of(schedule: Schedule, lanes: int, *, stride: int, begin: int = 0) -> list[Turns]:
    """The turns of all lanes of a run."""
    draws = LaneDraws(TargetCounts(schedule, sorted(schedule.names), begin), begin, lanes, stride=stride)
    return [Turns(draws, place, key=place, weights=7) for place in range(lanes)]


def drawn(turns: list[Turns], steps: int, many: int) -> NDArray[np.int64]:
    """The sources that each lane draws, `many` at a time: (lanes, steps)."""
    found = []
    for begin in range(0, steps, many):
        found.append([lane.plan(min(many, steps - begin)) for lane in turns])
        for lane, chosen in zip(turns, found[-1], strict=True):
            lane.advance(chosen)
    return np.concatenate(found, axis=1)


def counts_of(chosen: NDArray[np.int64], sources: int) -> NDArray[np.int64]:
    """What was drawn of each source before and after each step: (lanes, steps + 1, sources)."""
    counts = (chosen[:, :, None] == np.arange(sources)).cumsum(axis=1)
    return np.concatenate([np.zeros_like(counts[:, :1]), counts], axis=1)


def off(schedule: Schedule, lanes: int, stride: int, pieces: int, begin: int = 0) -> tuple[float, float]:
    """How far any lane was off its part of the schedule's integral, and the sum over lanes, after each piece."""
    targets = TargetCounts(schedule, sorted(schedule.names), begin)
    chosen = drawn(lanes_of(schedule, lanes, stride=stride, begin=begin), pieces * stride, 16 * stride)
    counts = np.zeros((pieces, lanes, targets.sources), np.int64)
    np.add.at(counts, (np.arange(chosen.shape[1]) // stride, np.arange(lanes)[:, None], chosen), 1)
    counts = counts.cumsum(axis=0)
    there, steps = targets.at(begin), [begin + (piece + 1) * stride * lanes for piece in range(pieces)]
    due = np.array([[(a - b) / targets.unit for a, b in zip(targets.at(step), there, strict=True)] for step in steps])
    of_lane, of_all = np.abs(counts - due[:, None] / lanes).max(), np.abs(counts.sum(axis=1) - due).max()
    return float(of_lane), float(of_all)


# The search.


def random_weights(draw: random.Random, sources: int) -> list[int]:
    """Weights that are alike, of several decades, or of some large sources among many rare ones."""
    match draw.randrange(5):
        case 0:
            return [draw.randint(1, 10) for _ in range(sources)]
        case 1:
            return [draw.randint(1, 2000) for _ in range(sources)]
        case 2:
            return [int(10**9 * 2 ** (-12 * draw.random())) for _ in range(sources)]
        case 3:
            return [10**6 if source == 0 else draw.randint(1, 100) for source in range(sources)]
        case _:
            largest = 3 ** draw.randint(1, 4)
            return [
                draw.choice([500, 900]) if draw.random() < 0.3 else draw.randint(1, largest) for _ in range(sources)
            ]


def random_schedule(draw: random.Random, last: int, *, constant: bool) -> Schedule:
    """Of 2 to 40 sources; one that is not constant has up to five points, where some sources begin or end."""
    sources = draw.randint(2, draw.choice([12, 40]))
    if constant:
        return schedule_of(random_weights(draw, sources))
    points = []
    for start in sorted({0, *(draw.randrange(1, last + 1) for _ in range(draw.randint(1, 4)))}):
        weights = [weight * (draw.random() < 0.7) for weight in random_weights(draw, sources)]
        weights[draw.randrange(sources)] += 1
        points.append((start, dict(zip(names_of(sources), weights, strict=True))))
    return Schedule(points, shape=draw.choice(["step", "linear"]))


def search(draw: random.Random, cases: int, draws: int, *, constant: bool) -> tuple[float, float]:
    """The worst of random cases of about so many draws of all lanes."""
    worst = (0.0, 0.0)
    for _ in range(cases):
        stride, lanes = draw.choice([1, 1, 2, 3, 4, 8, 8, 16, 32]), draw.choice([draw.randint(1, 96), 96, 12, 200])
        pieces = min(4_000, max(4, draws // (lanes * stride)))
        begin = 0 if draw.random() < 0.7 else draw.randrange(10**9)
        schedule = random_schedule(draw, begin // 2 + pieces * stride * lanes, constant=constant)
        found = off(schedule, lanes, stride, pieces, begin)
        worst = max(worst[0], found[0]), max(worst[1], found[1])
    return worst


@pytest.mark.parametrize("constant", [True, False])
def test_each_lane_and_all_lanes_together_follow_the_weights(constant: bool) -> None:
    lane, over_lanes = search(random.Random(0), 9, 4_000, constant=constant)
    assert 1 < lane <= LANE and 0.5 < over_lanes <= OVER_LANES


@pytest.mark.long
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("draws", [1_000, 10_000, 100_000])
def test_in_many_runs_each_lane_and_all_lanes_together_follow_the_weights(constant: bool, draws: int) -> None:
    """What docs/mix.md says of the shares, with the numbers that this prints."""
    lane, over_lanes = search(random.Random(draws), 2_000_000 // (draws + 3_000), draws, constant=constant)
    print(f"\n{draws} draws, {'constant' if constant else 'scheduled'}: lane {lane:.2f}, over lanes {over_lanes:.2f}")
    assert lane <= LANE and over_lanes <= OVER_LANES


@pytest.mark.parametrize(
    ("weights", "lanes", "stride", "pieces"),
    [
        ([999, 1], 96, 1, 300),  # a rare source
        ([1] * 40, 96, 1, 100),
        ([10**6, *[1] * 39], 7, 32, 300),
        ([10**17, 3 * 10**17 + 1, 7, 10**9], 5, 4, 200),  # weights beyond 64 bits when multiplied
        ([3, 2, 2], 1, 1, 2_000),
    ],
)
def test_lanes_follow_weights_that_are_very_uneven(weights: list[int], lanes: int, stride: int, pieces: int) -> None:
    lane, over_lanes = off(schedule_of(weights), lanes, stride, pieces)
    assert lane <= LANE and over_lanes <= OVER_LANES


@pytest.mark.parametrize("stride", [4, 8, 32])
def test_error_of_a_lane_within_a_piece_is_at_most_a_quarter_of_the_stride(stride: int) -> None:
    furthest = 0.0
    for weights in ([4, 3, 2, 1], [7, 1, 1, 1], [123, 45, 678, 9]):
        counts = counts_of(drawn(lanes_of(schedule_of(weights), 12, stride=stride), 64 * stride, stride), len(weights))
        due = np.arange(counts.shape[1])[:, None] * np.array(weights) / sum(weights)
        furthest = max(furthest, float(np.abs(counts - due).max()))
    assert 1.5 < furthest <= LANE + stride / 4


@pytest.mark.landing
def test_rare_source_is_not_drawn_by_all_lanes_at_once() -> None:
    chosen = drawn(lanes_of(schedule_of([999, 1]), 96, stride=1), 2000, 1)
    assert chosen.sum(axis=0).max() == 1
    assert chosen.sum() == 2 * 96


def test_source_is_drawn_only_in_pieces_with_its_weight() -> None:
    draw = random.Random(3)
    for _ in range(12):
        lanes, stride = draw.randint(1, 4), draw.choice([1, 4])
        schedule = random_schedule(draw, 40 * lanes * stride, constant=False)
        targets = TargetCounts(schedule, sorted(schedule.names))
        chosen = drawn(lanes_of(schedule, lanes, stride=stride), 60 * stride, stride)
        for piece in range(60):
            now, then = (targets.at((piece + after) * lanes * stride) for after in (0, 1))
            grows = {source for source in range(targets.sources) if then[source] > now[source]}
            assert grows >= set(np.unique(chosen[:, piece * stride : (piece + 1) * stride]).tolist())


# What it is made of.


def test_small_case_equals_the_golden_turns() -> None:
    turns = lanes_of(schedule_of([5, 2, 1]), 4, stride=2)
    counts = counts_of(drawn(turns, 6, 2), 3)
    assert counts[:, 2].tolist() == [[2, 0, 0], [1, 1, 0], [1, 1, 0], [1, 0, 1]]
    assert counts[:, 4].tolist() == [[3, 1, 0], [2, 1, 1], [3, 1, 0], [2, 1, 1]]
    assert counts[:, 6].tolist() == [[4, 2, 0], [4, 1, 1], [4, 1, 1], [3, 2, 1]]


@pytest.mark.parametrize(
    ("weights", "golden"),
    [([7, 2, 1], "6ca82c07e3fdd27b"), ([123, 45, 678, 9, 10], "b40964c79a586f1a"), ([1, 999], "dbfd31927373a0e4")],
)
def test_thousand_turns_of_three_lanes_equal_the_golden_digest(weights: list[int], golden: str) -> None:
    lanes = lanes_of(schedule_of(weights), 96, stride=8)
    chosen = np.concatenate([lanes[place].plan(1000) for place in (0, 17, 95)])
    assert xxh3_64_hexdigest(bytes(chosen.tolist())) == golden


@few_examples(20)
@given(WEIGHTS, st.lists(st.integers(0, 30), max_size=8), st.integers(0, 6), st.booleans())
def test_turns_do_not_depend_on_chunk_size_or_resume_position(
    weights: list[int], pieces: list[int], place: int, restored: bool
) -> None:
    turns, chosen = lanes_of(schedule_of(weights), 7, stride=4)[place], []
    for n in pieces:
        plan = turns.plan(n + 5)[:n]
        turns.advance(plan)
        chosen += plan.tolist()
        if restored:  # where no other lane has computed anything
            state, turns = state_of(turns), lanes_of(schedule_of(weights), 7, stride=4)[place]
            turns.restore(state)
            assert state_of(turns) == state
    everywhere = drawn(lanes_of(schedule_of(weights), 7, stride=4), sum(pieces) + 4, 4)
    assert chosen == everywhere[place][: sum(pieces)].tolist()


def state_of(turns: Any) -> TurnsState:
    return TurnsState(names=[], **turns.save())


@pytest.mark.parametrize("wrong", [{"taken": 16}, {"counts": [[8, 8]]}, {"counts": [[8, 7], [4, 4]]}, {"counts": []}])
def test_impossible_counts_are_rejected(wrong: dict[str, Any]) -> None:
    turns = lanes_of(schedule_of([1, 1]), 2, stride=8)[0]
    turns.advance(turns.plan(11))
    good = turns.save()
    turns.restore(TurnsState(names=[], **good))  # type: ignore[arg-type]
    with pytest.raises(sp.CheckpointMismatchError, match="Use another copy"):
        turns.restore(TurnsState(names=[], **{**good, **wrong}))  # type: ignore[arg-type]


# By tokens.


@few_examples(15)
@given(WEIGHTS, st.lists(st.integers(1, 100), min_size=150, max_size=150))
def test_by_tokens_the_error_is_at_most_two_of_the_longest_items(weights: list[int], lengths: list[int]) -> None:
    schedule, total = schedule_of(weights), sum(weights)
    turns = TokenTurns(TargetCounts(schedule, sorted(schedule.names)), 0, 1, [0] * len(weights), weights=7)
    for length in lengths:
        turns.advance(turns.next(), length)
        assert all(
            abs(count - Fraction(turns.taken * weight, total)) <= 2 * 100
            for count, weight in zip(turns.counts, weights, strict=True)
        )


def test_by_tokens_a_rare_source_is_not_drawn_by_all_lanes_at_once() -> None:
    schedule, chosen = Schedule([(0, {"a": 9, "b": 1})], unit="tokens"), []
    for index in range(96):
        info = StageInfo(sp.Lane(index, 96, 5), 1, 0, True, frozenset(), frozenset())
        turns = build_turns(info, schedule, ["a", "b"], 0, stride=8)
        assert isinstance(turns, TokenTurns)
        chosen.append([])
        for _ in range(40):
            chosen[-1].append(turns.next())
            turns.advance(chosen[-1][-1], 1000)
    assert max(np.sum(chosen, axis=0)) <= 24  # of 96 lanes, about 10 at a time


def test_by_tokens_a_source_is_drawn_only_while_it_has_a_weight() -> None:
    draw, behind_at_the_end = random.Random(3), 0
    for _ in range(12):
        points = [(0, {"a": 3, "b": 4, "c": 2}), (draw.randint(2_000, 4_000), {"a": 1, "b": 1}), (9_000, {"c": 1})]
        targets = TargetCounts(Schedule(points, unit="tokens"), ["a", "b", "c"])
        turns = TokenTurns(targets, 0, 1, [0] * 3, weights=7)
        while turns.taken < 12_000:
            source, at = turns.next(), turns.taken
            assert source in ({0, 1, 2} if at < points[1][0] else {0, 1} if at < 9_000 else {2})
            turns.advance(source, draw.randint(1, 500))
            if at < points[1][0] <= turns.taken:
                behind_at_the_end += targets.at(turns.taken)[2] > turns.counts[2] * targets.unit
    assert behind_at_the_end > 2


# Weights.


def test_weights_in_any_notation_become_integers() -> None:
    assert integer_weights({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert integer_weights({"a": "1/3", "b": "2/3"}) == {"a": 1, "b": 2}
    assert integer_weights({"a": 300, "b": 100}) == {"a": 3, "b": 1}
    assert integer_weights({"a": Fraction(1, 7), "b": 1e-3}) == {"a": 1000, "b": 7}
    assert reduced({}) == {}


def test_weight_0_turns_a_source_off_but_not_all_sources() -> None:
    assert integer_weights({"a": 0, "b": 0.5, "c": "0.25"}) == {"a": 0, "b": 2, "c": 1}
    with pytest.raises(ValueError, match="all weights are 0: 'a', 'b'"):
        integer_weights({"a": 0, "b": 0.0})


@pytest.mark.parametrize("wrong", [-1, "some", float("nan"), float("inf"), None, "1/0"])
def test_value_that_is_not_a_weight_is_rejected(wrong: object) -> None:
    with pytest.raises(ValueError, match="the weight of 'a' must be"):
        integer_weights({"a": wrong, "b": 1})  # type: ignore[dict-item]
