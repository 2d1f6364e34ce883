"""By hand, `next` on a stage of items whose sizes are declared: an item that cannot be made now is not lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import savable_pipeline as sp
from savable_pipeline.stages.filters import Filter


class Texts(sp.TaskEncoder):
    """Declares lengths. Raises the first time that it is to encode each fifth sample, as if a disk were away."""

    def __init__(self, *, failing: bool) -> None:
        self.away = set(range(0, 60, 5)) if failing else set()

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> list[int]:
        number = int(sample.json()["id"])
        if number in self.away:
            self.away.remove(number)
            raise OSError("the disk is away")
        return [number] * (1 + number % 4)

    def length_of(self, sample: sp.Sample) -> int:
        return 1 + int(sample.json()["id"]) % 4

    def pack(self, items: list[Any], rng: sp.Rng) -> list[int]:
        return [number for item in items for number in item]


def encoded(shards: str, encoder: sp.TaskEncoder, lane: sp.Lane | None = None) -> Any:
    return sp.Encode(sp.TarShardReader(shards, lane or sp.Lane(seed=3), epochs=1), encoder, check=0.0)


def mixed(shards: str, encoder: sp.TaskEncoder, **how: Any) -> Any:
    lane = sp.Lane(seed=3)
    return sp.Blend({name: encoded(shards, encoder, lane) for name in "ab"}, weights={"a": 2, "b": 1}, **how)


STAGES: dict[str, Callable[[str, sp.TaskEncoder], Any]] = {
    "Encode": encoded,
    "ShuffleBuffer": lambda shards, encoder: sp.ShuffleBuffer(encoded(shards, encoder), size=7),
    "small ShuffleBuffer": lambda shards, encoder: sp.ShuffleBuffer(
        encoded(shards, encoder), size=7, max_buffer_bytes=0
    ),
    "Filter": lambda shards, encoder: Filter(encoded(shards, encoder), len),
    "OnlinePacker": lambda shards, encoder: sp.OnlinePacker(encoded(shards, encoder), max_length=9),
    "Blend": mixed,
    "Blend by tokens": lambda shards, encoder: mixed(shards, encoder, by="tokens"),
    "Blend of Blends": lambda shards, encoder: sp.Blend({"x": mixed(shards, encoder)}, weights={"x": 1}),
}


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_next_call_after_an_error_gets_the_same_item_also_when_restored(
    make_shards: Any, name: str, restored: bool
) -> None:
    shards = str(make_shards([60]))
    whole = STAGES[name](shards, Texts(failing=False))
    expected = [(item, whole.ref) for item in whole]
    encoder, errors = Texts(failing=True), 0
    stage = STAGES[name](shards, encoder)
    found: list[Any] = []
    while len(found) < len(expected):
        try:
            item = next(stage)
        except sp.EncodeError:
            errors += 1
            if restored:
                state = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state()))
                stage = STAGES[name](shards, encoder)
                stage.restore_state(state)
            continue
        found.append((item, stage.ref))
    assert found == expected
    assert errors > 5
    with pytest.raises(StopIteration):
        next(stage)
