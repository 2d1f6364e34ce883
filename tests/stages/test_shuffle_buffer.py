"""The shuffle buffer, of samples and of items: the same order however it is asked, nothing lost, refs only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.keyed_random import word
from savable_pipeline.stages.item_buffer import built_items
from savable_pipeline.testing import assert_exact_resume
from tests.support.toy_dataset import drain, index_epoch_pairs, readers, take_refs


def buffer(count: int, size: int, *, epochs: int | None = 1, lanes: int = 1, seed: int = 0) -> sp.ShuffleBuffer:
    return sp.ShuffleBuffer(readers([count], lanes=lanes, seed=seed, epochs=epochs)(0), size=size)


def reference(refs: list[tuple[int, int]], size: int, key: int) -> list[tuple[int, int]]:
    """What a buffer of `size` gives of `refs`: draw number n is word n of the key."""
    slots, given = refs[:size], []
    draws = (word(key, n) >> 32 for n in itertools.count())
    for ref in refs[size:]:
        slot = next(draws) * size >> 32
        given.append(slots[slot])
        slots[slot] = ref
    while slots:
        slot = next(draws) * len(slots) >> 32
        given.append(slots[slot])
        slots[slot] = slots[-1]
        slots.pop()
    return given


@given(st.integers(1, 300), st.integers(1, 100), st.lists(st.integers(1, 60), min_size=1))
@example(count=3000, size=50, chunks=[700, 1, 333])  # more draws than are computed at once
def test_shuffle_buffer_equals_ten_lines_of_plain_python_for_any_chunk_size(
    count: int, size: int, chunks: list[int]
) -> None:
    expected = reference(drain(readers([count], epochs=1)(0)), size, sp.Lane().key("shuffle", 1))
    stage, given = buffer(count, size), []
    for chunk in itertools.cycle(chunks):
        refs = stage.take(chunk)
        assert len(refs) <= chunk
        if not len(refs):
            break
        given += index_epoch_pairs(refs)
    assert given == expected
    assert sorted(given) == [(i, 0) for i in range(count)]


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 130), st.integers(1, 9))
def test_shuffle_buffer_resumes_exactly_from_any_position(count: int, size: int, cut: int, chunk: int) -> None:
    expected = drain(buffer(count, size, epochs=2))
    cut = min(cut, len(expected))
    before, after = buffer(count, size, epochs=2), buffer(count, size, epochs=2)
    assert take_refs(before, cut) == expected[:cut]
    after.restore_state(before.save_state())
    assert after.save_state() == before.save_state()
    assert drain(after, chunk) == expected[cut:]


def test_repeated_resumes_are_exact() -> None:
    expected, stage, given = take_refs(buffer(50, 20, epochs=None), 300), buffer(50, 20, epochs=None), []
    for chunk in itertools.cycle([1, 0, 7, 40]):
        given += take_refs(stage, chunk)
        if len(given) > 250:
            break
        state, stage = stage.save_state(), buffer(50, 20, epochs=None)
        stage.restore_state(state)
    assert given == expected[: len(given)]


def test_state_has_the_refs_in_order_at_twelve_bytes_each() -> None:
    stage = buffer(100, 10)
    given = take_refs(stage, 25)
    state = stage.save_state()
    rows = [state["refs"][i : i + 12] for i in range(0, len(state["refs"]), 12)]
    held = [(int.from_bytes(row[:8], "little"), int.from_bytes(row[8:], "little")) for row in rows]
    taken = drain(readers([100], epochs=1)(0))[:35]
    assert len(held) == 10
    assert sorted(given + held) == sorted(taken)
    key, slots = sp.Lane().key("shuffle", 1), taken[:10]
    for n, ref in enumerate(taken[10:]):
        slots[(word(key, n) >> 32) * 10 >> 32] = ref
    assert held == slots
    assert state["draws"] == 25


def test_rest_of_an_exhausted_source_is_yielded_in_random_order() -> None:
    stage = buffer(1000, 5000)  # larger than the data
    given = [index for index, _ in drain(stage)]
    assert sorted(given) == list(range(1000))
    assert given != drain(readers([1000], epochs=1)(0))
    assert len(stage.take(5)) == 0
    assert stage.save_state()["refs"] == b""


def test_lanes_seeds_and_pipeline_positions_have_different_draws() -> None:
    def order(stage: custom.Stage) -> list[int]:
        return [index for index, _ in take_refs(stage, 500)]

    once = order(buffer(5000, 100))
    assert once != order(buffer(5000, 100, seed=1))
    twice = sp.ShuffleBuffer(buffer(5000, 100), size=100)
    assert twice._key != buffer(5000, 100)._key
    assert sorted(drain(sp.ShuffleBuffer(buffer(500, 70), size=30))) == [(i, 0) for i in range(500)]
    lanes = readers([5000], lanes=2)
    assert sp.ShuffleBuffer(lanes(0), size=9)._key != sp.ShuffleBuffer(lanes(1), size=9)._key


def test_mixing_moves_refs_about_as_far_as_the_buffer_is_large() -> None:
    stage = sp.ShuffleBuffer(readers([20_000], shuffle=False, epochs=1)(0), size=1000)
    moved = np.arange(10_000) - np.array([index for index, _ in take_refs(stage, 10_000)])
    assert -1000 <= moved.min() < -950  # nothing comes earlier than it enters
    assert 900 < (moved[2000:] + 1000).mean() < 1100  # a ref stays for about `size` draws


def test_a_size_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, not 0"):
        buffer(5, 0)


@pytest.mark.parametrize(
    ("refs", "said"),
    [
        (bytes(12 * 6), r"ShuffleBuffer\(size=5\): the state has 6 samples"),
        (bytes(13), "ShuffleBuffer: 13 bytes instead of refs"),
        ([[1, 0, 0]], "ShuffleBuffer: .* instead of refs"),
    ],
)
def test_a_state_of_another_size_is_a_mismatch(refs: object, said: str) -> None:
    stage = buffer(20, 5)
    state = stage.save_state()
    with pytest.raises(sp.CheckpointMismatchError, match=said):
        stage.restore_state({**state, "refs": refs})


def test_the_state_of_another_stage_is_a_mismatch() -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="no state of ShuffleBuffer"):
        buffer(20, 5).restore_state(readers([20])(0).save_state())


def test_buffer_of_samples_rejects_a_bound_on_items(make_shards: Any) -> None:
    reader = sp.TarShardReader(str(make_shards([3])), sp.Lane())
    with pytest.raises(ValueError, match="max_buffer_bytes applies only after Encode"):
        sp.ShuffleBuffer(reader, size=2, max_buffer_bytes=10)  # type: ignore[call-overload]


def test_next_on_the_stage_returns_samples(make_shards: Any) -> None:
    reader = sp.TarShardReader(str(make_shards([6])), sp.Lane(), epochs=1)
    stage = sp.ShuffleBuffer(reader, size=3)
    samples = list(stage)
    assert sorted(sample.json()["id"] for sample in samples) == [0, 1, 2, 3, 4, 5]
    assert stage.fetch(stage.ref).json() == samples[-1].json()
    assert stage.settings() == {"size": 3}


class Pieces(sp.TaskEncoder):
    """Items are the pieces of a document: (document, number), three of every fourth document, one of the others."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        document = sample.json()["id"]
        return self.pieces(document) if document % 4 == 0 else (document, rng.integers(1000))

    def pieces(self, document: int) -> Iterator[Any]:
        for number in range(3):
            yield (document, number)

    def length(self, item: Any) -> int:
        return item[3] - item[2] if len(item) == 4 else 1 + item[0] % 5

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return (*item, start, stop)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return list(items)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([40, 23, 30]))


