"""Of a sample that fans out, parts are built one at a time: its iterator is advanced once, also after a resume."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

import savable_pipeline as sp
from tests.support.shards import write_numbered_shards

PARTS = 10_000
COST = sp.attention_cost(hidden=1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("fan-out")
    write_numbered_shards(folder, [3])
    return str(folder)


class Part(dict[str, int]):
    """An item, and how many of them are in memory."""

    alive = 0

    def __init__(self, **values: int) -> None:
        super().__init__(values)
        Part.alive += 1

    def __del__(self) -> None:
        Part.alive -= 1


class Video(sp.TaskEncoder):
    """Clips of a long video, and counts of what was decoded."""

    global_rng = False

    def __init__(self) -> None:
        self.opened = self.decoded = 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Iterator[Part]:
        self.opened += 1
        return self._clips(rng)

    def _clips(self, rng: sp.Rng) -> Iterator[Part]:
        for part in range(PARTS):
            self.decoded += 1
            yield Part(part=part, drawn=rng.integers(1 << 30))

    def length(self, item: Part) -> int:
        return 1 + item["drawn"] % 5

    def cut(self, item: Part, start: int, stop: int) -> Part:
        return Part(**{**item, "drawn": stop - start - 1})

    def pack(self, items: list[Part], rng: sp.Rng) -> Any:
        return [item["part"] for item in items]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [sorted(item.items()) if isinstance(item, Part) else item for item in items]


def seldom(item: Part) -> bool:
    """A filter."""
    return item["drawn"] % 4 > 0


SHAPES: dict[str, Callable[[Any], Any]] = {
    "batch": lambda items: items.batch(4),
    "filter": lambda items: items.filter(seldom).batch(4),
    "pack": lambda items: items.pack(max_length=20).batch(2),
    "decreasing": lambda items: items.pack(max_length=20, policy="first_fit_decreasing").batch(2),
    "sequential": lambda items: items.pack(max_length=20, policy="sequential", too_long="truncate").batch(2),
    "shuffle": lambda items: items.shuffle(100).batch(4),
    "shuffled packs": lambda items: items.pack(max_length=20).shuffle(10).batch(2),
    "balance": lambda items: items.balance(candidates=20, cost=COST).batch(2),
    "buckets": lambda items: items.bucket([2, 5], size=8),
}
HELD = 800  # parts that any of these holds or takes ahead


def lane_of(shards: str, shape: str, encoder: Video, check: float = 0.0) -> Any:
    samples = sp.read(shards, epochs=1, shuffle=False)
    return SHAPES[shape](samples.encode(encoder, check=check))(sp.Lane(seed=7))


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_decoded_as_they_are_needed(shards: str, shape: str) -> None:
    video = Video()
    batches = lane_of(shards, shape, video)
    next(batches)
    assert video.opened == 1 and video.decoded <= HELD
    list(islice(batches, 400))
    assert video.opened == 1 and 400 < video.decoded <= PARTS


@pytest.mark.parametrize("shape", SHAPES)
def test_few_parts_are_in_memory(shards: str, shape: str) -> None:
    gc.collect()
    before, video = Part.alive, Video()
    batches = lane_of(shards, shape, video)
    for _ in range(300):
        next(batches)
        assert Part.alive - before <= HELD
    assert video.decoded > 300


def test_a_checked_encoder_is_advanced_twice_only_for_the_first_parts(shards: str) -> None:
    video = Video()
    items = sp.Encode(sp.TarShardReader(shards, sp.Lane(), shuffle=False), video)
    list(islice(items, 500))
    assert video.decoded <= 500 + 2 * 8


@pytest.mark.parametrize("shape", SHAPES)
def test_a_resume_in_the_middle_advances_the_iterator_once(shards: str, shape: str) -> None:
    before = Video()
    batches = lane_of(shards, shape, before)
    list(islice(batches, 300))
    state = msgspec.msgpack.encode(batches.save_state())
    expected = list(islice(batches, 300))
    after = Video()
    resumed = lane_of(shards, shape, after)
    resumed.restore_state(msgspec.msgpack.decode(state))
    assert list(islice(resumed, 300)) == expected
    # once for what is buffered, once for what follows, and once for each buffered pack
    packs = 10 if shape == "shuffled packs" else 0
    assert after.opened <= 2 + packs and after.decoded <= (2 + packs) * before.decoded


def test_a_loader_decodes_few_parts_for_its_first_batch(shards: str) -> None:
    video = Video()
    loader = sp.SavableLoader(sp.read(shards).encode(video).pack(max_length=20).batch(2), seed=7, lanes=1)
    next(loader)
    assert video.opened <= 2 and video.decoded <= HELD
