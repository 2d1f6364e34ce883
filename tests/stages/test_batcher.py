"""Batches: how many, what is held for the next one, and what happens to the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from tests.stages.packing.test_packer import Items, Packs


class Lists(sp.TaskEncoder):
    """A batch is a random number and its items' numbers."""

    global_rng = False

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError("for now")
        return [rng.integers(10**9), *(number for number, _ in items)]


def batcher(count: int, *, encoder: sp.TaskEncoder | None = None, **how: Any) -> sp.Batcher:
    return sp.Batcher(Items([1] * count), encoder=encoder or Lists(), **{"size": 3, **how})


def numbers(batches: list[Any]) -> list[list[int]]:
    return [batch[1:] for batch in batches]


def test_last_smaller_batch_is_yielded_unless_dropped() -> None:
    assert numbers(list(batcher(7))) == [[0, 1, 2], [3, 4, 5], [6]]
    assert numbers(list(batcher(7, drop_last=True))) == [[0, 1, 2], [3, 4, 5]]
    assert numbers(list(batcher(6, drop_last=True))) == numbers(list(batcher(6))) == [[0, 1, 2], [3, 4, 5]]
    assert list(batcher(0)) == []


@pytest.mark.parametrize(
    ("count", "drop_last", "expected"),
    [(0, False, []), (3, False, [1]), (4, False, [1, 1]), (4, True, [1]), (6, True, [1, 1]), (2, True, [])],
)
def test_more_returns_whether_another_batch_follows(count: int, drop_last: bool, expected: list[int]) -> None:
    stage = batcher(count, drop_last=drop_last)
    for _ in expected:
        assert stage.more() and stage.more()
        next(stage)
    assert not stage.more() and not stage.more()
    with pytest.raises(StopIteration):
        next(stage)


class Falsy(sp.TaskEncoder):
    """An encoder with a length of 0, as a container that is empty yet."""

    def __len__(self) -> int:
        return 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.key

    def pack(self, items: list[str], rng: sp.Rng) -> Any:
        return items

    def length(self, item: Any) -> int:
        return 1

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return ["of Falsy", *items]


def test_falsy_encoder_is_not_replaced(make_shards: Any) -> None:
    samples = sp.TarShardReader(str(make_shards([9])), sp.Lane(), shuffle=False)
    packs = sp.OnlinePacker(sp.Encode(samples, Ids()), max_length=2, encoder=Falsy())
    batch = next(sp.Batcher(packs, size=1))
    assert batch[0] == "of Falsy" and len(batch[1]) == 2
    assert next(sp.Batcher(sp.Encode(samples, Falsy()), size=1, encoder=Falsy()))[0] == "of Falsy"


def test_more_buffers_only_the_items_it_needs() -> None:
    stage = batcher(9)
    stage.more()
    assert stage.save_state()["held"] == [((0, 0, 0), None)]
    dropping = batcher(9, drop_last=True)
    dropping.more()
    assert dropping.save_state()["held"] == [((number, 0, 0), None) for number in range(3)]


@given(
    st.integers(0, 20),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.sampled_from(["more", "next", "cut"]), max_size=40),
)
def test_resume_anywhere_is_exact_with_and_without_buffered_items(
    count: int, size: int, drop_last: bool, steps: list[str]
) -> None:
    expected = list(batcher(count, size=size, drop_last=drop_last))
    stage, batches = batcher(count, size=size, drop_last=drop_last), []
    for step in steps:
        if step == "more":
            assert stage.more() == (len(batches) < len(expected))
        elif step == "next":
            batches += [batch for batch in [next(stage, None)] if batch is not None]
        else:
            state, stage = stage.save_state(), batcher(count, size=size, drop_last=drop_last)
            stage.restore_state(state)
            assert stage.source.fetched == []  # type: ignore[attr-defined]
            assert stage.save_state() == state
    assert batches + list(stage) == expected


def test_batch_has_the_refs_of_its_items_and_is_rebuilt_from_them() -> None:
    stage = batcher(7)
    for number, batch in enumerate(stage):
        refs = tuple((i, 0, 0) for i in range(3 * number, min(3 * number + 3, 7)))
        assert stage.ref == (number, *refs)
        assert stage.fetch(stage.ref) == batch


@pytest.mark.parametrize("restore", [False, True])
def test_batch_is_retried_after_an_error_and_nothing_is_lost(restore: bool) -> None:
    encoder = Lists(failures=3)
    stage, batches, errors = batcher(7, encoder=encoder), [], 0
    while len(batches) < 3:
        try:
            batches.append(next(stage))
        except sp.EncodeError as error:
            errors += 1
            assert isinstance(error.__cause__, OSError)
            assert (
                "Lists.batch failed: OSError: for now. Fix it and resume.\n  stage Batcher, batch 0 (3 items)"
                in str(error)
            )
            if restore:
                state, stage = stage.save_state(), batcher(7, encoder=encoder)
                stage.restore_state(state)
    assert errors == 3
    assert batches == list(batcher(7))


