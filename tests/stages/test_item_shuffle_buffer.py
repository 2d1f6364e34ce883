"""A shuffle buffer after Encode: items in random order, held or made again, exact on resume."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.testing import assert_exact_resume


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
    shards: str, lane: sp.Lane, epochs: int | None = 1, size: int = 10, max_held_bytes: int = 1 << 20
) -> custom.ItemStage:
    encoded = sp.Encode(sp.TarShardReader(shards, lane, epochs=epochs, shuffle=False), Pieces())
    return sp.ShuffleBuffer(encoded, size=size, max_held_bytes=max_held_bytes)


def pipeline(shards: str, lane: sp.Lane, epochs: int | None, packed: bool, **settings: Any) -> custom.Stage:
    items = items_of(shards, lane, epochs, **settings)
    return sp.Batcher(sp.OnlinePacker(items, max_length=9) if packed else items, size=3)


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_every_item_comes_once_in_another_order(shards: str, size: int) -> None:
    before = list(sp.Encode(sp.TarShardReader(shards, sp.Lane(), epochs=1, shuffle=False), Pieces()))
    after = list(items_of(shards, sp.Lane(), size=size))
    assert sorted(after) == sorted(before)
    assert (after == before) is (size == 1)


def test_pieces_of_a_document_are_parted(shards: str) -> None:
    after = [document for document, _ in items_of(shards, sp.Lane(), size=40)]
    assert sum(left == right for left, right in pairwise(after)) < 10  # 2 of each of 24 documents before


@pytest.mark.parametrize(
    ("epochs", "packed", "max_held_bytes"), [(None, True, 0), (1, True, 1 << 20), (1, False, 0), (None, False, 1 << 20)]
)
def test_a_resume_is_exact(shards: str, epochs: int | None, packed: bool, max_held_bytes: int) -> None:
    make = partial(pipeline, shards, epochs=epochs, packed=packed, max_held_bytes=max_held_bytes)
    assert assert_exact_resume(make, lanes=3, steps=10, world_sizes=(1, 3), chains=1, after=2) > 10


def test_packs_of_cut_items_are_shuffled_and_resume_exactly(shards: str) -> None:
    def make(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(shards, lane), Pieces())
        packs = sp.OnlinePacker(items, max_length=7, policy="sequential")
        return sp.Batcher(sp.ShuffleBuffer(packs, size=5, max_held_bytes=0), size=2)

    assert assert_exact_resume(make, lanes=3, steps=9, world_sizes=(1, 3), chains=1, after=2) > 9


def test_what_is_held_in_memory_changes_nothing(shards: str) -> None:
    held, made_again = items_of(shards, sp.Lane()), items_of(shards, sp.Lane(), max_held_bytes=0)
    assert [next(held) for _ in range(30)] == [next(made_again) for _ in range(30)]
    assert (held.held_items, made_again.held_items) == (10, 0)


def test_an_item_that_fails_is_tried_again_and_nothing_is_lost(shards: str) -> None:
    class Fails(Pieces):
        left = 3

        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            if sample.json()["id"] % 7 == 3 and Fails.left:
                Fails.left -= 1
                raise OSError("for now")
            return super().encode(sample, rng)

    expected, found, errors = list(items_of(shards, sp.Lane())), [], 0
    encoded = sp.Encode(sp.TarShardReader(shards, sp.Lane(), epochs=1, shuffle=False), Fails())
    buffer = sp.ShuffleBuffer(encoded, size=10)
    while len(found) < len(expected):
        try:
            found.append(next(buffer))
        except sp.EncodeError:
            errors += 1
    assert errors == 3
    assert found == expected


def test_its_state_holds_refs_alone(shards: str) -> None:
    items = items_of(shards, sp.Lane())
    next(items)
    state = items.save_state()
    assert len(state["refs"]) == 10
    assert all(len(ref) == 3 for ref in state["refs"])
    assert sp.ShuffleBuffer.__name__ == type(items).__name__ == "ShuffleBuffer"
