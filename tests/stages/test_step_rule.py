"""The rule by which ranks take packs and buckets in step, beside a plain one."""

from __future__ import annotations

from array import array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

import savable_pipeline as sp
from savable_pipeline.core.keyed_random import derive_key, permutation, word
from savable_pipeline.stages.step_rule import StepRule


def quantile(seed: int, candidates: int, n: int) -> Fraction:
    """The quantile that all lanes share in slot n, 0 to 1: each block of slots has one in each of as many parts."""
    key = derive_key(seed, "Balance", 0)
    block, i = divmod(n, candidates)
    part = int(permutation(derive_key(key, block), candidates)[i])
    return Fraction(((part << 32) + (word(key, n) >> 32)) // candidates, 1 << 32)


def plainly(seed: int, candidates: int, weight: int, costs: list[int]) -> list[int]:
    """The numbers of the packs in the order in which they are given."""
    coming, held, given_costs, order = list(enumerate(costs)), [], [], []  # type: ignore[var-annotated]
    while coming or held:
        n = len(order)
        while coming and len(held) < min(candidates, 4 + n):
            number, cost = coming.pop(0)
            held.append((number, cost, n))
        wanted = quantile(seed, candidates, n)
        chosen = None
        if any(n - arrival + place >= 6 * candidates for place, (_, _, arrival) in enumerate(held)):
            chosen = held[0]
        else:
            best = None
            everything = [each for _, each, _ in held] * weight + given_costs[-16 * candidates :]
            for number, cost, arrival in held:
                begin = Fraction(sum(other < cost for other in everything), len(everything))
                end = Fraction(sum(other <= cost for other in everything), len(everything))
                score = max(4 * (begin - wanted), wanted - end, 0) - Fraction(n - arrival, 50 * candidates)
                if best is None or score < best:
                    chosen, best = (number, cost, arrival), score
        assert chosen is not None
        held.remove(chosen)
        order.append(chosen[0])
        given_costs.append(chosen[1])
    return order


def rule_of(seed: int, candidates: int, weight: int = 8) -> StepRule:
    return StepRule("Balance", sp.Lane(seed=seed), candidates=candidates, weight=weight, costlier=4)


def by_the_rule(
    seed: int, candidates: int, costs: list[int], *, weight: int = 8, cut: int | None = None
) -> tuple[list[int], int]:
    """The same by `StepRule`, and the longest wait; after `cut` packs a fresh rule goes on from what a state has."""
    rule, coming, order, longest = rule_of(seed, candidates, weight), list(enumerate(costs)), [], 0
    held: list[tuple[int, int, int]] = []
    while coming or held:
        if len(order) == cut:
            count, past = rule.count, rule.past.tobytes()
            rule = rule_of(seed, candidates, weight)
            rule.restore(count, past)
        while coming and len(held) < rule.room:
            held.append((*coming.pop(0), rule.count))
        _, waiting, arrivals = map(list, zip(*held, strict=True))
        number, cost, arrival = held.pop(rule.choose(waiting, arrivals))
        longest = max(longest, rule.count - arrival)
        rule.count_yielded(cost)
        order.append(number)
    return order, longest


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 12), max_size=120),
    st.integers(1, 6),
    st.sampled_from([1, 8]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 120),
)
def test_choices_equal_a_plain_model_and_resume_from_any_state(
    costs: list[int], candidates: int, weight: int, seed: int, cut: int
) -> None:
    order, longest = by_the_rule(seed, candidates, costs, weight=weight, cut=cut)
    assert order == plainly(seed, candidates, weight, costs)
    assert sorted(order) == list(range(len(costs)))
    assert longest <= 6 * candidates


@pytest.mark.parametrize("cut", [1, 3, 40, 90, 110])
def test_resumed_choices_use_the_saved_history(cut: int) -> None:
    costs = [(i * i * 7919) % 1009 for i in range(120)]
    assert by_the_rule(5, 4, costs, cut=cut) == by_the_rule(5, 4, costs)


