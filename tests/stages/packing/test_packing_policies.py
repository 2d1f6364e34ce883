"""The policies over lengths, and functions of one's own: what fits where, nothing lost, how full packs are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.cost import Costing
from savable_pipeline.stages.packing.packing_policies import (
    OpenPack,
    Packing,
    Piece,
    Policy,
    build_packing,
    check_groups,
)
from savable_pipeline.testing import assert_exact_resume
from tests.stages.packing.test_packer import LENGTHS, packer
from tests.support.draws import few_examples
from tests.support.toy_pipelines import ToyEncoder

POLICIES = get_args(Policy)
SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), max_size=80)
LIMIT = 4096


@pytest.mark.parametrize("policy", ["sequential", "first_fit", "best_fit"])
@pytest.mark.parametrize(("length", "images"), [(10, 0), (2, 3)])
def test_pack_that_is_full_in_tokens_or_cost_is_due(policy: Policy, length: int, images: int) -> None:
    def cost(length: int, images: int) -> int:
        return length + 6 * images

    bounds: dict[str, Any] = {"max_length": 10, "max_images": 9, "open_packs": 4}
    packing = build_packing(policy, key=0, max_cost=20, costing=Costing("test", cost), **bounds)
    for part, is_due in ((length - 1, False), (1, True)):
        packing.add(
            Piece((part, 0, 0), length=part, images=images * is_due, total=part, cost=cost(part, images * is_due))
        )
        assert (packing.due() is packing.packs[0]) == is_due


def laid_out(
    sizes: list[tuple[int, int]], packing: Packing, cut: Callable[[Piece], list[Piece]] = lambda piece: [piece]
) -> list[OpenPack]:
    """The packs that come of (length, images) of each piece, in the order in which they are given."""
    packs: list[OpenPack] = []

    def give(pack: OpenPack | None) -> bool:
        if pack is not None:
            packing.remove(pack)
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


@few_examples(50)
@given(SIZES, st.integers(12, 30), st.integers(3, 6), st.integers(1, 5), st.sampled_from(POLICIES))
def test_every_piece_is_in_one_pack_and_no_pack_exceeds_a_limit(
    sizes: list[tuple[int, int]], max_length: int, max_images: int, open_packs: int, policy: Policy
) -> None:
    bounds = {"max_length": max_length, "max_images": max_images, "open_packs": open_packs}
    packs = laid_out(sizes, build_packing(policy, key=1, **bounds))
    placed: dict[int, list[tuple[int, int]]] = {}
    for pack in packs:
        assert pack.pieces
        assert pack.room == max_length - sum(piece.length for piece in pack.pieces) >= 0
        assert pack.images == max_images - sum(piece.images for piece in pack.pieces) >= 0
        for piece in pack.pieces:
            placed.setdefault(piece.ref, []).append((piece.start, piece.length))
    assert placed.keys() == set(range(len(sizes)))
    for number, (length, _) in enumerate(sizes):
        starts = sorted(placed[number])
        assert [start for start, _ in starts] == [sum(n for _, n in starts[:i]) for i in range(len(starts))]
        assert sum(n for _, n in starts) == length
        assert policy == "sequential" or len(starts) == 1


def test_first_fit_decreasing_packs_the_longest_first_and_leaves_the_last_pack_open() -> None:
    packing = build_packing("first_fit_decreasing", max_length=10, max_images=0, open_packs=2, key=1)
    for number, length in enumerate([3, 8, 2, 6, 4, 5, 5]):  # 33 of 30 are enough
        assert packing.due() is None or number == 6
        packing.add(Piece(number, length=length, total=length))
    #   8 2 │ 6 4 │ 5 5 │ 3      the last is taken apart
    assert sorted(sorted(piece.ref for piece in pack.pieces) for pack in packing.packs) == [[1, 2], [3, 4], [5, 6]]
    assert [piece.ref for piece in packing.waiting] == [0]


@pytest.mark.parametrize(("policy", "least"), [("best_fit", 0.95), ("first_fit", 0.95), ("first_fit_decreasing", 0.98)])
def test_packs_of_lognormal_lengths_are_full(policy: Policy, least: float) -> None:
    drawn = np.random.default_rng(1).lognormal(np.log(400), 1.0, 6_000).astype(int)
    sizes = [(int(length), 0) for length in drawn if 1 <= length <= LIMIT]
    packs = laid_out(sizes, build_packing(policy, max_length=LIMIT, max_images=0, open_packs=16, key=1))
    assert sum(length for length, _ in sizes) >= least * LIMIT * len(packs)


def cost(length: int, images: int) -> int:
    return length * length + images


def with_cost(pieces: list[tuple[int, int]], policy: Policy, *, max_cost: int, max_length: int = 12) -> list[OpenPack]:
    """The packs of pieces of these lengths and images, within a cost."""
    bounds = {"max_length": max_length, "max_images": 0, "open_packs": 3, "max_cost": max_cost}
    packing = build_packing(policy, key=1, costing=Costing("OnlinePacker", cost), **bounds)
    priced = packing.add

    def add(piece: Piece) -> None:
        piece.cost = cost(piece.length, piece.images)
        priced(piece)

    packing.add = add  # type: ignore[method-assign]
    return laid_out(pieces, packing)


@few_examples(50)
@given(SIZES, st.integers(4, 200), st.sampled_from(POLICIES))
def test_no_pack_exceeds_max_cost_unless_it_has_a_single_piece(
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


def test_too_many_open_packs_yield_the_one_nearest_to_its_max_cost() -> None:
    bounds = {"max_length": 100, "max_images": 0, "open_packs": 2, "max_cost": 1000}
    packing = build_packing("best_fit", key=1, costing=Costing("OnlinePacker", cost), **bounds)
    for number, length in enumerate([31, 20, 20, 28]):
        assert packing.due() is None
        packing.add(Piece(number, length=length, total=length, cost=cost(length, 0)))
    due = packing.due()
    assert due is not None
    assert [piece.length for piece in due.pieces] == [31]  # 31² of 1,000; the other has 40 of 100, but 800 of 1,000


# First-fit decreasing: how long a piece is held.

ROUNDS = 5  # the round in which a piece is given at the latest


@pytest.mark.parametrize("policy", ["first_fit", "best_fit", "first_fit_decreasing"])
def test_short_expensive_piece_closes_no_other_pack(policy: Policy) -> None:
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
            packing.remove(pack)
            for piece in pack.pieces:
                after[piece.ref] = number
        packing.add(Piece(number, length=length, images=images, total=length, cost=dear))
    return after


@few_examples(50)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(1, 500)), max_size=80),
    st.integers(1, 4),
    st.sampled_from([0, 100]),
    st.sampled_from([0, 3]),
)
def test_first_fit_decreasing_yields_each_piece_soon(
    sizes: list[tuple[int, int, int]], open_packs: int, max_cost: int, max_images: int
) -> None:
    def packing() -> Packing:
        bounds = {"max_length": 12, "max_images": max_images, "open_packs": open_packs, "max_cost": max_cost}
        return build_packing("first_fit_decreasing", key=1, **bounds)

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


def test_piece_that_fits_with_no_other_is_yielded_after_five_rounds() -> None:
    sizes = [(1, 0), *[(12, 0)] * 40]
    packing = build_packing("first_fit_decreasing", key=1, max_length=12, max_images=0, open_packs=2)
    assert given_after(sizes, packing, [0] * 41)[0] == 1 + 5 * 3


@pytest.mark.parametrize("bounds", [{"max_images": 8, "max_cost": 0}, {"max_images": 0, "max_cost": 4096 * 2048}])
def test_packs_are_full_at_the_first_limit_reached(bounds: dict[str, int]) -> None:
    draws = np.random.default_rng(1)
    lengths = np.minimum(draws.lognormal(5, 1, 8000) + 1, 4096).astype(int).tolist()
    images = draws.poisson(1, 8000).tolist()
    packing = build_packing("first_fit_decreasing", key=1, max_length=4096, open_packs=16, **bounds)
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


def longest_first(lengths: list[int]) -> list[list[int]]:
    """First fit decreasing, in packs of 10."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fitting = [group for group in groups if sum(lengths[i] for i in group) + lengths[place] <= 10]
        fitting[0].append(place) if fitting else groups.append([place])
    return groups


