"""Batches by length: which bucket, how many, what is held, and what happens to the rest."""

from __future__ import annotations

import enum
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.item_buffer import built_items
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.testing import _take_step, assert_exact_resume
from tests.conftest import write_numbered_shards
from tests.stages.packing.test_packer import Items, Packs
from tests.support.draws import few_examples


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


def batcher(lengths: list[int], *, encoder: sp.TaskEncoder | None = None, **how: Any) -> custom.BucketBatcher:
    settings = {"bounds": [2, 5], **({} if "max_tokens" in how else {"size": 2}), **how}
    return custom.BucketBatcher(Items(lengths), encoder=encoder or Numbers(), **settings)


def numbers(stage: custom.Stage) -> list[list[int]]:
    return [[number for number, _ in batch[1:]] for batch in stage]


def test_items_are_batched_with_those_of_their_bucket() -> None:
    #   lengths 1, 4, 2, 5, 3, 1: buckets of at most 2, and of 3 to 5
    assert numbers(batcher([1, 4, 2, 5, 3, 1])) == [[0, 2], [1, 3], [5], [4]]
    assert numbers(batcher([1, 4, 2, 5, 3, 1], drop_last=True)) == [[0, 2], [1, 3]]
    assert numbers(batcher([])) == []


def test_batch_size_is_limited_by_padded_tokens() -> None:
    assert numbers(batcher([1] * 5 + [5] * 3, max_tokens=10)) == [[0, 1, 2, 3, 4], [5, 6], [7]]


def test_item_longer_than_the_last_bound_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = batcher([6, 1, 9, 2])
    assert numbers(stage) == [[1, 3]]
    assert stage.counts == {
        "skipped/longer than the last bound": 2,
        "source/0/skipped": 2,
        "source/0/skipped/longer than the last bound": 2,
        "source/0/first": 2,
        "source/0/items": 2,
    }
    monkeypatch.setattr(StageInfo, "max_empty", 300)
    with pytest.raises(sp.EncodeError, match="300 items in a row were longer"):
        next(batcher([9] * 400))


def test_batch_has_the_refs_of_its_items_and_is_rebuilt_from_them() -> None:
    stage = batcher([1, 4, 2, 5])
    batch = next(stage)
    assert stage.ref == (0, (0, 0, 0), (2, 0, 0))
    assert stage.fetch(stage.ref) == batch
    assert built_items(stage) == 1


@pytest.mark.parametrize("restore", [False, True])
def test_step_is_retried_after_an_error_and_nothing_is_lost(restore: bool) -> None:
    lengths, encoder = [1, 4, 2, 5, 3], Numbers(failures=3)
    stage, batches, errors = batcher(lengths, encoder=encoder), [], 0
    while len(batches) < 3:
        try:
            batches.append(next(stage))
        except sp.EncodeError as error:
            errors += 1
            assert (
                "Numbers.length failed: OSError: for now. Fix it and resume.\n  stage BucketBatcher of Lane(0"
                in str(error)
            )
            if restore:
                state, stage = stage.save_state(), batcher(lengths, encoder=encoder)
                stage.restore_state(state)
    assert errors == 3
    assert batches == list(batcher(lengths))


def test_rebuilt_item_of_another_length_is_an_error() -> None:
    stage, after = batcher([4, 1, 2]), batcher([1, 1, 2, 4])
    next(stage)
    after.restore_state(stage.save_state())
    with pytest.raises(
        sp.CheckpointMismatchError, match=r"an item moved from bucket 1 to bucket 0.*\n  item \(0, 0, 0\)"
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


def test_batch_size_may_be_a_function_of_the_group() -> None:
    stage = batcher([1, 9, 5, 3, 7], bounds=[], group=Modulo(2), size=one_more)
    assert stage.settings()["size"] == "one_more"
    assert numbers(stage) == [[0], [2], [1, 3], [4]]
    with pytest.raises(ValueError, match="needs group="):
        batcher([1], size=one_more)


def one_more(group: int) -> int:
    return group + 1


def test_without_bounds_items_are_batched_by_group_only() -> None:
    assert numbers(batcher([1, 9, 5, 3], bounds=[], group=Modulo(2))) == [[0, 2], [1, 3]]


@few_examples(40)
@given(
    st.lists(st.integers(1, 6), max_size=30),
    st.sampled_from([None, "kind", kind_of, Modulo(4)]),
    st.booleans(),
    st.lists(st.sampled_from(["more", "next", "cut"]), max_size=40),
)
def test_resume_anywhere_is_exact_with_and_without_buffered_items(
    lengths: list[int], group: Any, drop_last: bool, steps: list[str]
) -> None:
    def make() -> custom.BucketBatcher:
        return batcher(lengths, group=group, size=[3, 2], drop_last=drop_last, encoder=Groups())

    expected, stage, batches = list(make()), make(), []
    for step in steps:
        if step == "more":
            assert stage.more() == (len(batches) < len(expected))
        elif step == "next":
            batches += [batch for batch in [next(stage, None)] if batch is not None]
        else:
            state, stage = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())), make()
            stage.restore_state(state)
            assert stage.source.fetched == [] and built_items(stage) == 0  # type: ignore[attr-defined]
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())) == state
    assert batches + list(stage) == expected


