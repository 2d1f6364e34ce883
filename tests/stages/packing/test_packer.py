"""Packing: the two policies against plain ones, nothing lost, and open packs that survive a cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.stages.chunked_stage import ChunkedStage
from savable_pipeline.stages.item_buffer import built_items
from savable_pipeline.stages.stage import ItemRef
from savable_pipeline.stages.stage_info import StageInfo
from tests.support.draws import few_examples
from tests.support.toy_dataset import readers

LENGTHS = st.lists(st.integers(1, 12), max_size=60)
Pack = list[tuple[int, int]]  # (number, length) of its items


class Packs(sp.TaskEncoder):
    """Items are (number, length); a pack is the list of its items."""

    global_rng = False

    def length(self, item: Any) -> int:
        return item[1]  # type: ignore[no-any-return]

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return list(items)


class Items(custom.ItemStage):
    """Gives (number, length) for each of some lengths; remakes them by ref."""

    def __init__(self, lengths: list[Any]) -> None:
        super().__init__(readers([max(1, len(lengths))])(0))
        self.lengths = lengths
        self.next = 0
        self.fetched: list[int] = []

    def __next__(self) -> tuple[int, int]:
        if self.next == len(self.lengths):
            raise StopIteration
        self.next += 1
        return self.next - 1, self.lengths[self.next - 1]

    @property
    def ref(self) -> ItemRef:
        return (self.next - 1, 0, 0)

    def fetch(self, ref: Any) -> tuple[int, int]:
        self.fetched.append(ref[0])
        return ref[0], self.lengths[ref[0]]

    def save_state(self) -> dict[str, Any]:
        return {"next": self.next}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def packer(lengths: list[Any], *, encoder: sp.TaskEncoder | None = None, **how: Any) -> sp.OnlinePacker:
    return sp.OnlinePacker(Items(lengths), encoder=encoder or Packs(), **{"max_length": 10, "open_packs": 3, **how})


def best_fit(lengths: list[int], max_length: int, open_packs: int) -> Iterator[Pack]:
    """Each item to the fullest pack with room; with too many open, the fullest but the new one goes."""
    packs: list[Pack] = []

    def full(pack: Pack) -> int:
        return sum(length for _, length in pack)

    for number, length in enumerate(lengths):
        if length > max_length:
            continue
        fitting = [pack for pack in packs if full(pack) + length <= max_length]
        if fitting:
            max(fitting, key=full).append((number, length))
        else:
            packs.append([(number, length)])
        for pack in [pack for pack in packs if full(pack) == max_length]:
            packs.remove(pack)
            yield pack
        if len(packs) > open_packs:
            fullest = max(packs[:-1], key=full)
            packs.remove(fullest)
            yield fullest
    yield from packs


def first_fit(lengths: list[int], max_length: int, open_packs: int) -> Iterator[Pack]:
    """Each item to the oldest pack with room; with too many open, the oldest goes."""
    packs: list[Pack] = []
    for number, length in enumerate(lengths):
        if length > max_length:
            continue
        for pack in packs:
            if sum(n for _, n in pack) + length <= max_length:
                pack.append((number, length))
                break
        else:
            packs.append([(number, length)])
        for pack in [pack for pack in packs if sum(n for _, n in pack) == max_length]:
            packs.remove(pack)
            yield pack
        if len(packs) > open_packs:
            yield packs.pop(0)
    yield from packs


REFERENCES: dict[str, Callable[[list[int], int, int], Iterator[Pack]]] = {"best_fit": best_fit, "first_fit": first_fit}
POLICIES = st.sampled_from(["best_fit", "first_fit"])


@few_examples(60)
@given(LENGTHS, st.integers(1, 14), st.integers(1, 5), POLICIES)
def test_packs_are_those_of_a_plain_implementation(lengths: list[int], longest: int, n: int, policy: str) -> None:
    stage = packer(lengths, max_length=longest, open_packs=n, policy=policy)
    packs = list(stage)
    assert packs == list(REFERENCES[policy](lengths, longest, n))
    assert sorted(item for pack in packs for item in pack) == [
        (number, length) for number, length in enumerate(lengths) if length <= longest
    ]
    assert all(pack and sum(length for _, length in pack) <= longest for pack in packs)
    assert stage.counts["skipped/longer than max_length"] == sum(length > longest for length in lengths)


def test_exactly_full_pack_is_yielded_before_another_item_is_taken() -> None:
    stage = packer([4, 6, 10, 1])
    assert next(stage) == [(0, 4), (1, 6)]
    assert not stage.save_state()["packs"], "what was taken ahead is in no pack yet"
    assert list(stage) == [[(2, 10)], [(3, 1)]]


def test_too_long_item_is_dropped_and_counted() -> None:
    stage = packer([11, 3, 99, 10])
    assert list(stage) == [[(3, 10)], [(1, 3)]]
    assert stage.counts == {
        "skipped/longer than max_length": 2,
        "source/0/skipped": 2,
        "source/0/skipped/longer than max_length": 2,
        "source/0/first": 2,
        "source/0/skipped_tokens": 110,
        "source/0/items": 2,
        "source/0/tokens": 13,
        "skipped_tokens": 110,
        "packs": 2,
        "items": 2,
        "tokens": 13,
        "room": 7,
    }


def test_requested_drops_are_not_counted_as_losses_of_a_source() -> None:
    stage = packer([11, 3, 99, 10], too_long="skip")
    assert list(stage) == [[(3, 10)], [(1, 3)]]
    assert stage.counts["skipped/longer than max_length"] == stage.counts["source/0/skipped"] == 2
    assert not [name for name in stage.counts if name.startswith(("source/0/skipped/", "source/0/skipped_tokens"))]


def test_only_too_long_items_raise_an_error_instead_of_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageInfo, "max_empty", 300)
    stage = packer([11] * 400)
    with pytest.raises(sp.EncodeError, match=r"300 items in a row were longer than max_length, the last one with 11"):
        next(stage)


def test_state_counts_how_often_an_item_was_postponed() -> None:
    def decreasing() -> sp.OnlinePacker:
        return packer([1, *[10] * 40], policy="first_fit_decreasing", open_packs=2)

    expected = list(decreasing())
    assert expected.index([(0, 1)]) <= 15
    stage, packs = decreasing(), []
    for _ in expected:
        state, stage = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())), decreasing()
        stage.restore_state(state)
        packs.append(next(stage))
    assert packs == expected


def open_packs(state: dict[str, Any]) -> list[Any]:
    """The pieces of each open pack of a state: the ref, the length and what else is saved of each."""
    return [msgspec.msgpack.decode(pack) for pack in state["packs"]]


def test_the_state_is_the_refs_and_lengths_of_open_packs() -> None:
    stage = packer([10, 6, 7, 3, 10])
    next(stage), next(stage)  # [10] and [7, 3]
    state = stage.save_state()
    assert open_packs(state) == [[[[1, 0, 0], 6]]]
    assert state == {
        "packs": state["packs"],
        "count": 2,
        "taken": None,
        "source": {"next": 4},
    }


@pytest.mark.parametrize("policy", ["best_fit", "first_fit", "first_fit_decreasing"])
def test_a_saved_state_stays_the_same_while_later_packs_are_filled(policy: Any) -> None:
    def shuffled() -> sp.OnlinePacker:
        return packer([1 + number * 7 % 9 for number in range(60)], policy=policy)

    stage, states, saved, packs = shuffled(), [], [], []
    for pack in stage:
        packs.append(pack)
        states.append(stage.save_state())
        saved.append(msgspec.msgpack.encode(states[-1]))
    assert [msgspec.msgpack.encode(state) for state in states] == saved
    for number, state in enumerate(states):
        resumed = shuffled()
        resumed.restore_state(state)
        assert list(resumed) == packs[number + 1 :]


def test_pack_has_the_refs_of_its_items_and_is_rebuilt_from_them() -> None:
    stage = packer([4, 6, 3])
    pack = next(stage)
    assert stage.ref == (0, (0, 0, 0), (1, 0, 0))
    assert stage.fetch(stage.ref) == pack
    next(stage)
    assert stage.ref == (1, (2, 0, 0))


class DrawingPacks(Packs):
    """Packs with a random number in front."""

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [rng.integers(10**9), *items]


def test_random_numbers_of_a_pack_belong_to_its_number_in_the_lane() -> None:
    stage = packer([10] * 5, encoder=DrawingPacks())
    packs = list(stage)
    assert len({pack[0] for pack in packs}) == 5
    again = packer([10] * 5, encoder=DrawingPacks())
    assert next(again) == packs[0]
    resumed = packer([10] * 5, encoder=DrawingPacks())
    resumed.restore_state(again.save_state())
    assert list(resumed) == packs[1:]
    assert again.fetch((3, (3, 0, 0))) == packs[3]


class FailingPacks(Packs):
    """Fails in `length` and in `pack`, each so many times for each call."""

    def __init__(self, in_length: int, in_pack: int) -> None:
        self.left = {"length": in_length, "pack": in_pack}

    def _fail(self, where: str) -> None:
        if self.left[where]:
            self.left[where] -= 1
            raise OSError("for now")

    def length(self, item: Any) -> int:
        self._fail("length")
        return super().length(item)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        self._fail("pack")
        return super().pack(items, rng)


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize(("in_length", "in_pack"), [(0, 3), (3, 0), (2, 2)])
def test_step_is_retried_after_an_error_and_nothing_is_lost(in_length: int, in_pack: int, restore: bool) -> None:
    lengths = [6, 7, 8, 3, 2, 10, 1]
    expected = list(packer(lengths))
    encoder = FailingPacks(in_length, in_pack)
    stage, packs, errors = packer(lengths, encoder=encoder), [], 0
    while len(packs) < len(expected):
        try:
            packs.append(next(stage))
        except sp.EncodeError as error:
            assert isinstance(error.__cause__, OSError)
            assert "FailingPacks." in str(error) and "for now. Fix it and resume.\n  stage OnlinePacker" in str(error)
            errors += 1
            if restore:
                state, stage = stage.save_state(), packer(lengths, encoder=encoder)
                stage.restore_state(state)
    assert errors == in_length + in_pack
    assert packs == expected


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor, bool])
def test_lengths_of_any_integer_kind_are_saved_as_plain_integers(kind: Any) -> None:
    stage = packer([kind(1), kind(1), 10])
    next(stage)
    assert [type(length) for pack in open_packs(stage.save_state()) for _, length in pack] == [int, int]


@pytest.mark.parametrize(("length", "cause"), [(2.5, TypeError), (-1, ValueError), ("4", TypeError)])
def test_length_that_is_not_a_count_is_an_error(length: Any, cause: type[Exception]) -> None:
    with pytest.raises(sp.EncodeError, match=r"Packs\.length failed") as caught:
        next(packer([length]))
    assert isinstance(caught.value.__cause__, cause)


def test_item_of_length_0_is_an_error() -> None:
    with pytest.raises(sp.EncodeError, match="an item has at least 1"):
        list(packer([3, 0]))


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"open_packs": 0}, {"policy": "worst_fit"}])
def test_wrong_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="OnlinePacker"):
        packer([1], **wrong)


def test_packer_without_an_upstream_encoder_needs_one() -> None:
    with pytest.raises(ValueError, match="Add one, or pass encoder="):
        sp.OnlinePacker(Items([1]), max_length=10)


def test_an_open_pack_that_is_longer_than_this_packers_is_a_mismatch() -> None:
    stage = packer([6, 3, 10])
    next(stage)
    with pytest.raises(sp.CheckpointMismatchError, match="an open pack of the state is 1 longer"):
        packer([6, 3, 10], max_length=8).restore_state(stage.save_state())
    with pytest.raises(sp.CheckpointMismatchError, match="no state of OnlinePacker"):
        stage.restore_state({"next": 0})


def test_settings_name_the_encoder_only_if_it_is_not_the_one_upstream(make_shards: Any) -> None:
    assert packer([]).settings() == {"max_length": 10, "policy": "best_fit", "open_packs": 3, "encoder": "Packs"}
    items = sp.Encode(sp.TarShardReader(make_shards([1]), sp.Lane()), Packs())
    assert "encoder" not in sp.OnlinePacker(items, max_length=5).settings()


# Cuts, a second budget, and what is held.


class Spans(Packs):
    """Items are (number, length) or, cut, (number, length, start); one image for every three tokens at their front."""

    def length(self, item: Any) -> int:
        return item[1]  # type: ignore[no-any-return]

    def images(self, item: Any) -> int:
        return int(item[1]) // 3

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return (item[0], stop - start, start)


ALL = st.sampled_from(["sequential", "first_fit", "best_fit", "first_fit_decreasing"])
HOW = st.fixed_dictionaries(
    {
        "policy": ALL,
        "max_length": st.integers(6, 14),
        "max_images": st.sampled_from([None, 4, 6]),
        "too_long": st.sampled_from([None, "skip", "truncate", "split"]),
        "open_packs": st.integers(1, 4),
        "max_buffer_bytes": st.sampled_from([0, 700, 1 << 30]),
    }
)


def cutting(lengths: list[int], **how: Any) -> sp.OnlinePacker:
    return packer(lengths, encoder=Spans(), **how)


@few_examples(70)
@given(st.lists(st.integers(1, 40), max_size=50), HOW, st.sets(st.integers(0, 30), max_size=6))
def test_tokens_in_equal_tokens_out_and_counted_after_any_interruption(
    lengths: list[int], how: dict[str, Any], cuts: set[int]
) -> None:
    expected = list(cutting(lengths, **how))
    stage, packs, counts = cutting(lengths, **how), [], Counter[str]()
    while len(packs) < len(expected):
        if len(packs) in cuts:
            state = stage.save_state()
            counts += stage.counts
            stage = cutting(lengths, **how)
            stage.restore_state(state)
            assert stage.source.fetched == []  # type: ignore[attr-defined]
            assert stage.save_state() == state
        packs.append(next(stage))
    assert next(stage, None) is None
    counts += stage.counts
    assert packs == expected
    assert counts["packs"] == len(packs)
    assert counts["tokens"] + counts["room"] == how["max_length"] * len(packs)
    assert counts["tokens"] == sum(item[1] for pack in packs for item in pack)
    assert sum(lengths) == counts["tokens"] + counts["skipped_tokens"] + counts["truncated_tokens"]
    assert all(sum(item[1] for item in pack) <= how["max_length"] for pack in packs)
    assert all(sum(item[1] // 3 for item in pack) <= (how["max_images"] or 99) for pack in packs)
    for number, length in enumerate(lengths):
        starts = sorted(
            (item[2] if len(item) == 3 else 0, item[1]) for pack in packs for item in pack if item[0] == number
        )
        assert [start for start, _ in starts] == [sum(n for _, n in starts[:i]) for i in range(len(starts))]
        assert counts["skipped_tokens"] or counts["truncated_tokens"] or sum(n for _, n in starts) == length


def test_too_long_item_is_skipped_truncated_or_split() -> None:
    assert list(cutting([25, 3], too_long="skip")) == [[(1, 3)]]
    assert list(cutting([25, 3], too_long="truncate")) == [[(0, 10, 0)], [(1, 3)]]
    assert list(cutting([25, 3], too_long="split")) == [[(0, 10, 0)], [(0, 10, 10)], [(0, 5, 20), (1, 3)]]
    assert list(cutting([4, 25], policy="sequential")) == [[(0, 4), (1, 6, 0)], [(1, 10, 6)], [(1, 9, 16)]]
    stage = cutting([25, 3], too_long="truncate")
    list(stage)
    assert (stage.counts["truncated"], stage.counts["truncated_tokens"]) == (1, 15)


def test_pack_has_at_most_max_images() -> None:
    assert list(cutting([3, 3, 3, 1], max_images=2)) == [[(0, 3), (1, 3), (3, 1)], [(2, 3)]]
    stage = cutting([9, 1], max_images=2)
    assert list(stage) == [[(1, 1)]]
    assert stage.counts["skipped/of more than max_images"] == 1
    assert next(packer([10], max_images=2)) == next(packer([10]))  # an encoder that says nothing of images has none


def test_the_ref_of_a_pack_says_which_part_of_an_item_it_has() -> None:
    stage = cutting([4, 25], policy="sequential")
    packs = {}
    for pack in stage:
        packs[stage.ref] = pack
    assert list(packs) == [
        (0, (0, 0, 0), ((1, 0, 0), 0, 6)),
        (1, ((1, 0, 0), 6, 16)),
        (2, ((1, 0, 0), 16, 25)),
    ]
    assert {ref: stage.fetch(ref) for ref in packs} == packs


def test_after_a_restore_an_item_with_several_buffered_pieces_is_read_once() -> None:
    after = cutting([10, 5, 9], policy="sequential")
    pack = [msgspec.msgpack.encode([((2, 0, 0), 4, 0, 0, 9)])]
    after.restore_state({"packs": pack, "count": 7, "taken": (2, 0, 0), "taken_part": (4, 9), "source": {"next": 3}})
    assert list(after) == [[(2, 4, 0), (2, 5, 4)]]
    assert after.source.fetched == [2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["best_fit", "sequential"])
def test_changed_encoder_is_detected(policy: Any) -> None:
    stage = cutting([10, 7, 9], policy=policy)
    next(stage)
    next(stage)
    after = cutting([10, 8, 8], policy=policy)
    after.restore_state(stage.save_state())
    with pytest.raises(sp.CheckpointMismatchError, match=r"an item has length \d, but had \d when the state was saved"):
        list(after)


def test_encoder_cut_of_another_length_than_requested_is_an_error() -> None:
    class Wrong(Spans):
        def cut(self, item: Any, start: int, stop: int) -> Any:
            return (item[0], stop - start - 1, start)

    with pytest.raises(sp.EncodeError, match=r"Wrong\.cut failed: ValueError: 9 tokens instead of 10"):
        next(packer([11], encoder=Wrong(), too_long="split"))


def test_items_beyond_the_process_budget_are_rebuilt() -> None:
    lengths = [6, 7, 8, 3, 2, 10, 1]
    stage, poor = packer(lengths), packer(lengths, max_buffer_bytes=0)
    first = next(stage)
    assert next(poor) == first
    ahead = len(stage._pieces.ahead)  # taken at once, at most 16, and in no pack yet: beside the limit
    assert built_items(stage) == 2 + ahead
    assert built_items(poor) == ahead
    assert list(poor) == list(stage)
    assert stage.source.fetched == []  # type: ignore[attr-defined]
    assert sorted(poor.source.fetched) == list(range(7))  # type: ignore[attr-defined]


def test_missing_items_of_a_pack_are_rebuilt_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []
    make = ChunkedStage.make

    def counting(stage: ChunkedStage, elements: Any) -> None:
        requested.append(len(elements))
        make(stage, elements)

    monkeypatch.setattr(ChunkedStage, "make", counting)
    packs = list(packer([3, 3, 3, 5, 5, 2, 2, 2, 2, 2] * 4, max_buffer_bytes=0))
    assert requested == [len(pack) for pack in packs]


def test_lanes_of_a_process_share_one_budget() -> None:
    shared: dict[Any, Any] = {}
    stages = []
    for _ in range(2):
        items = Items([4, 4, 4])
        items.source._lane.worker = WorkerContext(shared=shared)  # type: ignore[attr-defined]
        stages.append(sp.OnlinePacker(items, max_length=11, open_packs=1, encoder=Packs(), max_buffer_bytes=300))
    for stage in stages:
        assert stage._pieces.add_next() and stage._pieces.add_next()
    assert [built_items(stage) - len(stage._pieces.ahead) for stage in stages] == [2, 0]
    del stages[0], stage
    assert shared["held items"].used == 0