def items_of(
    shards: str, lane: sp.Lane, epochs: int | None = 1, size: int = 10, max_buffer_bytes: int = 1 << 20
) -> custom.ItemStage:
    encoded = sp.Encode(sp.TarShardReader(shards, lane, epochs=epochs, shuffle=False), Pieces())
    return sp.ShuffleBuffer(encoded, size=size, max_buffer_bytes=max_buffer_bytes)


def pipeline(shards: str, lane: sp.Lane, epochs: int | None, packed: bool, **settings: Any) -> custom.Stage:
    items = items_of(shards, lane, epochs, **settings)
    return sp.Batcher(sp.OnlinePacker(items, max_length=9) if packed else items, size=3)


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_every_item_is_yielded_once_in_another_order(shards: str, size: int) -> None:
    before = list(sp.Encode(sp.TarShardReader(shards, sp.Lane(), epochs=1, shuffle=False), Pieces()))
    after = list(items_of(shards, sp.Lane(), size=size))
    assert sorted(after) == sorted(before)
    assert (after == before) is (size == 1)


def test_pieces_of_a_document_are_separated(shards: str) -> None:
    after = [document for document, _ in items_of(shards, sp.Lane(), size=40)]
    assert sum(left == right for left, right in pairwise(after)) < 10  # 2 of each of 24 documents before