def test_without_any_encoder_a_batch_is_the_list_of_its_samples(make_shards: Any) -> None:
    reader = sp.TarShardReader(make_shards([5]), sp.Lane(), shuffle=False, epochs=1)
    stage = sp.Batcher(sp.ShuffleBuffer(reader, size=1), size=2)
    assert [[sample.json()["id"] for sample in batch] for batch in stage] == [[0, 1], [2, 3], [4]]
    assert [sample.json()["id"] for sample in stage.fetch((0, (3, 0, 0), (1, 0, 0)))] == [3, 1]


def test_samples_buffered_for_the_next_batch_are_restored(make_shards: Any) -> None:
    folder = make_shards([5])

    def build() -> sp.Batcher:
        return sp.Batcher(sp.TarShardReader(folder, sp.Lane(), shuffle=False, epochs=1), size=2)

    stage, after = build(), build()
    next(stage)
    assert stage.more()
    after.restore_state(stage.save_state())
    assert [[sample.json()["id"] for sample in batch] for batch in after] == [[2, 3], [4]]


def test_a_size_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, not 0"):
        batcher(3, size=0)


def test_the_state_of_another_stage_is_a_mismatch() -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="no state of Batcher"):
        batcher(3).restore_state({"next": 1})


def test_settings_name_the_encoder_only_if_it_is_not_the_one_upstream() -> None:
    assert batcher(1).settings() == {"size": 3, "drop_last": False, "encoder": "Lists"}
    upstream = sp.OnlinePacker(Items([1]), max_length=3, encoder=Packs())
    assert sp.Batcher(upstream, size=2).settings() == {"size": 2, "drop_last": False}


def test_padding_batch_is_equal_whether_the_first_batch_was_built_or_skipped(make_shards: Any) -> None:
    def stage() -> sp.Batcher:
        lane = sp.Lane(pad=True)
        reader = sp.TarShardReader(make_shards([7]), lane, epochs=1, shuffle=False)
        return sp.Batcher(sp.Encode(reader, Ids()), size=4)

    made, passed = stage(), stage()
    next(made)
    passed.pass_over()
    assert next(made)["id"].tolist() == next(passed)["id"].tolist()
    assert made.filler()["id"].tolist() == passed.filler()["id"].tolist() == [0, 0, 0, 0]


def test_padding_batch_after_a_resume_equals_the_uninterrupted_one(make_shards: Any) -> None:
    shards = make_shards([14])

    def stage() -> sp.Batcher:
        reader = sp.TarShardReader(shards, sp.Lane(1, 2, pad=True), epochs=1, shuffle=False, block_size=4)
        return sp.Batcher(sp.Encode(reader, Ids()), size=4)

    whole, resumed = stage(), stage()
    assert next(whole)["id"].tolist() == [4, 5, 6, 7]
    resumed.restore_state(whole.save_state())
    for own in (whole, resumed):
        assert next(own)["id"].tolist() == [12, 13, 12, 12]
        assert own.filler()["id"].tolist() == [4, 4, 4, 4], "of the first item of the lane"


class Ids(sp.TaskEncoder):
    """Items are dicts of the sample's number."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"]}


class Ragged(sp.TaskEncoder):
    """Tensors of as many values as the sample's number says."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"x": torch.zeros(max(3, sample.json()["id"]))}

    def length(self, item: Any) -> int:
        return len(item["x"])


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("bucketed", [False, True])
def test_items_that_cannot_be_stacked_are_named_with_their_samples(
    make_shards: Any, blended: bool, bucketed: bool
) -> None:
    shards = make_shards([6])
    lane = sp.Lane()

    def items() -> Any:
        return sp.Encode(sp.TarShardReader(shards, lane, shuffle=False, epochs=1), Ragged())

    source = sp.Blend({"a": items()}, weights={"a": 1}) if blended else items()
    stage = custom.BucketBatcher(source, bounds=[9], size=6) if bucketed else sp.Batcher(source, size=6)
    with pytest.raises(sp.EncodeError) as caught:
        next(stage)
    for part in (
        "items differ in ['x']: item 0 has shape (3,), item 4 has shape (4,)",
        "batch 0 (6 items)",
        "item 0 is of sample 's000000' of 0000.tar; item 4 is of sample 's000004' of 0000.tar",
    ):
        assert part in str(caught.value)
