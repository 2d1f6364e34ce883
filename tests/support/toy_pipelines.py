"""A pipeline with every stage and an encoder that does everything an encoder may do."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

import savable_pipeline as sp
from tests.support.own_stages import FewOfMany, Numbered, Swapped


class ToyEncoder(sp.TaskEncoder):
    """Skips every seventh sample, makes three of every fifth, and draws from all generators in every method."""

    def __init__(self, *, skip: int = 7, fan_out: int = 5) -> None:
        self.skip = skip
        self.fan_out = fan_out

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if self.skip and number % self.skip == 0:
            return sp.Skip(f"every {self.skip}th")
        if self.fan_out and number % self.fan_out == 0:
            return self._parts(number, rng)
        return self._item(number, rng)

    def _parts(self, number: int, rng: sp.Rng) -> Iterator[Any]:
        for _ in range(3):
            yield self._item(number, rng)

    def _item(self, number: int, rng: sp.Rng) -> dict[str, Any]:
        return {"id": number, "drawn": draw(rng), "start": 0, "length": 1 + number % 9}

    def length(self, item: Any) -> int:
        return int(item["length"])

    def images(self, item: Any) -> int:
        return int(item["id"] % 3)

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return {**item, "start": start, "length": stop - start}

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"id": [item["id"] for item in items if not item["start"]], "items": items, "drawn": draw(rng)}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": items, "drawn": draw(rng)}

    def settings(self) -> dict[str, Any]:
        return {"skip": self.skip, "fan_out": self.fan_out}


class TellingEncoder(ToyEncoder):
    """Tells lengths and images without encoding, where encoding gives one item."""

    def length_of(self, sample: sp.Sample) -> int | None:
        number = sample.json()["id"]
        if (self.skip and number % self.skip == 0) or (self.fan_out and number % self.fan_out == 0):
            return None
        return 1 + int(number) % 9

    def images_of(self, sample: sp.Sample) -> int:
        return int(sample.json()["id"] % 3)


def draw(rng: sp.Rng) -> list[Any]:
    """Numbers from every source of randomness an encoder has."""
    own = [rng.random(), rng.integers(10), rng.normal(), rng.choice("abc"), rng.permutation(3)]
    made = [rng.numpy.random(), torch.rand(2, generator=rng.torch), rng.python.random()]
    return [*own, *made, random.random(), np.random.rand(2), torch.randn(3)]


def toy_pipeline(
    shards: str,
    lane: sp.Lane,
    *,
    epochs: int | None = None,
    shuffle: bool = True,
    block_size: int = 8,
    window: int | None = 32,
    buffer: int | None = 10,
    blend: str | None = None,
    pack: str | None = "best_fit",
    max_length: int = 20,
    max_images: int | None = None,
    too_long: str | None = None,
    max_held_bytes: int = 1 << 30,
    open_packs: int = 3,
    size: int = 2,
    drop_last: bool = False,
    skip: int = 7,
    fan_out: int = 5,
    max_cost: int | None = None,
    hold: int | None = None,
    tells: bool = False,
    exclude: str | None = None,
    own: Collection[str] = (),
) -> sp.Stage:
    """Every stage, each with its settings, or without it.

    `blend` reads the shards under several names: as "readers", as "branches" by tokens, "nested", or nested with
    sources "ending" after an epoch. `pack="buckets"` is batches by length. `hold` is that of a `Balance`; `tells`: the
    encoder tells lengths without encoding. `own` names the kinds of stages, of "samples", "items" and "batches", after
    which a user's own stage of that kind stands.
    """
    encoder = (TellingEncoder if tells else ToyEncoder)(skip=skip, fan_out=fan_out)
    cost = sp.attention_cost(hidden=1, per_image=3)

    def reader(shuffle: bool = shuffle, epochs: int | None = epochs) -> sp.Stage:
        read = sp.TarShardReader(
            shards, lane, epochs=epochs, shuffle=shuffle, block_size=block_size, window=window, exclude=exclude
        )
        return FewOfMany(read) if "samples" in own else read

    def items(samples: sp.Stage) -> sp.Stage:
        made = sp.Encode(samples if buffer is None else sp.ShuffleBuffer(samples, size=buffer), encoder)
        return Swapped(made) if "items" in own else made

    if blend is None:
        stage = items(reader())
    elif blend == "readers":
        stage = items(sp.Blend({"a": reader(), "b": reader(False)}, weights={"a": 3, "b": 1}))
    elif blend == "branches":
        branches = {"a": items(reader()), "b": sp.Encode(reader(), encoder)}
        stage = sp.Blend(branches, weights={"a": 0.7, "b": 0.3}, by="tokens")
    else:
        once = 1 if blend == "ending" else epochs
        inner = sp.Blend({"a": reader(), "b": reader(epochs=once)}, weights={"a": 1, "b": 1})
        stage = sp.Blend({"x": items(inner), "c": items(reader(False, once))}, weights={"x": 5, "c": 2})
    if pack == "buckets":
        buckets = sp.BucketBatcher(stage, bounds=[2, 5, 9], size=size, drop_last=drop_last)
        return Numbered(buckets) if "batches" in own else buckets
    if pack is not None:
        stage = sp.OnlinePacker(
            stage,
            max_length=max_length,
            policy=pack,  # type: ignore[arg-type]
            open_packs=open_packs,
            max_images=max_images,
            max_cost=max_cost,
            cost=None if max_cost is None else cost,
            too_long=too_long,  # type: ignore[arg-type]
            max_held_bytes=max_held_bytes,
        )
    if hold is not None:
        stage = sp.Balance(stage, hold=hold, cost=cost, max_held_bytes=max_held_bytes)
    batches = sp.Batcher(stage, size=size, drop_last=drop_last)
    return Numbered(batches) if "batches" in own else batches


SOURCES = {
    None: 1,
    "readers": 2,
    "branches": 2,
    "nested": 3,
    "ending": 3,
}  # how often `blend` reads each sample in an epoch


def numbers(batch: Any) -> list[int]:
    """The ids of the samples in a batch of the toy pipeline."""
    found: list[int] = []
    for item in batch["items"]:
        found += item["id"] if isinstance(item["id"], list) else [item["id"]]
    return found