class Kind(enum.StrEnum):
    """Groups as users may name them: by `repr` they come in another order than their texts."""

    LONG = "b"
    MIDDLE = "c"
    SHORT = "a"


@pytest.mark.parametrize("kind", [Kind, np.str_])
def test_groups_of_a_str_subclass_are_saved_as_str(kind: Any) -> None:
    def make() -> custom.BucketBatcher:
        return batcher(
            [3] * 24,
            group=lambda item: kind("abc"[item[0] % 3]),
            size=2,
            encoder=Groups(),
            same_bucket=True,
            candidates=4,
        )

    expected = list(make())
    for cut in range(len(expected)):
        stage = make()
        for _ in range(cut):
            next(stage)
        state, stage = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())), make()
        stage.restore_state(state)
        assert list(stage) == expected[cut:]


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
        ({"group": lambda item: 1.5}, "<lambda> failed: ValueError: a group must be an int, a str, None, or a tuple"),
        ({"group": lambda item: item[7]}, "<lambda> failed: IndexError"),
        ({"group": kind_of, "size": {"one": 1}}, "group None has no size. Add one. Sizes exist for 'one'"),
    ],
)
def test_invalid_group_is_an_error_and_the_item_is_not_lost(how: dict[str, Any], what: str) -> None:
    stage = batcher([1, 4], **how)
    for _ in range(2):
        with pytest.raises(sp.EncodeError, match=what):
            next(stage)
    assert stage.save_state()["taken"] == [((0, 0, 0), None)]


def test_a_state_with_other_groups_is_a_mismatch() -> None:
    began = batcher([1, 4, 1, 4], group=Modulo(4), size=[9, 9])
    began.more()  # the source ends: every group's rest is held
    state = began.save_state()
    assert state["keys"] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for other, what in [
        (batcher([1]), "the group= and"),
        (batcher([1], group=Modulo(4), size={0: 1}), "group 1 has no size"),
        (batcher([1], bounds=[], group=Modulo(4)), "the bounds= of the saved run"),
    ]:
        with pytest.raises(sp.CheckpointMismatchError, match=what):
            other.restore_state(state)
    with pytest.raises(sp.CheckpointMismatchError, match="the group= and"):
        began.restore_state(batcher([1]).save_state())


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"group": "kind"}, "Numbers has no method 'kind'"),
        ({"group": 3}, "group must be a function, not 3"),
        ({"group": partial(Groups.kind, None)}, "has no name"),
        ({"bounds": [], "group": kind_of, "max_tokens": 8}, "max_tokens needs bounds"),
        ({"size": {"one": 1}}, "needs group="),
        ({"size": [1, 2, 3]}, "one size per bucket, 2, not 3"),
        ({"size": [1, 0]}, "at least 1"),
        ({"bounds": []}, "ascending"),
        ({"bounds": [5, 5]}, "ascending"),
        ({"bounds": [0, 5]}, "ascending"),
        ({"size": 0}, "at least 1"),
        ({"candidates": 0}, "candidates must be at least 1, not 0"),
        ({"size": 3, "max_tokens": 8}, "size or max_tokens, not both"),
        ({"max_tokens": 4}, "at least the last bound, 5"),
    ],
)
def test_wrong_settings_are_rejected(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        batcher([1], **how)


def test_a_state_of_other_buckets_is_a_mismatch() -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="the state has 2 buckets"):
        batcher([1], bounds=[5]).restore_state(batcher([1]).save_state())


