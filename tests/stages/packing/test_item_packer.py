"""Packing by what a function sees in items: its very packs, at every cut, or it is told what it did wrong."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.item_buffer import built_items
from savable_pipeline.stages.item_ref import Element
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.testing import assert_exact_resume
from tests.stages.packing.test_packer import Items, Packs
from tests.support.draws import few_examples
from tests.support.toy_dataset import readers
from tests.support.toy_pipelines import ToyEncoder, draw


def packer(lengths: list[Any], select: Any, *, encoder: sp.TaskEncoder | None = None, **how: Any) -> custom.ItemPacker:
    return custom.ItemPacker(Items(lengths), encoder=encoder or Packs(), select=select, **{"size": 4, **how})


def longest_alone(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
    """Empties its list: the longest alone, then the others."""
    items.sort(key=lambda item: item[1])
    longest = items.pop()
    return [[longest], items] if items else [[longest]]


def drawn(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
    """In random order, by generators of every kind, some left out, in groups of up to three."""
    random.shuffle(items)
    items = [items[at] for at in rng.permutation(len(items))]
    items = [items[at] for at in np.random.permutation(len(items))]
    items = [items[at] for at in torch.randperm(len(items))]
    kept = items[: 1 + rng.integers(len(items))]
    return [kept[at : at + 3] for at in range(0, len(kept), 3)]


def pairs(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
    return [items[at : at + 2] for at in range(0, len(items), 2)]


def through_bytes(state: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


class Drawing(Packs):
    """Packs with random numbers, and skips some."""

    global_rng = True

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return sp.Skip("by chance") if rng.integers(5) == 0 else [draw(rng)[:2], *items]


class Never(Packs):
    """Skips each pack."""

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return sp.Skip("never")


def test_packs_are_the_groups_of_each_round_and_the_last_is_smaller() -> None:
    stage = packer([5, 1, 9, 2, 3, 8], longest_alone)
    assert list(stage) == [[(2, 9)], [(1, 1), (3, 2), (0, 5)], [(5, 8)], [(4, 3)]]
    assert stage.counts == {"packs": 4, "items": 6, "tokens": 28}


def test_items_in_no_group_are_counted() -> None:
    stage = packer([5, 1, 9, 2, 3, 8], lambda items, rng: [[item] for item in items if item[1] > 4])
    assert list(stage) == [[(0, 5)], [(2, 9)], [(5, 8)]]
    assert stage.counts["skipped/not selected"] == 3


@few_examples(30)
@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 7), st.sets(st.integers(0, 40), max_size=6))
def test_resume_after_any_pack_is_exact(lengths: list[int], size: int, cuts: set[int]) -> None:
    build = partial(packer, lengths, drawn, encoder=Drawing(), size=size)
    whole = build()
    expected = [(pack, whole.ref, whole.sizes) for pack in whole]
    stage, packs = build(), []
    for step in range(len(expected)):
        if step in cuts:
            state = through_bytes(stage.save_state())
            counts = stage.counts
            stage = build()
            stage.restore_state(state)
            stage.counts.update(counts)
            assert through_bytes(stage.save_state()) == state
            assert stage.source.fetched == []  # type: ignore[attr-defined]
        packs.append((next(stage), stage.ref, stage.sizes))
    assert repr(packs) == repr(expected)
    assert list(stage) == []
    count_dropped = stage.counts["skipped/not selected"]
    assert Counter(stage.counts) == Counter(whole.counts)
    assert count_dropped + stage.counts["items"] <= len(lengths)


def test_resume_does_not_regroup_packs_already_chosen() -> None:
    asked: list[list[int]] = []

    def select(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
        asked.append([number for number, _ in items])
        return pairs(items, rng)

    stage = packer([1] * 8, select)
    next(stage)
    state = through_bytes(stage.save_state())
    again = packer([1] * 8, select)
    again.restore_state(state)
    assert list(again) == [[(2, 1), (3, 1)], [(4, 1), (5, 1)], [(6, 1), (7, 1)]]
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert again.source.fetched == [2, 3]  # type: ignore[attr-defined]


def test_pack_is_rebuilt_from_its_ref() -> None:
    stage = packer([5, 1, 9, 2, 3, 8], drawn, encoder=Drawing())
    made = [(stage.ref, pack) for pack in stage]
    again = packer([5, 1, 9, 2, 3, 8], drawn, encoder=Drawing())
    assert [again.fetch(through_bytes(ref)) for ref, _ in made] == [pack for _, pack in made]


@pytest.mark.parametrize("ref", [[[0, 0, 0], [1, 0, 0]], [0, 3]])
def test_other_refs_are_rejected(ref: Any) -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="is no pack"):
        packer([1], pairs).fetch(ref)


def test_the_function_draws_by_its_round_and_the_global_generators_are_seeded_for_it() -> None:
    def first(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
        seen.append(str(draw(rng)))
        return [items]

    seen: list[str] = []
    random.seed(1)
    assert len(list(packer([1] * 8, first, encoder=Drawing()))) <= 2
    random.seed(2)
    list(packer([2] * 8, first, encoder=Drawing()))
    assert seen[:2] == seen[2:] and seen[0] != seen[1]


@pytest.mark.parametrize(
    ("select", "what"),
    [
        (lambda items, rng: [items, []], "group 1 is empty"),
        (
            lambda items, rng: [items[:1], [copy.deepcopy([*items[1]])]],
            "group 1 has a list that is none of the items",
        ),
        (lambda items, rng: items, "that is none of the items. Return the same objects"),
        (lambda items, rng: [items[:2], items[1:]], "group 1 repeats an item"),
        (lambda items, rng: [[items[0], items[0]]], "group 0 repeats an item"),
        (lambda items, rng: None, "it returned NoneType. Return a list of packs, each a list of items"),
        (lambda items, rng: [0, 1], "a pack is a int"),
        (lambda items, rng: [[0, 1]], "a int that is none of the items"),
        (lambda items, rng: 1 // 0, "(?s)ZeroDivisionError.*stage ItemPacker, round 0 .4 items. of Lane"),
    ],
)
def test_wrong_result_raises_each_time_and_nothing_is_lost(select: Any, what: str) -> None:
    stage = packer([5, 1, 9, 2, 3], select)
    for _ in range(2):
        with pytest.raises(sp.EncodeError, match=what):
            next(stage)
    right = packer([5, 1, 9, 2, 3], pairs)
    right.restore_state(through_bytes(stage.save_state()))
    assert list(right) == [[(0, 5), (1, 1)], [(2, 9), (3, 2)], [(4, 3)]]


class Same(Packs):
    """Gives one object for all samples."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return "same"

    def length(self, item: Any) -> int:
        return len(item)