@pytest.mark.parametrize(
    ("epochs", "packed", "max_buffer_bytes"),
    [(None, True, 0), (1, True, 1 << 20), (1, False, 0), (None, False, 1 << 20)],
)
def test_a_resume_is_exact(shards: str, epochs: int | None, packed: bool, max_buffer_bytes: int) -> None:
    make = partial(pipeline, shards, epochs=epochs, packed=packed, max_buffer_bytes=max_buffer_bytes)
    assert assert_exact_resume(make, lanes=3, steps=10, world_sizes=(1, 3), chains=1, after=2) > 10


def test_packs_of_cut_items_are_shuffled_and_resume_exactly(shards: str) -> None:
    def make(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(shards, lane), Pieces())
        packs = sp.OnlinePacker(items, max_length=7, policy="sequential")
        return sp.Batcher(sp.ShuffleBuffer(packs, size=5, max_buffer_bytes=0), size=2)

    assert assert_exact_resume(make, lanes=3, steps=9, world_sizes=(1, 3), chains=1, after=2) > 9


def test_memory_budget_changes_no_batch(shards: str) -> None:
    held, made_again = items_of(shards, sp.Lane()), items_of(shards, sp.Lane(), max_buffer_bytes=0)
    assert [next(held) for _ in range(30)] == [next(made_again) for _ in range(30)]
    assert (built_items(held), built_items(made_again)) == (10, 0)


def test_state_has_only_refs_and_sizes(shards: str) -> None:
    items = items_of(shards, sp.Lane())
    next(items)
    state = items.save_state()
    assert len(state["refs"]) == 10
    assert all(len(ref) == 3 and sizes is None for ref, sizes in state["refs"])
    packs = sp.ShuffleBuffer(sp.OnlinePacker(items_of(shards, sp.Lane()), max_length=7), size=5)
    next(packs)
    assert all(len(ref) == len(sizes) + 1 for ref, sizes in packs.save_state()["refs"])
    assert sp.ShuffleBuffer.__name__ == type(items).__name__ == "ShuffleBuffer"


# The bound of small data.


class OwnSamples(custom.PassThrough, custom.SampleStage):
    """An own stage, of which the library does not know how many samples it drops."""

    def __next__(self) -> sp.Sample:
        return next(self.source)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 4))
def test_buffer_size_is_at_most_a_lanes_part_of_an_epoch(count: int, size: int, lanes: int) -> None:
    most = min(size, -(-count // lanes))
    source = readers([count], lanes=lanes, epochs=None)
    stage = buffer(count, size, epochs=None, lanes=lanes)
    given = take_refs(stage, 3 * count)
    expected = reference(take_refs(source(0), 3 * count + most), most, sp.Lane(count=lanes).key("shuffle", 1))
    assert given == expected[: 3 * count]
    assert (stage.size, stage.capacity) == (size, most)
    assert len(stage.save_state()["refs"]) == 12 * most


def test_bound_of_the_buffer_is_fixed_for_the_run() -> None:
    stage = buffer(60, 40, epochs=None, lanes=4)
    take_refs(stage, 5)
    state = stage.save_state()
    for other in (buffer(90, 40, epochs=None, lanes=4), buffer(60, 40, epochs=None, lanes=4)):
        other.restore_state(state)
        assert other.capacity == 15
    smaller = buffer(90, 10, epochs=None, lanes=4)
    with pytest.raises(sp.CheckpointMismatchError, match=r"ShuffleBuffer\(size=10\): the state has 15 samples"):
        smaller.restore_state(state)


def test_buffer_has_no_bound_after_uncountable_stages() -> None:
    class Parts(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Iterator[int]:
            yield from range(3)

    class Same(sp.TaskEncoder):
        one_to_one = True

        def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
            return 1

    def made(stage: Any) -> int:
        return sp.ShuffleBuffer(stage, size=500).capacity

    reader = partial(readers([60], lanes=4), 0)
    assert made(reader()) == made(sp.Encode(reader(), Same())) == made(sp.ShuffleBuffer(reader(), size=3)) == 15
    assert made(OwnSamples(reader())) == made(sp.Encode(reader(), Parts())) == 500


def test_buffer_has_no_bound_after_a_blend(make_shards: Any) -> None:
    lane, shards = sp.Lane(), str(make_shards([30]))
    sources = {name: sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=500) for name in "ab"}
    assert [source.capacity for source in sources.values()] == [30, 30]
    assert sp.ShuffleBuffer(sp.Blend(sources, weights={"a": 1, "b": 1}), size=500).capacity == 500


def test_state_of_a_smaller_buffer_changes_the_size_of_one_in_use() -> None:
    small, used = buffer(3000, 20), buffer(3000, 50)
    take_refs(small, 100)
    used.take(90)  # has computed draws below 50 ahead
    used.restore_state({**small.save_state(), "most": 20})
    assert drain(used, 30) == drain(small)
