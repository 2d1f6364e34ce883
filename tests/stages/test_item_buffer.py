"""What a stage holds is a ref each, with its item or to be made again, within a budget; what is lost is left out."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.item_buffer import StageBuffer, size_of
from savable_pipeline.stages.item_ref import Element


class Ids(sp.TaskEncoder):
    """The number of a sample as text; `gone` samples are skipped, `broken` ones fail."""

    global_rng = False
    gone: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number in self.broken:
            raise OSError("a disk")
        return sp.Skip("gone") if number in self.gone else str(number)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class Holder(custom.PassThrough, custom.ItemStage):
    """A stage to hold for."""

    def __init__(self, source: custom.ItemStage, max_bytes: int | None = None) -> None:
        super().__init__(source)
        self.held = custom.ItemBuffer(self, max_bytes=max_bytes)


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([31]))


def holder(shards: str, max_bytes: int | None = None, lane: sp.Lane | None = None) -> tuple[Holder, Ids]:
    encoder = Ids()
    lane = lane or sp.Lane()
    reader = sp.TarShardReader(shards, lane, epochs=1, shuffle=False)
    return Holder(sp.Encode(reader, encoder), max_bytes), encoder


def ref(number: int) -> custom.ItemRef:
    return (number, 0, 0)


def test_elements_come_back_in_any_order_with_their_refs(shards: str) -> None:
    stage, _ = holder(shards)
    held = stage.held
    assert held.fill(5) == 5 and len(held) == 5 and held.built == 5
    assert held.pop(1) == ("1", ref(1))
    assert held.refs() == [ref(0), ref(2), ref(3), ref(4)], "those behind it move up"
    assert held.remove(0, last_fills=True).value == "0"
    assert held.refs() == [ref(4), ref(2), ref(3)], "the last one takes its place"
    assert held.pop(-1) == ("3", ref(3))
    held.drop(1)
    assert held.refs() == [ref(2)] and len(held) == 1 and held.pop(0) == ("2", ref(2))


def test_restored_values_are_built_when_needed(shards: str) -> None:
    stage, _ = holder(shards)
    held = stage.held
    held.restore([[[3, 0, 0], None], [[1, 0, 0], [[1, 0]]], [[2, 0, 0], None]])
    assert held.refs() == [ref(3), ref(1), ref(2)] and held.built == 0
    assert held.save() == [(ref(3), None), (ref(1), ((1, 0),)), (ref(2), None)]
    assert [each.value for each in held.copies(2)] == ["3", "1"] and held.built == 0
    assert held.values(2) == ["3", "1"] and held.built == 2
    assert held.pop(2) == ("2", ref(2)) and held.built == 2


@pytest.mark.parametrize("saved", [[ref(0)], [[ref(0), 3]], [[ref(0), [[1]]]], [[ref(0), [[-1, 0]]]], [[5, None]], 5])
def test_a_state_of_anything_but_refs_and_sizes_is_a_mismatch(shards: str, saved: object) -> None:
    stage, _ = holder(shards)
    with pytest.raises(sp.CheckpointMismatchError, match="the state has"):
        stage.held.restore(saved)


def test_budget_reserved_before_ctrl_c_is_released_silently() -> None:
    StageBuffer.__new__(StageBuffer).__del__()


def test_value_that_cannot_be_rebuilt_is_a_skip_or_dropped(shards: str) -> None:
    stage, encoder = holder(shards)
    encoder.gone = frozenset({1, 2})
    stage.held.restore([(ref(number), None) for number in range(5)])
    item, found = stage.held.pop(1)
    assert type(item) is sp.Skip and found == ref(1)
    assert stage.held.values(2) == ["0", "3"] and stage.held.refs() == [ref(0), ref(3), ref(4)]
    assert stage.held.values(9) == ["0", "3", "4"]


def test_element_whose_building_fails_stays_buffered_and_can_be_requested_again(shards: str) -> None:
    stage, encoder = holder(shards)
    stage.held.restore([(ref(0), None), (ref(1), None)])
    encoder.broken = frozenset({1})
    for ask in (lambda: stage.held.pop(1), lambda: stage.held.values(2)):
        with pytest.raises(sp.EncodeError):
            ask()
        assert stage.held.refs() == [ref(0), ref(1)]
    encoder.broken = frozenset()
    assert stage.held.values(2) == ["0", "1"]


def test_item_found_lost_before_ctrl_c_is_in_no_batch(shards: str) -> None:
    class Interrupted(Ids):
        interrupts = True

        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            if self.interrupts and sample.json()["id"] == 1:
                raise KeyboardInterrupt
            return super().encode(sample, rng)

    def batches(encoder: sp.TaskEncoder) -> sp.Batcher:
        reader = sp.TarShardReader(shards, sp.Lane(), epochs=1, shuffle=False)
        return sp.Batcher(sp.Encode(reader, encoder, on_error="skip"), size=3)

    saved = batches(Ids())
    assert saved.more()  # it takes the first items, which the state then has
    saved._fill(3)
    encoder = Interrupted()
    encoder.broken = frozenset({0})
    resumed = batches(encoder)
    resumed.restore_state(msgspec.msgpack.decode(msgspec.msgpack.encode(saved.save_state())))
    with pytest.raises(KeyboardInterrupt):
        next(resumed)
    encoder.interrupts = False
    assert next(resumed) == ["1", "2", "3"]


def test_items_beyond_the_process_limit_are_rebuilt(shards: str) -> None:
    lane = sp.Lane()
    one, other = (holder(shards, max_bytes=180, lane=lane)[0] for _ in range(2))
    assert one.held.fill(3) == 3 and one.held.built == 3
    assert other.held.fill(3) == 3 and other.held.built == 0, "the first holds what there is room for"
    assert [other.held.pop(0)[0] for _ in range(3)] == ["0", "1", "2"]
    one.held.drop(3)
    assert other.held.fill(2) == 2 and other.held.built == 2, "let go of, their bytes are free again"
    other.held.restore([(ref(0), None)])
    one.held.add([Element(ref(7), "x"), Element(ref(8))])
    assert other.held.built == 0 and one.held.built == 1 and one.held.pop(1) == ("8", ref(8))
    assert one.held.values(1) == ["x"]


def test_released_stage_is_freed_at_once_with_its_bytes(shards: str) -> None:
    lane = sp.Lane()
    stage, _ = holder(shards, max_bytes=180, lane=lane)
    stage.held.fill(3)
    gone = weakref.ref(stage)
    gc.disable()
    try:
        del stage
        assert gone() is None
    finally:
        gc.enable()
    next_one, _ = holder(shards, max_bytes=180, lane=lane)
    next_one.held.fill(3)
    assert next_one.held.built == 3


@dataclasses.dataclass(slots=True)
class Slotted:
    data: bytes


class Plain:
    def __init__(self) -> None:
        self.data = bytes(1000)


class Struct(msgspec.Struct):
    data: bytes


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(250),
        torch.zeros(500, dtype=torch.int16),
        np.zeros(1000, np.uint8),
        memoryview(bytes(1000)),
        bytes(1000),
        bytearray(1000),
        "x" * 1000,
        {"a": bytes(500), "b": [bytes(250), (bytes(250),)]},
        [bytes(10)] * 20,
        {bytes([i]) * 50 for i in range(12)},
        Slotted(bytes(1000)),
        Plain(),
        Struct(bytes(1000)),
        Image.new("L", (20, 50)),
        list(range(35)),
    ],
    ids=lambda item: type(item).__name__,
)
def test_measured_size_of_items_is_about_their_bytes(item: Any) -> None:
    assert 900 <= size_of(item) <= 1600


def test_long_list_is_measured_by_a_sample_of_its_parts() -> None:
    looked_at = []

    class Part:
        def __sizeof__(self) -> int:
            looked_at.append(self)
            return 100

        __slots__ = ()

    assert size_of([Part() for _ in range(100_000)]) == pytest.approx(100_000 * 116, rel=0.2)
    assert len(looked_at) == 16


def test_memory_share_interrupted_by_ctrl_c_is_released_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    StageBuffer.__new__(StageBuffer)  # as far as `__init__` may have come: not at all
    gc.collect()
    assert not ignored
