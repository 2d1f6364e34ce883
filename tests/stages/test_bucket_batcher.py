"""Batches by length: which bucket, how many, what is held, and what happens to the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.testing import assert_exact_resume
from tests.packing.test_packer import Items, Packs
from tests.support.toy_pipelines import ToyEncoder


class Numbers(Packs):
    """A batch is a random number and its items, (number, length) each."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    def length(self, item: Any) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError("for now")
        return super().length(item)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [rng.integers(10**9), *items]


def batcher(lengths: list[int], *, encoder: sp.TaskEncoder | None = None, **how: Any) -> sp.BucketBatcher:
    settings = {"bounds": [2, 5], **({} if "max_tokens" in how else {"size": 2}), **how}
    return sp.BucketBatcher(Items(lengths), encoder=encoder or Numbers(), **settings)


def numbers(stage: sp.Stage) -> list[list[int]]:
    return [[number for number, _ in batch[1:]] for batch in stage]


def test_items_are_batched_with_those_of_their_bucket() -> None:
    #   lengths 1, 4, 2, 5, 3, 1: buckets of at most 2, and of 3 to 5
    assert numbers(batcher([1, 4, 2, 5, 3, 1])) == [[0, 2], [1, 3], [5], [4]]
    assert numbers(batcher([1, 4, 2, 5, 3, 1], drop_last=True)) == [[0, 2], [1, 3]]
    assert numbers(batcher([])) == []


def test_a_batch_may_be_as_large_as_its_padded_tokens_allow() -> None:
    assert numbers(batcher([1] * 5 + [5] * 3, max_tokens=10)) == [[0, 1, 2, 3, 4], [5, 6], [7]]


def test_what_is_longer_than_the_last_bound_is_left_out_and_counted() -> None:
    stage = batcher([6, 1, 9, 2])
    assert numbers(stage) == [[1, 3]]
    assert stage.counts == {"skipped/longer than the last bound": 2, "source/0/skipped": 2}
    with pytest.raises(sp.EncodeError, match="100000 items in a row were longer"):
        next(batcher([9] * 200_000))


@given(
    st.lists(st.integers(1, 6), max_size=30),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.sampled_from(["more", "next", "cut"]), max_size=40),
)
def test_cut_anywhere_with_items_held_or_not_the_batches_are_the_same(
    lengths: list[int], size: int, drop_last: bool, steps: list[str]
) -> None:
    expected = list(batcher(lengths, size=size, drop_last=drop_last))
    stage, batches = batcher(lengths, size=size, drop_last=drop_last), []
    for step in steps:
        if step == "more":
            assert stage.more() == (len(batches) < len(expected))
        elif step == "next":
            batches += [batch for batch in [next(stage, None)] if batch is not None]
        else:
            state, stage = stage.save_state(), batcher(lengths, size=size, drop_last=drop_last)
            stage.restore_state(state)
            assert stage.source.fetched == []  # type: ignore[attr-defined]
            assert stage.save_state() == state
            assert stage.held_items == 0
    assert batches + list(stage) == expected


def test_a_batch_has_the_refs_of_its_items_and_is_made_again_by_them() -> None:
    stage = batcher([1, 4, 2, 5])
    batch = next(stage)
    assert stage.ref == (0, (0, 0, 0), (2, 0, 0))
    assert stage.fetch(stage.ref) == batch
    assert stage.held_items == 1


@pytest.mark.parametrize("restore", [False, True])
def test_after_an_error_the_same_is_tried_again_and_nothing_is_lost(restore: bool) -> None:
    lengths, encoder = [1, 4, 2, 5, 3], Numbers(failures=3)
    stage, batches, errors = batcher(lengths, encoder=encoder), [], 0
    while len(batches) < 3:
        try:
            batches.append(next(stage))
        except sp.EncodeError as error:
            errors += 1
            assert "Numbers.length raised OSError: for now; stage BucketBatcher of Lane(0" in str(error)
            if restore:
                state, stage = stage.save_state(), batcher(lengths, encoder=encoder)
                stage.restore_state(state)
    assert errors == 3
    assert batches == list(batcher(lengths))


def test_an_item_that_has_another_length_when_it_is_made_again_is_an_error() -> None:
    stage, after = batcher([4, 1, 2]), batcher([1, 1, 2, 4])
    next(stage)
    after.restore_state(stage.save_state())
    with pytest.raises(
        sp.CheckpointMismatchError, match=r"item \(0, 0, 0\) lay in bucket 1; made again it belongs to bucket 0"
    ):
        next(after)


# Groups, and sizes for each bucket and group.


class Groups(Numbers):
    """An item's group is its number modulo 3: None, a word, or a tuple."""

    def kind(self, item: Any) -> Any:
        return (None, "one", (2, "two"))[item[0] % 3]


def kind_of(item: Any) -> Any:
    return Groups().kind(item)


