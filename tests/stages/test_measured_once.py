"""`length_of` is called at most once for a sample, and `length` at most once for each value that an encoder built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.pipeline import upstream
from tests.support.shards import write_numbered_shards

LENGTHS, DECLARED = Counter[int](), Counter[tuple[str, int, int]]()
SERIAL = count()
COST = sp.attention_cost(hidden=1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("measured")
    write_numbered_shards(folder, [60, 21, 99])
    return str(folder)


class Counting(sp.TaskEncoder):
    """Items of one to nine tokens, each with a number of its own; every fifth sample may make three."""

    global_rng = False

    def __init__(self, *, fans_out: bool = False, skips: bool = False) -> None:
        self.fans_out, self.skips = fans_out, skips

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        tokens = [sample.json()["id"]] * (1 + sample.ref.index % 9)
        return self._parts(tokens) if self.fans_out and sample.ref.index % 5 == 0 else self._item(tokens)

    def _parts(self, tokens: list[int]) -> Iterator[Any]:
        for _ in range(3):
            yield self._item(tokens)

    def _item(self, tokens: list[int]) -> Any:
        return {"serial": next(SERIAL), "tokens": tokens}

    def length(self, item: Any) -> int:
        LENGTHS[item["serial"]] += 1
        return len(item["tokens"])

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return self._item(item["tokens"][start:stop])

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        tokens = [token for item in items for token in item["tokens"]]
        return sp.Skip("a pack") if self.skips and sum(tokens) % 4 == 0 else self._item(tokens)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [item["tokens"] for item in items]


class Declaring(Counting):
    """The same, with sizes that are known without encoding where a sample makes one item."""

    def length_of(self, sample: sp.Sample) -> int | None:
        DECLARED[sample.source, sample.ref.index, sample.epoch] += 1
        return None if self.fans_out and sample.ref.index % 5 == 0 else 1 + sample.ref.index % 9


Build = Callable[[Any, sp.TaskEncoder], Any]


def any_item(item: Any) -> bool:
    """A filter that removes nothing."""
    return True


def pairs(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
    """A choice for `ItemPacker`."""
    return [items[at : at + 2] for at in range(0, len(items), 2)]


def blended(read: Any, encoder: sp.TaskEncoder) -> Any:
    branches = {name: read().encode(encoder, check=0.0) for name in ("a", "b")}
    return sp.blend(branches, weights={"a": 2, "b": 1}, by="tokens")


def encoded(read: Any, encoder: sp.TaskEncoder) -> Any:
    return read().encode(encoder, check=0.0)


def packing(build: Any = encoded, **how: Any) -> Build:
    how = {"max_length": 30, "too_long": "skip", **how}
    return lambda read, encoder: build(read, encoder).pack(**how).batch(2)


def shuffled(read: Any, encoder: sp.TaskEncoder) -> Any:
    return blended(read, encoder).shuffle(7).filter(any_item)


def packed_packs(read: Any, encoder: sp.TaskEncoder) -> Any:
    return encoded(read, encoder).pack(max_length=12).shuffle(3)


SHAPES: dict[str, Build] = {
    "best fit": packing(),
    "first fit": packing(policy="first_fit"),
    "decreasing": packing(policy="first_fit_decreasing"),
    "function": packing(policy=lambda lengths: [[at] for at in range(len(lengths))]),
    "sequential": packing(policy="sequential"),
    "split": packing(max_length=4, too_long="split"),
    "truncated": packing(max_length=4, too_long="truncate"),
    "too long": packing(max_length=4),
    "without memory": packing(max_buffer_bytes=0),
    "split without memory": packing(max_length=4, too_long="split", max_buffer_bytes=0),
    "blend": packing(blended),
    "blend, then cut": packing(blended, policy="sequential", max_length=7),
    "blend, shuffle, filter": packing(shuffled),
    "blend of blends": packing(
        lambda read, encoder: sp.blend(
            {"c": blended(read, encoder), "d": encoded(read, encoder)}, weights={"c": 1, "d": 1}, by="tokens"
        )
    ),
    "packs of packs": packing(packed_packs, max_length=60),
    "balance": lambda read, encoder: (
        encoded(read, encoder).pack(max_length=12).balance(candidates=4, cost=COST).batch(2)
    ),
    "balance of items": lambda read, encoder: encoded(read, encoder).balance(candidates=4, cost=COST).batch(2),
    "balance of a blend": lambda read, encoder: blended(read, encoder).balance(candidates=4, cost=COST).batch(2),
    "buckets": lambda read, encoder: encoded(read, encoder).bucket([2, 5, 9], size=3),
    "buckets of a blend": lambda read, encoder: blended(read, encoder).bucket([2, 5, 9], size=3),
    "same bucket": lambda read, encoder: encoded(read, encoder).bucket([2, 5, 9], size=3, same_bucket=True),
    "chosen": lambda read, encoder: encoded(read, encoder).then(custom.ItemPacker, size=6, select=pairs).batch(2),
    "chosen of a blend": lambda read, encoder: (
        blended(read, encoder).then(custom.ItemPacker, size=6, select=pairs).batch(2)
    ),
}


def reading(shards: str, **how: Any) -> Any:
    return lambda: sp.read(shards, epochs=1, **how).shuffle(10)


@pytest.mark.parametrize("kind", [Counting, Declaring])
@pytest.mark.parametrize("fans_out", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_value_is_measured_once(shards: str, shape: str, fans_out: bool, kind: type[Counting]) -> None:
    for skips in (False, True):
        batches = SHAPES[shape](reading(shards), kind(fans_out=fans_out, skips=skips))(sp.Lane(seed=7))
        LENGTHS.clear()
        DECLARED.clear()
        made = list(batches)
        assert len(made) > 3
        assert LENGTHS and max(LENGTHS.values()) == 1
        assert max(DECLARED.values(), default=1) == 1
        assert bool(DECLARED) == (kind is Declaring)


@pytest.mark.parametrize("kind", [Counting, Declaring])
@pytest.mark.parametrize("fans_out", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_resumed_lane_measures_each_value_once_and_no_saved_item(
    shards: str, shape: str, fans_out: bool, kind: type[Counting]
) -> None:
    def fresh() -> Any:
        return SHAPES[shape](reading(shards), kind(fans_out=fans_out))(sp.Lane(seed=7))

    batches = fresh()
    DECLARED.clear()
    before = list(islice(batches, 3))
    assert before
    asked = set(DECLARED)
    state = msgspec.msgpack.encode(batches.save_state())
    expected = list(batches)
    resumed = fresh()
    resumed.restore_state(msgspec.msgpack.decode(state))
    LENGTHS.clear()
    DECLARED.clear()
    assert list(resumed) == expected
    assert max(LENGTHS.values()) == 1
    assert max(DECLARED.values(), default=1) == 1
    again = asked & set(DECLARED)
    assert again <= {sample for sample in asked if fans_out and sample[1] % 5 == 0}, "its size is in the state"


@pytest.mark.parametrize("kind", [Counting, Declaring])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rebuilt_batch_measures_each_value_once(shards: str, shape: str, kind: type[Counting]) -> None:
    batches = SHAPES[shape](reading(shards), kind())(sp.Lane(seed=7))
    refs = [batches.ref for _ in islice(batches, 3)]
    expected = [batches.fetch(ref) for ref in refs]
    LENGTHS.clear()
    DECLARED.clear()
    fresh = SHAPES[shape](reading(shards), kind())(sp.Lane(seed=7))
    assert [fresh.fetch(ref) for ref in refs] == expected
    assert max(LENGTHS.values(), default=1) == 1
    assert not DECLARED


@pytest.mark.parametrize("kind", [Counting, Declaring])
@pytest.mark.parametrize("shape", ["best fit", "blend", "sequential", "balance", "buckets"])
def test_a_loader_measures_each_value_once(shards: str, shape: str, kind: type[Counting]) -> None:
    loader = sp.SavableLoader(SHAPES[shape](reading(shards), kind()), seed=7, lanes=2)
    LENGTHS.clear()
    DECLARED.clear()
    assert len(list(islice(loader, 8))) == 8
    assert max(LENGTHS.values()) == 1 and max(DECLARED.values(), default=1) == 1


def test_declared_size_that_differs_from_the_items_is_an_error(shards: str) -> None:
    class Wrong(Declaring):
        def length_of(self, sample: sp.Sample) -> int:
            return 2 + sample.ref.index % 9

    for shape in SHAPES:
        with pytest.raises(sp.EncodeError, match="declared"):
            list(SHAPES[shape](reading(shards), Wrong())(sp.Lane(seed=7)))


def test_a_declared_size_is_compared_without_reading_the_name_of_the_sample(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sample: sp.Sample) -> str:
        raise AssertionError(f"the name of {sample.ref} is read, but no error needs it")

    monkeypatch.setattr("savable_pipeline.stages.encode.sample_name", fail)
    assert len(list(islice(SHAPES["best fit"](reading(shards), Declaring())(sp.Lane(seed=7)), 3))) == 3


def test_a_resumed_lane_compares_each_item_with_its_saved_size(shards: str) -> None:
    class Longer(Declaring):
        more = 0

        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            item = super().encode(sample, rng)
            return {**item, "tokens": item["tokens"] + [0] * self.more}

        def length_of(self, sample: sp.Sample) -> int | None:
            return 1 + sample.ref.index % 9 + self.more

    for shape in ("best fit", "decreasing", "blend", "balance of items"):
        batches = SHAPES[shape](reading(shards), Longer())(sp.Lane(seed=7))
        list(islice(batches, 3))
        changed = Longer()
        changed.more = 1
        resumed = SHAPES[shape](reading(shards), changed)(sp.Lane(seed=7))
        resumed.restore_state(msgspec.msgpack.decode(msgspec.msgpack.encode(batches.save_state())))
        with pytest.raises((sp.CheckpointMismatchError, sp.EncodeError), match="length"):
            list(resumed)


def test_pipelines_of_this_test_have_the_stages_in_their_names(shards: str) -> None:
    names = {
        type(stage).__name__
        for build in SHAPES.values()
        for stage in upstream(build(reading(shards), Counting())(sp.Lane()))
    }
    assert {"Blend", "OnlinePacker", "Balance", "BucketBatcher", "ItemPacker", "ShuffleBuffer", "Filter"} <= names
