"""Batches by length: which bucket, how many, what is held, and what happens to the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from tests.test_pack import Items, Packs


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
    assert stage.counts == {"skipped/longer than the last bound": 2}
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
    with pytest.raises(sp.CheckpointMismatchError, match=r"item \(0, 0, 0\) lay in bucket 1; made again it takes 1"):
        next(after)


@pytest.mark.parametrize(
    ("how", "what"),
    [
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