class Modulo:
    """Groups by number, as an object with a setting."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, item: Any) -> int:
        return int(item[0]) % self.n

    def settings(self) -> dict[str, Any]:
        return {"n": self.n}


def test_each_bucket_may_have_a_size_of_its_own() -> None:
    assert numbers(batcher([1, 4, 2, 5, 3, 1, 2], size=[3, 1])) == [[1], [3], [4], [0, 2, 5], [6]]


def test_only_items_of_one_group_share_a_batch() -> None:
    #   number  0  1  2  3  4  5  6  7   in groups of number % 3, and buckets of at most 2, and of 3 to 5
    lengths = [1, 1, 1, 1, 5, 1, 4, 4]
    stage = batcher(lengths, group="kind", encoder=Groups())
    assert numbers(stage) == [[0, 3], [2, 5], [4, 7], [1], [6]]
    assert numbers(batcher(lengths, group=kind_of)) == numbers(batcher(lengths, group="kind", encoder=Groups()))
    by_group = {None: [2, 1], "one": 1, (2, "two"): 3}
    assert numbers(batcher(lengths, group=kind_of, size=by_group)) == [[1], [0, 3], [4], [6], [7], [2, 5]]


def test_without_bounds_groups_alone_are_put_together() -> None:
    assert numbers(batcher([1, 9, 5, 3], bounds=[], group=Modulo(2))) == [[0, 2], [1, 3]]


@given(
    st.lists(st.integers(1, 6), max_size=30),
    st.sampled_from(["kind", kind_of, Modulo(4)]),
    st.lists(st.sampled_from(["more", "next", "cut"]), max_size=40),
)
def test_cut_anywhere_batches_of_groups_are_the_same(lengths: list[int], group: Any, steps: list[str]) -> None:
    def make() -> sp.BucketBatcher:
        return batcher(lengths, group=group, size=[3, 2], encoder=Groups())

    expected, stage, batches = list(make()), make(), []
    for step in steps:
        if step == "more":
            assert stage.more() == (len(batches) < len(expected))
        elif step == "next":
            batches += [batch for batch in [next(stage, None)] if batch is not None]
        else:
            state, stage = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())), make()
            stage.restore_state(state)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())) == state
    assert batches + list(stage) == expected


def grouped(shards: str, lane: sp.Lane) -> sp.Stage:
    items = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=6), ToyEncoder())
    return sp.BucketBatcher(items, bounds=[4, 9], group=OfToys(3), size={0: [2, 3], 1: 2, 2: 4})


class OfToys(Modulo):
    """Groups items of the toy encoder by their number."""

    def __call__(self, item: Any) -> int:
        return int(item["id"]) % self.n


def test_batches_of_groups_resume_exactly(make_shards: Any) -> None:
    shards = str(make_shards([40, 40]))
    assert_exact_resume(partial(grouped, shards), lanes=2, steps=10, workers=(0, 1), world_sizes=(1, 2), chains=1)


def test_the_fingerprint_has_the_group_and_its_settings() -> None:
    assert batcher([1], group="kind", encoder=Groups()).settings()["group"] == "kind"
    assert batcher([1], group=kind_of).settings()["group"] == "kind_of"
    found = batcher([1], group=Modulo(3), size={0: 1, 2: [4, 5], 1: 3}).settings()
    assert found["group"] == "Modulo" and found["group.n"] == 3
    assert found["size"] == [[0, 1], [1, 3], [2, [4, 5]]]
    assert "group" not in batcher([1]).settings()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"group": lambda item: 1.5}, "<lambda> raised ValueError: a group is an int, a str, None, or a tuple"),
        ({"group": lambda item: item[7]}, "<lambda> raised IndexError"),
        ({"group": kind_of, "size": {"one": 1}}, "the group None has no size; there are sizes for 'one'"),
    ],
)
def test_a_group_that_cannot_be_is_an_error_and_the_item_is_not_lost(how: dict[str, Any], what: str) -> None:
    stage = batcher([1, 4], **how)
    for _ in range(2):
        with pytest.raises(sp.EncodeError, match=what):
            next(stage)
    assert stage.save_state()["taken"] == (0, 0, 0)


def test_a_state_with_other_groups_is_a_mismatch() -> None:
    began = batcher([1, 4, 1, 4], group=Modulo(4), size=[9, 9])
    began.more()  # the source ends: every group's rest is held
    state = began.save_state()
    assert state["keys"] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for other, what in [
        (batcher([1]), "another group="),
        (batcher([1], group=Modulo(4), size={0: 1}), "the group 1 has no size"),
        (batcher([1], bounds=[], group=Modulo(4)), "with other bounds"),
    ]:
        with pytest.raises(sp.CheckpointMismatchError, match=what):
            other.restore_state(state)
    with pytest.raises(sp.CheckpointMismatchError, match="another group="):
        began.restore_state(batcher([1]).save_state())


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"group": "kind"}, "Numbers has no method 'kind'"),
        ({"group": 3}, "group must be a function, not 3"),
        ({"group": partial(Groups.kind, None)}, "has no name and no settings"),
        ({"bounds": [], "group": kind_of, "max_tokens": 8}, "max_tokens needs bounds"),
        ({"size": {"one": 1}}, "needs group="),
        ({"size": [1, 2, 3]}, "3 sizes for 2 buckets"),
        ({"size": [1, 0]}, "at least 1"),
        ({"bounds": []}, "ascending"),
        ({"bounds": [5, 5]}, "ascending"),
        ({"bounds": [0, 5]}, "ascending"),
        ({"size": 0}, "at least 1"),
        ({"size": 3, "max_tokens": 8}, "either size or max_tokens"),
        ({"max_tokens": 4}, "no room for one item of 5"),
    ],
)
def test_wrong_settings_are_refused(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        batcher([1], **how)


def test_a_state_of_other_buckets_is_a_mismatch() -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="the state has 2 buckets"):
        batcher([1], bounds=[5]).restore_state(batcher([1]).save_state())