class Marked(sp.TaskEncoder):
    """Items whose length, and whether they are left out, follow from their number; batches as dicts."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return sp.Skip("seventh") if number % 7 == 6 else number

    def length(self, item: int) -> int:
        return item * 5 % 13

    def parity(self, item: int) -> int:
        return item % 2

    def batch(self, items: list[int], rng: sp.Rng) -> dict[str, Any]:
        return {"id": torch.tensor(items)}


def padded(shards: str, how: dict[str, Any], lane: sp.Lane) -> custom.Stage:
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane, epochs=1), size=5)
    return custom.BucketBatcher(sp.Encode(samples, Marked()), **how)


PADDED: list[dict[str, Any]] = [
    {"bounds": [4, 9], "size": [4, 3]},  # lengths of 10 to 12 are left out
    {"bounds": [4, 12], "max_tokens": 24},
    {"group": "parity", "size": {0: 4, 1: 3}},
]


def check_once(shards: str, count: int, how: dict[str, Any], lanes: int, ranks: int, workers: int) -> None:
    """Each sample that is not left out comes once, in batches of the rows of their bucket, as many on each rank."""
    run: dict[str, Any] = {"seed": 3, "lanes": lanes, "tail": "pad"}
    alone = [
        (batch["id"].tolist(), batch["valid"].tolist())
        for batch in sp.SavableLoader(partial(padded, shards, how), **run)
    ]
    if workers:
        with sp.SavableLoader(partial(padded, shards, how), num_workers=workers, **run) as own:
            assert [(batch["id"].tolist(), batch["valid"].tolist()) for batch in own] == alone
    runs = [Run(LoaderSettings(partial(padded, shards, how), ranks=(rank, ranks), **run)) for rank in range(ranks)]
    found = []
    while (step := _take_step(runs))[0].epoch == 0:  # then the next pass is started
        assert len(step) == ranks
        found += [(entry.batch["id"].tolist(), entry.batch["valid"].tolist()) for entry in step]
    assert found[: len(alone)] == alone and not any(any(valid) for _, valid in found[len(alone) :])
    longest = how["bounds"][-1] if "bounds" in how else 100
    encoder, wanted = Marked(), [number for number in range(count) if number % 7 != 6]
    kept = [number for number in wanted if encoder.length(number) <= longest]
    assert sorted(number for ids, valid in found for number, own in zip(ids, valid, strict=True) if own) == kept
    for ids, valid in found:
        size = custom.BucketBatcher(Items([]), encoder=encoder, **how)._rows_of(ids[0])
        assert len(ids) == len(valid) == size and set(ids) <= set(kept)


@few_examples(4)
@given(st.integers(1, 60), st.sampled_from(PADDED), st.sampled_from([(1, 1), (6, 1), (6, 2), (6, 3), (12, 4)]))
def test_padded_buckets_yield_every_sample_once_on_any_number_of_ranks(
    count: int, how: dict[str, Any], split: tuple[int, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_numbered_shards(Path(folder), [count])
        check_once(folder, count, how, *split, workers=0)


def test_padded_buckets_are_equal_with_workers_and_resume_exactly(make_shards: Any) -> None:
    shards = str(make_shards([20, 3]))
    check_once(shards, 23, PADDED[0], 6, 2, workers=2)
    wide: dict[str, Any] = {"steps": 4, "world_sizes": (1, 2), "after": 2, "chains": 1}
    assert assert_exact_resume(partial(padded, shards, PADDED[2]), seed=3, lanes=6, tail="pad", **wide)


@pytest.mark.parametrize("how", PADDED)
@pytest.mark.parametrize("first", ["made", "passed over", "restored"])
def test_padding_rows_repeat_the_first_item_of_their_batch_or_lane(
    make_shards: Any, how: dict[str, Any], first: str
) -> None:
    shards = str(make_shards([23]))
    stage, as_it_was = (padded(shards, how, sp.Lane(seed=3, pad=True)) for _ in range(2))
    begun = next(as_it_was)
    if first == "passed over":
        stage.pass_over()
    else:
        assert next(stage)["id"].tolist() == begun["id"].tolist()
    if first == "restored":
        state, stage = stage.save_state(), padded(shards, how, sp.Lane(seed=3, pad=True))
        stage.restore_state(state)
    filled = 0
    for batch in stage:
        ids, valid = batch["id"].tolist(), sum(batch["valid"].tolist())
        assert ids[valid:] == ids[:1] * (len(ids) - valid)
        filled += len(ids) - valid
    assert filled
    for _ in range(2):
        filler = stage.filler()
        assert filler["id"].tolist() == begun["id"].tolist()[:1] * len(begun["id"])
        assert not filler["valid"].any()


def test_lane_without_items_pads_with_an_item_of_another_lane(make_shards: Any) -> None:
    shards = str(make_shards([3]))
    stage = padded(shards, PADDED[0], sp.Lane(5, 6, seed=3, pad=True))
    assert next(stage, None) is None
    filler = stage.filler()
    ids = filler["id"].tolist()
    assert ids == ids[:1] * stage._rows_of(ids[0]) and ids[0] in (0, 1, 2) and not filler["valid"].any()


# The same bucket for the ranks of a step.


@few_examples(30)
@given(
    st.lists(st.integers(1, 6), max_size=60),
    st.sampled_from([None, "kind"]),
    st.sampled_from([1, 2, 7]),
    st.booleans(),
    st.lists(st.sampled_from(["more", "next", "pass", "cut"]), max_size=40),
)
def test_lanes_with_same_bucket_resume_exactly_from_any_state(
    lengths: list[int], group: Any, candidates: int, drop_last: bool, steps: list[str]
) -> None:
    def make() -> custom.BucketBatcher:
        how: dict[str, Any] = {"group": group, "size": [3, 2], "drop_last": drop_last}
        return batcher(lengths, encoder=Groups(), same_bucket=True, candidates=candidates, **how)

    expected, stage, given_before = list(make()), make(), 0
    for step in steps:
        if step == "more":
            assert stage.more() == (given_before < len(expected))
        elif step == "cut":
            state, stage = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())), make()
            stage.restore_state(state)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())) == state
        elif given_before < len(expected):
            if step == "pass":
                stage.pass_over()
            else:
                assert next(stage) == expected[given_before]
            given_before += 1
    assert list(stage) == expected[given_before:]
    every = sorted(number for batch in expected for number, _ in batch[1:])
    assert every == [number for number, length in enumerate(lengths) if length < 6] or drop_last


def alike(shards: str, candidates: int, lane: sp.Lane) -> custom.BucketBatcher:
    items = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=6), Marked())
    same: dict[str, Any] = {"same_bucket": True, "candidates": candidates} if candidates else {}
    return custom.BucketBatcher(items, bounds=[3, 6, 12], size=[3, 2, 4], **same)


def test_same_bucket_run_resumes_exactly(make_shards: Any) -> None:
    shards = str(make_shards([40, 40]))
    assert_exact_resume(partial(alike, shards, 5), lanes=6, steps=12, world_sizes=(1, 3), chains=1, after=2)


def same_in_a_step(shards: str, candidates: int) -> list[float]:
    """The mean share of 2, 4 and 8 ranks that have the bucket that most of them have in a step."""
    lanes = [alike(shards, candidates, sp.Lane(index, 8, 3)) for index in range(8)]
    rounds = [[len(next(lane)["id"]) for lane in lanes] for _ in range(120)][20:]  # the size tells the bucket
    found = []
    for ranks in (2, 4, 8):
        steps = [each[first : first + ranks] for each in rounds for first in range(0, 8, ranks)]
        found.append(sum(max(map(step.count, step)) for step in steps) / (ranks * len(steps)))
    return found


def test_ranks_of_a_step_mostly_have_the_same_bucket_for_any_world_size(make_shards: Any) -> None:
    shards = str(make_shards([300, 100]))
    assert all(share < 0.75 for share in same_in_a_step(shards, 0))
    assert all(share > 0.93 for share in same_in_a_step(shards, 16))


def test_same_bucket_lanes_buffer_at_most_the_allowed_full_batches(make_shards: Any) -> None:
    stage, full = alike(str(make_shards([300])), 6, sp.Lane(seed=3)), []
    for _ in range(60):
        assert stage.more()
        refs = stage.save_state()["buckets"]
        full.append(sum(len(bucket) // size for bucket, size in zip(refs, (3, 2, 4), strict=True)))
        next(stage)
    assert full == [4, 5] + [6] * 58


def test_state_with_another_same_bucket_is_rejected_by_name(make_shards: Any) -> None:
    shards = str(make_shards([40]))
    for before, after in [(0, 4), (4, 0)]:
        with sp.SavableLoader(partial(alike, shards, before), seed=3, lanes=2) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with sp.SavableLoader(partial(alike, shards, after), seed=3, lanes=2) as loader:
            with pytest.raises(sp.CheckpointMismatchError) as refused:
                loader.load_state_dict(state)
            named = [line.partition(":")[0].strip() for line in str(refused.value).splitlines()[1:-1]]
            assert named == ["BucketBatcher.same_bucket"]
            loader.load_state_dict(state, allow={"BucketBatcher.same_bucket"})
            assert len(next(iter(loader))["id"])


def test_settings_and_state_omit_same_bucket_if_it_is_off(make_shards: Any) -> None:
    shards = str(make_shards([40]))
    plain, same = (alike(shards, candidates, sp.Lane(seed=3)) for candidates in (0, 4))
    assert {"same_bucket": True, "candidates": 4}.items() <= same.settings().items()
    assert not {"same_bucket", "candidates"} & plain.settings().keys()
    assert next(plain) and next(same)
    assert same.save_state().keys() - plain.save_state().keys() == {"past"}


def test_order_of_same_bucket_lanes_equals_the_golden_order() -> None:
    lengths = [1 + number * number % 11 for number in range(900)]
    stage = batcher(lengths, bounds=[2, 5, 12], size=[4, 3, 2], same_bucket=True, candidates=6)
    assert xxh3_64_hexdigest(repr(numbers(stage)).encode()) == "05768551bdab17bd"


def test_same_bucket_works_after_a_blend() -> None:
    with pytest.raises(ValueError, match="must be after the Blend, not in its source 'a'"):
        sp.Blend({"a": batcher([1], same_bucket=True)}, weights={"a": 1})
    assert next(sp.Blend({"a": batcher([1, 1])}, weights={"a": 1}))[1:] == [(0, 1), (1, 1)]
