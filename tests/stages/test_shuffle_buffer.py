"""The shuffle buffer: the same order however it is asked, nothing lost, refs only."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.keyed_random import word
from tests.support.toy_dataset import drained, first, pairs, readers


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
def test_it_gives_what_ten_lines_of_plain_python_give_however_many_are_taken(
    count: int, size: int, chunks: list[int]
) -> None:
    expected = reference(drained(readers([count], epochs=1)(0)), size, sp.Lane().key("shuffle", 1))
    stage, given = buffer(count, size), []
    for chunk in itertools.cycle(chunks):
        refs = stage.take_refs(chunk)
        assert len(refs) <= chunk
        if not len(refs):
            break
        given += pairs(refs)
    assert given == expected
    assert sorted(given) == [(i, 0) for i in range(count)]


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 130), st.integers(1, 9))
def test_restored_at_any_position_it_goes_on_exactly(count: int, size: int, cut: int, chunk: int) -> None:
    expected = drained(buffer(count, size, epochs=2))
    cut = min(cut, len(expected))
    before, after = buffer(count, size, epochs=2), buffer(count, size, epochs=2)
    assert first(before, cut) == expected[:cut]
    after.restore_state(before.save_state())
    assert after.save_state() == before.save_state()
    assert drained(after, chunk) == expected[cut:]


def test_the_state_holds_the_refs_in_order_twelve_bytes_each() -> None:
    stage = buffer(100, 10)
    given = first(stage, 25)
    state = stage.save_state()
    rows = [state["refs"][i : i + 12] for i in range(0, len(state["refs"]), 12)]
    held = [(int.from_bytes(row[:8], "little"), int.from_bytes(row[8:], "little")) for row in rows]
    taken = drained(readers([100], epochs=1)(0))[:35]
    assert len(held) == 10
    assert sorted(given + held) == sorted(taken)
    key, slots = sp.Lane().key("shuffle", 1), taken[:10]
    for n, ref in enumerate(taken[10:]):
        slots[(word(key, n) >> 32) * 10 >> 32] = ref
    assert held == slots
    assert state["draws"] == 25


def test_what_is_left_when_the_source_is_dry_comes_in_random_order() -> None:
    stage = buffer(1000, 5000)  # larger than the data
    given = [index for index, _ in drained(stage)]
    assert sorted(given) == list(range(1000))
    assert given != drained(readers([1000], epochs=1)(0))
    assert len(stage.take_refs(5)) == 0
    assert stage.save_state()["refs"] == b""


def test_lanes_seeds_and_places_in_the_pipeline_draw_differently() -> None:
    def order(stage: custom.Stage) -> list[int]:
        return [index for index, _ in first(stage, 500)]

    once = order(buffer(5000, 100))
    assert once != order(buffer(5000, 100, seed=1))
    twice = sp.ShuffleBuffer(buffer(5000, 100), size=100)
    assert twice._key != buffer(5000, 100)._key
    assert sorted(drained(sp.ShuffleBuffer(buffer(500, 70), size=30))) == [(i, 0) for i in range(500)]
    lanes = readers([5000], lanes=2)
    assert sp.ShuffleBuffer(lanes(0), size=9)._key != sp.ShuffleBuffer(lanes(1), size=9)._key


def test_mixing_moves_refs_about_as_far_as_the_buffer_is_large() -> None:
    stage = sp.ShuffleBuffer(readers([20_000], shuffle=False, epochs=1)(0), size=1000)
    moved = np.arange(10_000) - np.array([index for index, _ in first(stage, 10_000)])
    assert -1000 <= moved.min() < -950  # nothing comes earlier than it enters
    assert 900 < (moved[2000:] + 1000).mean() < 1100  # a ref stays for about `size` draws


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, not 0"):
        buffer(5, 0)


@pytest.mark.parametrize(
    ("refs", "said"),
    [
        (bytes(12 * 6), r"ShuffleBuffer\(size=5\): the state holds 6 refs"),
        (bytes(13), "ShuffleBuffer: 13 bytes are no refs of 12 bytes each"),
        ([[1, 0, 0]], "ShuffleBuffer: .* are no refs of 12 bytes each"),
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


def test_a_buffer_of_samples_takes_no_bound_on_items(make_shards: Any) -> None:
    reader = sp.TarShardReader(str(make_shards([3])), sp.Lane())
    with pytest.raises(ValueError, match="max_held_bytes is for a buffer after Encode"):
        sp.ShuffleBuffer(reader, size=2, max_held_bytes=10)  # type: ignore[call-overload]


def test_by_hand_it_gives_samples(make_shards: Any) -> None:
    reader = sp.TarShardReader(str(make_shards([6])), sp.Lane(), epochs=1)
    stage = sp.ShuffleBuffer(reader, size=3)
    samples = list(stage)
    assert sorted(sample.json()["id"] for sample in samples) == [0, 1, 2, 3, 4, 5]
    assert stage.fetch(stage.ref).json() == samples[-1].json()
    assert stage.settings() == {"size": 3}