def test_costs_of_any_size_keep_their_order() -> None:
    costs = [(7 * i) % 50 for i in range(200)]
    assert by_the_rule(3, 8, costs) == by_the_rule(3, 8, [cost << 55 for cost in costs])


def rule_at(slot: int, wanted: float, candidates: int, past: list[int], weight: int = 8) -> StepRule:
    """A rule in this slot, where it wants about this quantile."""
    wide = [abs(float(quantile(seed, candidates, slot)) - wanted) < 0.02 for seed in range(999)]
    rule = rule_of(wide.index(True), candidates, weight)
    rule.restore(slot, array("q", past).tobytes())
    return rule


def test_oldest_pack_is_yielded_in_time() -> None:
    rule, costs = rule_at(100, 0, 8, []), [10**6, *range(5)]
    assert [rule.choose(costs, [arrival, *[99] * 5]) for arrival in (99, 80, 53)] == [1, 1, 1]
    assert rule.choose(costs, [52, *[99] * 5]) == 0  # 48 slots
    assert rule.choose([10**6, *costs], [53, 53, *[99] * 5]) == 0  # the second is due in the next slot


@pytest.mark.parametrize(("wanted", "nearest"), [(0.5, 1), (0.7, 1), (0.9, 3)])
def test_a_lane_without_the_wanted_cost_yields_rather_a_cheaper_than_a_costlier_one(
    wanted: float, nearest: int
) -> None:
    rule = rule_at(5, wanted, 4, [2] * 64, weight=1)
    for costs, expected in (([0, 2, 3], 2), ([0, 1, 3], nearest), ([0, 1], 1), ([3], 3)):
        assert costs[rule.choose(costs, [5] * len(costs))] == expected


def test_frequency_of_a_cost_follows_what_was_yielded_lately() -> None:
    rule, chosen = rule_of(1, 16, weight=1), []
    for n in range(400):
        rule.restore(n, array("q", [0, 0, 1] * 85).tobytes())
        chosen.append(rule.choose([0, 1], [n, n]))
    assert 250 < chosen.count(0) < 284  # two of three


def test_candidates_grow_by_one_each_slot() -> None:
    rule, rooms = rule_of(1, 8), []
    for _ in range(7):
        rooms.append(rule.room)
        rule.count_yielded(1)
    assert rooms == [4, 5, 6, 7, 8, 8, 8]
    assert rule_of(1, 2).room == 2


@pytest.mark.parametrize("past", [bytes(8 * 16 * 4 + 8), bytes(7)])
def test_a_past_of_another_rule_is_a_mismatch(past: bytes) -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="Balance: the state has"):
        rule_of(1, 4).restore(3, past)


@pytest.mark.parametrize(("candidates", "digest"), [(4, "d6ce96acdbcc2b59"), (32, "66aa65691a7b4d82")])
def test_order_of_choices_equals_the_golden_order(candidates: int, digest: str) -> None:
    costs = [(i * i * 7919) % 1009 for i in range(700)]
    order, _ = by_the_rule(7, candidates, costs)
    assert xxh3_64_hexdigest(np.array(order, "<u8").tobytes()) == digest


def waiting_share(candidates: int, costs: list[int]) -> float:
    """The fraction of time that 16 ranks wait, whose lanes have these costs in orders of their own."""
    lanes = []
    for lane in range(16):
        own = [costs[at] for at in permutation(derive_key(3, lane), len(costs)).tolist()]
        order = by_the_rule(7, candidates, own)[0] if candidates else range(len(own))
        lanes.append([own[number] for number in order][100:-100])
    steps = np.array(lanes)
    return 1 - float(steps.mean() / steps.max(axis=0).mean())


def test_ranks_wait_little_for_each_other() -> None:
    costs = [100 + i * i % 1009 for i in range(500)]
    assert waiting_share(0, costs) > 0.4
    assert waiting_share(32, costs) < 0.1
    assert waiting_share(32, [cost // 300 for cost in costs]) < 0.125