def test_identical_item_objects_are_distinguished_by_position() -> None:
    items = sp.Encode(readers([4], shuffle=False)(0), Same())
    packs = custom.ItemPacker(items, size=4, select=pairs)
    next(packs), next(packs)
    assert packs.ref == (1, (2, 0, 0), (3, 0, 0))


class Outcomes(Items):
    """Gives dicts."""

    def __next__(self) -> Any:
        number, length = super().__next__()
        return {"number": number, "length": length}


def test_item_changed_by_the_function_is_an_error() -> None:
    def select(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
        items[1]["total"] = 7
        return [items]

    stage = custom.ItemPacker(Outcomes([1, 2, 3]), size=3, select=select, encoder=Drawing())
    with pytest.raises(sp.EncodeError, match="it changed 'total' of a dict"):
        next(stage)


def test_after_an_error_the_function_gets_new_objects() -> None:
    seen: list[Any] = []

    def failing(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
        seen.append(items)
        if len(seen) == 1:
            raise ValueError("once")
        return [items]

    stage = packer([1, 2, 3, 4], failing)
    with pytest.raises(sp.EncodeError, match="once"):
        next(stage)
    assert next(stage) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert not {id(item) for item in seen[0]} & {id(item) for item in seen[1]}


def test_items_beyond_the_memory_budget_are_rebuilt_without_changing_packs() -> None:
    lengths = [1 + number % 9 for number in range(40)]
    expected = list(packer(lengths, drawn, encoder=Drawing(), size=20))
    stage = packer(lengths, drawn, encoder=Drawing(), size=20, max_buffer_bytes=200)
    packs, held = [], []
    for pack in stage:
        packs.append(pack)
        held.append(built_items(stage))
    assert packs == expected
    assert max(held) <= 2
    assert stage.source.fetched  # type: ignore[attr-defined]


def nothing(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
    return []


def of_nothing(shards: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(
        custom.ItemPacker(sp.Encode(sp.TarShardReader(shards, lane), Same()), size=500, select=nothing), size=2
    )


def test_run_that_selects_nothing_ends_with_an_error(make_shards: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("savable_pipeline.stages.readers.lane_shares._UNUSED", 1000)
    loader = sp.SavableLoader(partial(of_nothing, str(make_shards([20]))), seed=1, lanes=1)
    with pytest.raises(sp.SavableError, match=r"samples without a batch"):
        next(loader)


@pytest.mark.parametrize(
    ("select", "encoder", "what"),
    [
        (lambda items, rng: [], Packs(), "made no pack, `select` chose none of the last"),
        (pairs, Never(), "made no pack, the last pack was skipped as 'never'"),
    ],
)
def test_function_that_never_returns_a_pack_is_an_error(
    select: Any, encoder: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageInfo, "max_empty", 300)
    stage = packer([1] * 400, select, encoder=encoder, size=100)
    with pytest.raises(sp.EncodeError, match=what):
        next(stage)


def test_lost_item_is_dropped_from_its_pack_only() -> None:
    class Losing(Items):
        def fetch(self, ref: Any) -> Any:
            return sp.Skip("gone") if ref[0] in (1, 2, 3) else super().fetch(ref)

    stage = packer([1] * 6, pairs, size=6)
    next(stage)
    state = through_bytes(stage.save_state())
    again = custom.ItemPacker(Losing([1] * 6), size=6, select=pairs, encoder=Packs())
    again.restore_state(state)
    assert next(again) == [(4, 1), (5, 1)] and again.ref == (1, (4, 0, 0), (5, 0, 0))
    partly, lost = Element((0, (0, 0, 0), (1, 0, 0))), Element((0, (2, 0, 0), (3, 0, 0)))
    again.make([partly, lost])
    assert (partly.value, partly.ref) == ([(0, 1)], (0, (0, 0, 0)))
    assert type(lost.value) is sp.Skip


def test_the_fingerprint_has_size_and_function() -> None:
    assert packer([1], pairs, encoder=Drawing()).settings() == {
        "size": 4,
        "select": "pairs",
        "encoder": "Drawing",
    }


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"size": 0}, "size must be an int of at least 1, not 0"),
        ({"select": "pairs"}, "select must be a function"),
        ({"select": partial(pairs)}, "has no name"),
        ({"encoder": sp.TaskEncoder()}, "has no pack"),
    ],
)
def test_wrong_settings_are_rejected(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        custom.ItemPacker(Items([1]), **{"size": 2, "select": pairs, "encoder": Packs(), **how})


def by_drawing(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
    """Groups of toys, of different sizes, one in four left out."""
    order = [items[at] for at in rng.permutation(len(items))]
    random.shuffle(order)
    return [order[at : at + 1 + at % 3] for at in range(0, len(order), 4)]


class SkippingPacks(ToyEncoder):
    """Skips a pack now and then."""

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return sp.Skip("now and then") if rng.integers(6) == 0 else super().pack(items, rng)


def of_toys(shards: str, lane: sp.Lane, *, then: str, max_buffer_bytes: int) -> custom.Stage:
    """A Blend upstream, an encoder that fans out and skips, and every kind of stage downstream that holds packs."""
    encoder = SkippingPacks()
    sources = {name: sp.TarShardReader(shards, lane) for name in "ab"}
    items = sp.Encode(sp.ShuffleBuffer(sp.Blend(sources, weights={"a": 2, "b": 1}), size=6), encoder)
    packs: custom.ItemStage = custom.ItemPacker(items, size=9, select=by_drawing, max_buffer_bytes=max_buffer_bytes)
    if then == "balanced":
        packs = sp.Balance(packs, candidates=3, cost=sp.attention_cost(hidden=1))
    elif then == "shuffled":
        packs = sp.ShuffleBuffer(packs, size=4)
    elif then == "blended":
        packs = sp.Blend({"packs": packs, "items": sp.Encode(sp.TarShardReader(shards, lane), encoder)})
    return sp.Batcher(packs, size=2)


@pytest.mark.parametrize(("then", "max_buffer_bytes"), [("balanced", 1 << 30), ("shuffled", 2000), ("blended", 0)])
def test_item_packs_resume_exactly_at_every_interruption(make_shards: Any, then: str, max_buffer_bytes: int) -> None:
    pipeline = partial(of_toys, str(make_shards([40, 40])), then=then, max_buffer_bytes=max_buffer_bytes)
    assert_exact_resume(pipeline, lanes=2, steps=8, world_sizes=(1, 2), chains=1, after=2)


def finite(shards: str, lane: sp.Lane) -> custom.Stage:
    items = sp.Encode(sp.TarShardReader(shards, lane, epochs=1, block_size=4), ToyEncoder(skip=0, fan_out=0))
    return sp.Batcher(custom.ItemPacker(items, size=7, select=pairs), size=2)


def test_epoch_yields_each_item_once_and_its_last_round_is_smaller(make_shards: Any) -> None:
    pipeline = partial(finite, str(make_shards([30, 20])))
    stages = [pipeline(sp.Lane(index, 3, 7)) for index in range(3)]
    ids = [number for stage in stages for batch in stage for pack in batch["items"] for number in pack["id"]]
    assert sorted(ids) == list(range(50))
    assert_exact_resume(pipeline, lanes=2, steps=9, tail="pad", chains=1, after=1, workers=(0,), world_sizes=(1, 2))
