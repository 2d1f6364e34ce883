"""The policies alone, over lengths: what fits where, nothing lost, and how full packs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from savable_pipeline.stages.cost import Costing
from savable_pipeline.stages.packing.packing_policies import OpenPack, Packing, Piece, Policy, make_packing
from tests.support.few_examples import few

POLICIES = get_args(Policy)
SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), max_size=80)
LIMIT = 4096


def laid_out(
    sizes: list[tuple[int, int]], packing: Packing, cut: Callable[[Piece], list[Piece]] = lambda piece: [piece]
) -> list[OpenPack]:
    """The packs that come of (length, images) of each piece, in the order in which they are given."""
    packs: list[OpenPack] = []

    def give(pack: OpenPack | None) -> bool:
        if pack is not None:
            packing.packs.remove(pack)
            packs.append(pack)
        return pack is not None

    for number, (length, images) in enumerate(sizes):
        rest = Piece(number, length=length, images=images, total=length)
        while rest.length:
            while give(packing.due()):
                pass
            head = Piece(
                number, length=min(rest.length, packing.reach), images=rest.images, start=rest.start, total=length
            )
            packing.add(head)
            rest = Piece(number, length=rest.length - head.length, start=rest.start + head.length, total=length)
    while give(packing.due()) or give(packing.last()):
        pass
    return packs


def test_first_fit_decreasing_lays_the_longest_out_first_and_keeps_the_last_pack() -> None:
    packing = make_packing("first_fit_decreasing", max_length=10, max_images=0, open_packs=2, key=1)
    for number, length in enumerate([3, 8, 2, 6, 4, 5, 5]):  # 33 of 30 are enough
        assert packing.due() is None or number == 6
        packing.add(Piece(number, length=length, total=length))
    #   8 2 │ 6 4 │ 5 5 │ 3      the last is taken apart
    assert sorted(sorted(piece.ref for piece in pack.pieces) for pack in packing.packs) == [[1, 2], [3, 4], [5, 6]]
    assert [piece.ref for piece in packing.held] == [0]


@pytest.mark.parametrize(("policy", "least"), [("best_fit", 0.95), ("first_fit", 0.95), ("first_fit_decreasing", 0.98)])
def test_packs_of_lognormal_lengths_are_full(policy: Policy, least: float) -> None:
    drawn = np.random.default_rng(1).lognormal(np.log(400), 1.0, 6_000).astype(int)
    sizes = [(int(length), 0) for length in drawn if 1 <= length <= LIMIT]
    packs = laid_out(sizes, make_packing(policy, max_length=LIMIT, max_images=0, open_packs=16, key=1))
    assert sum(length for length, _ in sizes) >= least * LIMIT * len(packs)


def cost(length: int, images: int) -> int:
    return length * length + images


def with_cost(pieces: list[tuple[int, int]], policy: Policy, *, max_cost: int, max_length: int = 12) -> list[OpenPack]:
    """The packs of pieces of these lengths and images, within a cost."""
    bounds = {"max_length": max_length, "max_images": 0, "open_packs": 3, "max_cost": max_cost}
    packing = make_packing(policy, key=1, costing=Costing("OnlinePacker", cost), **bounds)
    priced = packing.add

    def add(piece: Piece) -> None:
        piece.cost = cost(piece.length, piece.images)
        priced(piece)

    packing.add = add  # type: ignore[method-assign]
    return laid_out(pieces, packing)


@few(50)
@given(SIZES, st.integers(4, 200), st.sampled_from(POLICIES))
def test_no_pack_costs_more_than_it_may_unless_it_is_of_a_single_piece(
    sizes: list[tuple[int, int]], max_cost: int, policy: Policy
) -> None:
    packs = with_cost(sizes, policy, max_cost=max_cost)
    assert sum(piece.length for pack in packs for piece in pack.pieces) == sum(length for length, _ in sizes)
    if policy != "sequential":
        assert sorted(piece.ref for pack in packs for piece in pack.pieces) == list(range(len(sizes)))
    for pack in packs:
        found = sum(cost(piece.length, piece.images) for piece in pack.pieces)
        assert pack.cost == max_cost - found
        assert found <= max_cost or len(pack.pieces) == 1
        assert policy != "sequential" or cost(pack.pieces[0].length, 0) <= max_cost


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("sequential", [[6, 3, 2, 1], [5, 5], [1, 3, 1, 2, 4, 1], [4, 3]]),
        ("first_fit", [[6, 3, 2, 1], [6, 3, 2], [6, 3], [4, 5]]),
        ("best_fit", [[6, 3, 2, 1], [4, 5, 3], [6, 3, 2], [6]]),
        ("first_fit_decreasing", [[6, 3, 2, 1], [6, 3], [6, 3, 2], [5, 4]]),
    ],
)
def test_a_pack_closes_at_its_cost_or_its_length(policy: Policy, expected: list[list[int]]) -> None:
    found = with_cost([(n, 0) for n in (6, 3, 2, 6, 6, 3, 1, 2, 4, 5, 3)], policy, max_cost=50)
    assert [[piece.length for piece in pack.pieces] for pack in found] == expected


def test_of_too_many_open_packs_the_one_whose_cost_is_nearly_reached_is_given_though_short() -> None:
    bounds = {"max_length": 100, "max_images": 0, "open_packs": 2, "max_cost": 1000}
    packing = make_packing("best_fit", key=1, costing=Costing("OnlinePacker", cost), **bounds)
    for number, length in enumerate([31, 20, 20, 28]):
        assert packing.due() is None
        packing.add(Piece(number, length=length, total=length, cost=cost(length, 0)))
    due = packing.due()
    assert due is not None
    assert [piece.length for piece in due.pieces] == [31]  # 31² of 1,000; the other has 40 of 100, but 800 of 1,000


# First-fit decreasing: how long a piece is held.

ROUNDS = 5  # the round in which a piece is given at the latest


@pytest.mark.parametrize("policy", ["first_fit", "best_fit", "first_fit_decreasing"])
def test_one_short_but_dear_piece_closes_no_other_pack(policy: Policy) -> None:
    pieces = [(5, 0)] * 40
    plain = with_cost(pieces, policy, max_cost=60)
    dear = with_cost([*pieces[:10], (1, 10_000), *pieces[10:]], policy, max_cost=60)
    assert len(dear) == len(plain) + 1
    (alone,) = [pack for pack in dear if any(piece.ref == 10 for piece in pack.pieces)]
    assert [piece.ref for piece in alone.pieces] == [10]
    assert dear.index(alone) <= 10


def given_after(sizes: list[tuple[int, int]], packing: Packing, costs: list[int]) -> list[int]:
    """For each piece how many pieces had been added when it was given; all of them for those left at the end."""
    after = [len(sizes)] * len(sizes)
    for number, ((length, images), dear) in enumerate(zip(sizes, costs, strict=True)):
        while (pack := packing.due()) is not None:
            packing.packs.remove(pack)
            for piece in pack.pieces:
                after[piece.ref] = number
        packing.add(Piece(number, length=length, images=images, total=length, cost=dear))
    return after


@few(50)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(1, 500)), max_size=80),
    st.integers(1, 4),
    st.sampled_from([0, 100]),
    st.sampled_from([0, 3]),
)
def test_first_fit_decreasing_gives_each_piece_soon(
    sizes: list[tuple[int, int, int]], open_packs: int, max_cost: int, max_images: int
) -> None:
    def packing() -> Packing:
        bounds = {"max_length": 12, "max_images": max_images, "open_packs": open_packs, "max_cost": max_cost}
        return make_packing("first_fit_decreasing", key=1, **bounds)

    costs = [cost if max_cost else 0 for _, _, cost in sizes]
    plain = [(length, images) for length, images, _ in sizes]
    shares = [
        max(length / 12, images / 3 if max_images else 0, min(1, cost / max_cost) if max_cost else 0)
        for (length, images), cost in zip(plain, costs, strict=True)
    ]
    after = given_after(plain, packing(), costs)
    for number, end in enumerate(after):
        come = sum(shares[number + 1 : end])  # in packs: a round ends when one of the three bounds is reached
        assert come <= ROUNDS * 3 * (open_packs + 2)


def test_a_piece_that_fits_beside_no_other_is_given_after_five_rounds() -> None:
    sizes = [(1, 0), *[(12, 0)] * 40]
    packing = make_packing("first_fit_decreasing", key=1, max_length=12, max_images=0, open_packs=2)
    assert given_after(sizes, packing, [0] * 41)[0] == 1 + 5 * 3


@pytest.mark.parametrize("bounds", [{"max_images": 8, "max_cost": 0}, {"max_images": 0, "max_cost": 4096 * 2048}])
def test_packs_are_full_by_whichever_bound_is_reached_first(bounds: dict[str, int]) -> None:
    draws = np.random.default_rng(1)
    lengths = np.minimum(draws.lognormal(5, 1, 8000) + 1, 4096).astype(int).tolist()
    images = draws.poisson(1, 8000).tolist()
    packing = make_packing("first_fit_decreasing", key=1, max_length=4096, open_packs=16, **bounds)
    add = packing.add

    def costed(piece: Piece) -> None:
        piece.cost = (piece.length**2 + piece.images * 700_000) if bounds["max_cost"] else 0
        add(piece)

    packing.add = costed  # type: ignore[method-assign]
    packs = laid_out(list(zip(lengths, images, strict=True)), packing)
    if bounds["max_cost"]:
        share = sum(piece.cost for pack in packs for piece in pack.pieces) / bounds["max_cost"]
    else:
        share = sum(images) / bounds["max_images"]
    assert share >= 0.97 * len(packs)
