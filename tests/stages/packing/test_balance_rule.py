"""The choice of `Balance` alone, beside the rule written out plainly with fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from savable_pipeline.core.keyed_random import SharedRanks, derive_key, permutation
from savable_pipeline.stages.packing.balance import RankRule, WaitingPack


def plainly(key: int, hold: int, costs: list[int]) -> list[int]:
    """The numbers of the packs in the order in which they are given."""
    coming, held, given_costs, order = list(enumerate(costs)), [], [], []  # type: ignore[var-annotated]
    while coming or held:
        n = len(order)
        while coming and len(held) < min(hold, 4 + n):
            number, cost = coming.pop(0)
            held.append((number, cost, n))
        block, i = divmod(n, hold)
        wanted = (int(permutation(derive_key(key, block), hold)[i]) + Fraction(1, 2)) / hold
        chosen = None
        if any(n - arrival + place >= 6 * hold for place, (_, _, arrival) in enumerate(held)):
            chosen = held[0]
        else:
            best = None
            for number, cost, arrival in held:
                below = 8 * share(cost, [each for _, each, _ in held]) + share(cost, given_costs[-16 * hold :])
                rank = below / (8 * len(held) + len(given_costs[-16 * hold :]))
                score = abs(rank - wanted) - Fraction(n - arrival, 50 * hold)
                if best is None or score < best:
                    chosen, best = (number, cost, arrival), score
        assert chosen is not None
        held.remove(chosen)
        order.append(chosen[0])
        given_costs.append(chosen[1])
    return order


def share(cost: int, others: list[int]) -> Fraction:
    """How many are cheaper; one of the same cost counts half."""
    return Fraction(sum(2 * (other < cost) + (other == cost) for other in others), 2)


def by_the_rule(key: int, hold: int, costs: list[int], cut: int | None = None) -> tuple[list[int], int]:
    """The same by `RankRule`, and the longest wait; after `cut` packs a fresh rule goes on from what a state has."""
    rule, coming, order, longest = RankRule(key=key, hold=hold), list(enumerate(costs)), [], 0
    held: list[tuple[int, WaitingPack]] = []
    while coming or held:
        if len(order) == cut:
            count, past = rule.count, list(rule.past)
            rule = RankRule(key=key, hold=hold)
            rule.restore(count, past)
        while coming and len(held) < rule.room:
            number, cost = coming.pop(0)
            held.append((number, WaitingPack(cost, rule.count)))
        number, (cost, arrival) = held.pop(rule.choose([waiting for _, waiting in held]))
        longest = max(longest, rule.count - arrival)
        rule.gave(cost)
        order.append(number)
    return order, longest


@settings(max_examples=60)
@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 6), st.integers(0, 2**64 - 1), st.integers(0, 120))
def test_it_chooses_as_the_rule_written_out_and_goes_on_from_any_state(
    costs: list[int], hold: int, key: int, cut: int
) -> None:
    order, longest = by_the_rule(key, hold, costs, cut)
    assert order == plainly(key, hold, costs)
    assert sorted(order) == list(range(len(costs)))
    assert longest <= 6 * hold


@pytest.mark.parametrize("cut", [1, 3, 40, 90, 110])
def test_it_goes_on_with_the_past_that_a_state_has(cut: int) -> None:
    costs = [(i * i * 7919) % 1009 for i in range(120)]
    assert by_the_rule(5, 4, costs, cut) == by_the_rule(5, 4, costs)


def test_costs_of_any_size_keep_their_order() -> None:
    costs = [(7 * i) % 50 for i in range(200)]
    assert by_the_rule(3, 8, costs) == by_the_rule(3, 8, [cost << 55 for cost in costs])


def test_the_oldest_is_given_in_time_for_those_that_came_with_it() -> None:
    rule = RankRule(key=next(key for key in range(99) if SharedRanks(key=key, steps=8).step(100) == 0), hold=8)
    rule.restore(100, [])  # the cheapest is wanted
    young = [WaitingPack(cost, 99) for cost in range(5)]
    assert [rule.choose([WaitingPack(10**6, arrival), *young]) for arrival in (99, 80, 53)] == [1, 1, 1]
    assert rule.choose([WaitingPack(10**6, 52), *young]) == 0  # 48 slots
    assert (
        rule.choose([WaitingPack(10**6, 53), WaitingPack(10**6, 53), *young]) == 0
    )  # the second is due in the next slot


def test_a_few_packs_are_held_at_first_then_one_more_each_slot() -> None:
    rule, rooms = RankRule(key=1, hold=8), []
    for _ in range(7):
        rooms.append(rule.room)
        rule.gave(1)
    assert rooms == [4, 5, 6, 7, 8, 8, 8]
    assert RankRule(key=1, hold=2).room == 2


@pytest.mark.parametrize(("hold", "digest"), [(4, "30263d4188f646ca"), (32, "973d94bcd90bdfe3")])
def test_the_order_is_what_it_was(hold: int, digest: str) -> None:
    costs = [(i * i * 7919) % 1009 for i in range(700)]
    order, _ = by_the_rule(derive_key(7, "balance", 0), hold, costs)
    assert xxh3_64_hexdigest(np.array(order, "<u8").tobytes()) == digest