class UpTo:
    """As many neighbours as fit, as an object with a setting."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, lengths: list[int]) -> list[range]:
        groups, start = [], 0
        for stop in range(1, len(lengths) + 1):
            if stop == len(lengths) or sum(lengths[start : stop + 1]) > self.most:
                groups.append(range(start, stop))
                start = stop
        return groups

    def settings(self) -> dict[str, Any]:
        return {"most": self.most}


def numbers(stage: custom.Stage) -> list[list[int]]:
    return [[number for number, _ in pack] for pack in stage]


def test_packs_are_the_functions_groups_of_buffered_items_in_its_order() -> None:
    asked = []

    def reversed_pairs(lengths: list[int]) -> list[list[int]]:
        asked.append(lengths)
        return [[i + 1, i] if i + 1 < len(lengths) else [i] for i in range(0, len(lengths), 2)][::-1]

    #   held until they fill two packs of 10: 5 + 5 + 4 + 6, and at the end what is left
    stage = packer([5, 5, 4, 6, 3, 2, 1], policy=reversed_pairs, open_packs=2)
    assert numbers(stage) == [[3, 2], [1, 0], [6], [5, 4]]
    assert asked == [[5, 5, 4, 6], [5, 5, 4, 6], [3, 2, 1]]  # the first time twice, to find one that draws


@few_examples(30)
@given(LENGTHS, st.integers(1, 4), st.sets(st.integers(0, 30), max_size=6), st.sampled_from([longest_first, UpTo(10)]))
def test_resume_after_any_pack_is_exact(lengths: list[int], open_packs: int, cuts: set[int], policy: Any) -> None:
    expected = list(packer(lengths, policy=policy, open_packs=open_packs))
    stage, packs = packer(lengths, policy=policy, open_packs=open_packs), []
    for step in range(len(expected)):
        if step in cuts:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state()))
            stage = packer(lengths, policy=policy, open_packs=open_packs)
            stage.restore_state(state)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())) == state
            assert stage.source.fetched == []  # type: ignore[attr-defined]
        packs.append(next(stage))
    assert packs == expected
    given_items = sorted(item for pack in packs for item in pack)
    assert given_items == [(number, length) for number, length in enumerate(lengths) if length <= 10]


def of_toys(shards: str, lane: sp.Lane) -> custom.Stage:
    items = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=6), ToyEncoder())
    packs = sp.OnlinePacker(items, max_length=20, policy=UpTo(20), open_packs=3)
    return sp.Batcher(packs, size=2)


def test_packs_by_a_function_resume_exactly(make_shards: Any) -> None:
    shards = str(make_shards([40, 40]))
    assert_exact_resume(partial(of_toys, shards), lanes=2, steps=7, world_sizes=(1, 2), chains=1, after=2)


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ([[0, 1], [2], []], "group 2 is empty"),
        ([[0, 1], [3]], "group 1 has index 3, but there are 3 lengths"),
        ([[0, -1], [2]], "group 0 has index -1"),
        ([[0, 1], [1, 2]], "group 1 repeats index 1"),
        ([[0, 1]], "index 2 is in no group"),
        ([[0, 1, 2]], r"group 0 has length 12, more than max_length=10: \[0, 1, 2\]"),
    ],
)
def test_groups_that_are_not_packs_are_rejected(groups: Sequence[Sequence[int]], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check_groups(groups, [5, 4, 3], 10)


class Turning(UpTo):
    """Gives other groups each time."""

    def __init__(self) -> None:
        self.groups = cycle([[[0, 1]], [[1, 0]]])

    def __call__(self, lengths: list[int]) -> Any:
        return next(self.groups)


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (
            lambda lengths: [[0, 0]],
            "<lambda>\\) failed for 2 items: ValueError: group 0 repeats index 0",
        ),
        (lambda lengths: None, "TypeError"),
        (lambda lengths: [[0.5], [1]], "TypeError"),
        (Turning(), "it returned other groups"),
    ],
)
def test_wrong_result_raises_each_time_and_nothing_is_lost(policy: Any, what: str) -> None:
    stage = packer([5, 5], policy=policy, open_packs=1)
    for _ in range(2):
        with pytest.raises(sp.EncodeError, match=what):
            next(stage)
    state = stage.save_state()
    assert state["held"] == [((0, 0, 0), 5), ((1, 0, 0), 5)]
    right = packer([5, 5], policy=longest_first, open_packs=1)
    right.restore_state(state)
    assert numbers(right) == [[0, 1]]


def test_the_fingerprint_has_the_functions_name_and_settings() -> None:
    assert packer([1], policy=longest_first).settings()["policy"] == "longest_first"
    found = packer([1], policy=UpTo(7)).settings()
    assert (found["policy"], found["policy.most"]) == ("UpTo", 7)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"policy": longest_first, "max_images": 3}, "gets only lengths"),
        ({"policy": partial(longest_first)}, "has no name"),
        ({"policy": UpTo}, "must be a function"),
        ({"policy": "worst_fit"}, "policy must be one of"),
    ],
)
def test_wrong_settings_are_rejected(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        packer([1], **how)
