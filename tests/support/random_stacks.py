"""Random stacks of stages that depend on sizes: packs in buffers, blends by tokens, balance, buckets, own stages.

Items are dicts of their samples' numbers and a length. A pack has `gap` tokens between two items, like a pack of texts
with separators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.filters import Filter
from savable_pipeline.stages.stage import State
from tests.support.toy_stores import number_of

POLICIES = ("sequential", "first_fit", "best_fit", "first_fit_decreasing", "function")
COST = sp.attention_cost(hidden=1, per_image=3)


class Joining(sp.TaskEncoder):
    """An encoder of items of 1 to 9 tokens, three from every fifth sample. `gap` is the tokens between items of a
    pack.
    """

    def __init__(self, gap: int = 0, *, fans_out: bool = True) -> None:
        self.gap, self.fans_out = gap, fans_out

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = number_of(sample)
        if self.fans_out and number % 5 == 0:
            return self._parts(number, rng)
        return self._item(number, rng)

    def _parts(self, number: int, rng: sp.Rng) -> Iterator[Any]:
        for _ in range(3):
            yield self._item(number, rng)

    def _item(self, number: int, rng: sp.Rng) -> Any:
        return {"ids": [number], "length": 1 + number % 9, "images": number % 3, "drawn": rng.integers(1 << 30)}

    def length(self, item: Any) -> int:
        return int(item["length"])

    def images(self, item: Any) -> int:
        return int(item["images"])

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return {**item, "length": stop - start}

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        length = sum(item["length"] for item in items) + self.gap * (len(items) - 1)
        images = sum(item["images"] for item in items)
        return {
            "ids": [item["ids"] for item in items],
            "length": length,
            "images": images,
            "drawn": rng.integers(1 << 30),
        }

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [*items, rng.integers(1 << 30)]

    def settings(self) -> dict[str, Any]:
        return {"gap": self.gap, "fans_out": self.fans_out}


class MeasuringJoining(Joining):
    """The same encoder, which also measures samples without encoding if a sample has one item."""

    def length_of(self, sample: sp.Sample) -> int | None:
        number = number_of(sample)
        return None if self.fans_out and number % 5 == 0 else 1 + number % 9

    def images_of(self, sample: sp.Sample) -> int:
        return number_of(sample) % 3


class Swapped(custom.ItemStage):
    """A stage that yields elements in pairs, the second one first, like the example of `custom.ItemBuffer`."""

    ref: Any = ()

    def __init__(self, source: custom.ItemStage) -> None:
        super().__init__(source)
        self.held = custom.ItemBuffer(self)

    def __next__(self) -> Any:
        while self.held or self.held.fill(2):
            item, self.ref = self.held.pop(-1)
            if type(item) is not sp.Skip:
                return item
        raise StopIteration

    def save_state(self) -> State:
        return {"held": self.held.save(), **super().save_state()}

    def restore_state(self, state: State) -> None:
        super().restore_state(state)
        self.held.restore(state["held"])


class Numbered(custom.BatchStage):
    """A last stage of a user: each batch with its number, from 0."""

    ref: Any = ()
    count = 0

    def __next__(self) -> Any:
        batch = next(self.source)
        self.ref, self.count = (self.count, self.source.ref), self.count + 1
        return [self.ref[0], batch]

    def fetch(self, ref: Any) -> Any:
        batch = self.source.fetch(ref[1])
        return batch if isinstance(batch, sp.Skip) else [ref[0], batch]

    def save_state(self) -> State:
        return {"count": self.count, **super().save_state()}

    def restore_state(self, state: State) -> None:
        super().restore_state(state)
        self.count = state["count"]


def seldom_zero(item: Any) -> bool:
    """Return False for about a quarter of the items: a filter."""
    return bool(item["drawn"] % 4)


def one_item_packs(lengths: list[int]) -> list[list[int]]:
    """Return packs of one item each, in reverse order: a packing function."""
    return [[at] for at in reversed(range(len(lengths)))]


def random_triples(items: list[Any], rng: sp.Rng) -> list[list[Any]]:
    """Return packs of three items in random order: a function for an `ItemPacker`."""
    items = [items[at] for at in rng.permutation(len(items))]
    return [items[at : at + 3] for at in range(0, len(items), 3)]


small = st.lists(
    st.one_of(
        st.tuples(st.just("shuffle"), st.sampled_from([2, 5, 12])),
        st.tuples(st.sampled_from(["filter", "swap"]), st.none()),
    ),
    max_size=2,
)
packs = st.one_of(
    st.tuples(st.just("pack"), st.tuples(st.sampled_from(POLICIES), st.sampled_from([12, 25, 40]))),
    st.tuples(st.just("choose"), st.sampled_from([3, 7])),
).map(lambda pack: [pack])
steps = st.one_of(small, st.tuples(small, packs, small).map(lambda parts: [*parts[0], *parts[1], *parts[2]]))
stacks = st.fixed_dictionaries(
    {
        "branches": st.lists(st.tuples(st.sampled_from([None, 3, 20]), steps), min_size=1, max_size=3),
        "by": st.sampled_from(["tokens", "tokens", "samples"]),
        "after": steps,
        "tells": st.booleans(),
        "fans_out": st.booleans(),
        "gap": st.sampled_from([0, 1, 7]),
        "candidates": st.sampled_from([None, 3, 8]),
        "last": st.sampled_from(["batch", "batch", "bucket", "same bucket"]),
        "size": st.integers(1, 3),
        "own": st.booleans(),
    }
)
"""Branches, which are blended if there are several, what comes after them, and the last stages."""


def stack(
    shards: str,
    lane: sp.Lane,
    chosen: dict[str, Any],
    *,
    held_bytes: int = 1 << 30,
    encoder: sp.TaskEncoder | None = None,
    on_error: Any = "raise",
    read: Callable[[str, sp.Lane], Any] = sp.TarShardReader,
) -> Any:
    """Return the stages of a lane. `held_bytes` must not change their batches. `read` builds the first stages."""
    if encoder is None:
        encoder = (MeasuringJoining if chosen["tells"] else Joining)(chosen["gap"], fans_out=chosen["fans_out"])

    def with_steps(stage: Any, steps: list[Any]) -> Any:
        for name, setting in steps:
            stage = _step(stage, name, setting, held_bytes)
        return stage

    def branch(buffer: int | None, steps: list[Any]) -> Any:
        samples = read(shards, lane)
        return with_steps(
            sp.Encode(
                samples if buffer is None else sp.ShuffleBuffer(samples, size=buffer), encoder, on_error=on_error
            ),
            steps,
        )

    branches = {f"b{at}": branch(*each) for at, each in enumerate(chosen["branches"])}
    weights = {name: 1 + at for at, name in enumerate(branches)}
    stage = sp.Blend(branches, weights=weights, by=chosen["by"]) if len(branches) > 1 else branches["b0"]
    stage = with_steps(stage, chosen["after"])
    last = _last(stage, chosen, held_bytes)
    return Numbered(last) if chosen.get("own") else last


def _last(stage: Any, chosen: dict[str, Any], held_bytes: int) -> Any:
    if chosen["last"] != "batch":
        same = {"same_bucket": True, "candidates": 6} if chosen["last"] == "same bucket" else {}
        return custom.BucketBatcher(stage, bounds=[4, 9, 20, 10**6], size=chosen["size"], **same)
    if chosen["candidates"] is not None:
        stage = sp.Balance(stage, candidates=chosen["candidates"], cost=COST, max_buffer_bytes=held_bytes)
    return sp.Batcher(stage, size=chosen["size"])


def _step(stage: Any, name: str, setting: Any, held_bytes: int) -> Any:
    if name == "shuffle":
        return sp.ShuffleBuffer(stage, size=setting, max_buffer_bytes=held_bytes)
    if name == "pack":
        policy, most = setting
        how: Any = {"max_length": most, "policy": one_item_packs if policy == "function" else policy, "open_packs": 3}
        return sp.OnlinePacker(stage, too_long="truncate", max_buffer_bytes=held_bytes, **how)
    if name == "choose":
        return custom.ItemPacker(stage, size=setting, select=random_triples, max_buffer_bytes=held_bytes)
    return Filter(stage, seldom_zero) if name == "filter" else Swapped(stage)
