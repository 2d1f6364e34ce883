"""A pipeline over any store, with every way to join, blend, encode, pack, batch and balance, and its encoder."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support.own_stages import FewOfMany, Numbered, Swapped
from tests.support.toy_stores import number_of, reader_of


class ToyEncoder(sp.TaskEncoder):
    """An encoder that skips every seventh sample, returns three items of every fifth, and draws from all generators."""

    def __init__(self, *, skip: int = 7, fan_out: int = 5) -> None:
        self.skip = skip
        self.fan_out = fan_out

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = number_of(sample)
        if self.skip and number % self.skip == 0:
            return sp.Skip(f"every {self.skip}th")
        joined = {"caption": sample["joined.txt"]} if "joined.txt" in sample else {}
        if self.fan_out and number % self.fan_out == 0:
            return self._parts(number, joined, rng)
        return self._item(number, joined, rng)

    def _parts(self, number: int, joined: dict[str, Any], rng: sp.Rng) -> Iterator[Any]:
        for _ in range(3):
            yield self._item(number, joined, rng)

    def _item(self, number: int, joined: dict[str, Any], rng: sp.Rng) -> dict[str, Any]:
        return {"id": number, **joined, "drawn": draw(rng), "start": 0, "length": 1 + number % 9}

    def length(self, item: Any) -> int:
        return int(item["length"])

    def images(self, item: Any) -> int:
        return int(item["id"] % 3)

    def third(self, item: Any) -> int:
        """Return the group of an item."""
        return int(item["length"]) % 3

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return {**item, "start": start, "length": stop - start}

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"id": [item["id"] for item in items if not item["start"]], "items": items, "drawn": draw(rng)}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": items, "drawn": draw(rng)}

    def settings(self) -> dict[str, Any]:
        return {"skip": self.skip, "fan_out": self.fan_out}


class MeasuringEncoder(ToyEncoder):
    """The same encoder, which also measures samples without encoding if they have one item."""

    def length_of(self, sample: sp.Sample) -> int | None:
        number = number_of(sample)
        if (self.skip and number % self.skip == 0) or (self.fan_out and number % self.fan_out == 0):
            return None
        return 1 + number % 9

    def images_of(self, sample: sp.Sample) -> int:
        return number_of(sample) % 3


def draw(rng: sp.Rng) -> list[Any]:
    """Return numbers from every source of randomness of an encoder."""
    own = [rng.random(), rng.integers(10), rng.normal(), rng.choice("abc"), rng.permutation(3)]
    made = [rng.numpy.random(), torch.rand(2, generator=rng.torch), rng.python.random()]
    return [*own, *made, random.random(), np.random.rand(2), torch.randn(3)]


def by_parity(item: Any) -> tuple[str, int]:
    """Return a group that is a tuple."""
    return "parity", int(item["length"]) % 2


def in_pairs(lengths: list[int], *, most: int) -> Sequence[Sequence[int]]:
    """Return packs of the longest item with the shortest if both fit, else alone: a packing function."""
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    groups: list[list[int]] = []
    while order:
        group = [order.pop()]
        if order and lengths[group[0]] + lengths[order[0]] <= most:
            group.append(order.pop(0))
        groups.append(group)
    return groups


class InPairs:
    """`in_pairs` as an object with its limit in the settings, which a state must match."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, lengths: list[int]) -> Sequence[Sequence[int]]:
        return in_pairs(lengths, most=self.most)

    def settings(self) -> dict[str, int]:
        return {"most": self.most}


class RandomPacks:
    """A chooser of random packs of different sizes, with generators of several kinds."""

    def __init__(self, *, drops: bool) -> None:
        self.drops = drops

    def __call__(self, items: list[Any], rng: sp.Rng) -> list[list[Any]]:
        random.shuffle(items)
        items = [items[place] for place in rng.permutation(len(items))]
        items = [items[int(place)] for place in np.random.permutation(len(items))]
        groups = [items[start : start + 3 - start % 2] for start in range(0, len(items), 3)]
        return groups if self.drops else [*groups, *([item] for item in items[5::6])]

    def settings(self) -> dict[str, bool]:
        return {"drops": self.drops}


def toy_pipeline(
    shards: str,
    lane: sp.Lane,
    *,
    store: str = "tar",
    epochs: float | None = None,
    shuffle: bool = True,
    block_size: int | None = 8,
    window: int | None = 32,
    subset: float | None = None,
    buffer: int | None = 10,
    join: str | None = None,
    joined: str = "",
    blend: str | None = None,
    weights: str = "fixed",
    by: str = "samples",
    until: str = "all",
    stride: int = 8,
    point: int = 100,
    pack: str | None = "best_fit",
    max_length: int = 20,
    max_images: int | None = None,
    too_long: str | None = None,
    max_buffer_bytes: int = 1 << 30,
    open_packs: int = 3,
    size: int = 2,
    drop_last: bool = False,
    skip: int = 7,
    fan_out: int = 5,
    max_cost: int | None = None,
    candidates: int | None = None,
    tells: bool = False,
    exclude: str | None = None,
    own: Collection[str] = (),
) -> custom.Stage:
    """Return a pipeline with every stage, each with its settings or omitted.

    `blend` is None, "samples" (readers), "items" (branches), "nested" or "ending" (one source ends). `weights` is
    "fixed",
    "none" for no weights, "zero" for one weight of 0, or a schedule by "step" or "linear", with changes at `point`
    samples
    and twice that. `pack` is a policy, "function", "items" (`ItemPacker`), or batches by "buckets", "groups" or "both".
    `candidates` is that of a `Balance`, or of buckets. With `tells`, the encoder measures without encoding. `own` has
    kinds
    of stages, "samples", "items" and "batches", after which a user's own stage of that kind follows. Nothing is encoded
    twice, because ranks of some tests are threads, which share the global generators.
    """
    encoder = (MeasuringEncoder if tells else ToyEncoder)(skip=skip, fan_out=fan_out)
    cost = sp.attention_cost(hidden=1, per_image=3)

    def reader(shuffle: bool = shuffle, epochs: float | None = epochs) -> custom.SampleStage:
        how = {"epochs": epochs, "shuffle": shuffle, "block_size": block_size, "window": window, "subset": subset}
        read: custom.SampleStage = reader_of(store, shards, lane, exclude=exclude, **how)
        if join is not None:
            read = custom.Join(read, {"joined": joined}, missing=join)  # type: ignore[arg-type]
        return FewOfMany(read) if "samples" in own else read

    def items(samples: custom.Stage) -> custom.ItemStage:
        made = sp.Encode(samples if buffer is None else sp.ShuffleBuffer(samples, size=buffer), encoder, check=0.0)  # type: ignore[arg-type]
        return Swapped(made) if "items" in own else made

    def batched(batches: custom.Stage) -> custom.Stage:
        return Numbered(batches) if "batches" in own else batches

    def blended(sources: dict[str, Any], by: str) -> Any:
        how: Any = {"weights": weights_of(list(sources), weights, by, point), "by": by, "stride": stride}
        return sp.Blend(sources, until=until, **how)

    stage: Any
    if blend is None:
        stage = items(reader())
    elif blend == "samples":
        stage = items(blended({"a": reader(), "b": reader(False), "c": reader()}, "samples"))
    elif blend == "items":
        stage = blended(
            {"a": items(reader()), "b": sp.Encode(reader(), encoder, check=0.0), "c": items(reader(False))}, by
        )
    elif blend == "ending":
        stage = items(blended({"a": reader(), "b": reader(epochs=1), "c": reader()}, "samples"))
    else:
        inner = blended({"a": reader(), "b": reader()}, "samples")
        stage = blended({"x": items(inner), "c": sp.Encode(reader(), encoder, check=0.0)}, by)
    if pack in ("buckets", "groups", "both"):
        group: Any = {"buckets": None, "groups": by_parity, "both": "third"}[pack]
        bounds = [] if pack == "groups" else [2, 5, 9]
        sizes: Any = {"buckets": size, "groups": {("parity", 0): size, ("parity", 1): 3}, "both": [size, 2, 3]}[pack]
        same: Any = {} if candidates is None else {"same_bucket": True, "candidates": candidates}
        return batched(custom.BucketBatcher(stage, bounds=bounds, group=group, size=sizes, drop_last=drop_last, **same))
    if pack == "items":
        select = RandomPacks(drops=skip > 0)
        stage = custom.ItemPacker(stage, size=4 * open_packs + 1, select=select, max_buffer_bytes=max_buffer_bytes)
    elif pack is not None:
        stage = sp.OnlinePacker(
            stage,
            max_length=max_length,
            policy=InPairs(max_length) if pack == "function" else pack,  # type: ignore[arg-type]
            open_packs=open_packs,
            max_images=None if pack == "function" else max_images,
            max_cost=None if pack == "function" else max_cost,
            cost=None if max_cost is None or pack == "function" else cost,
            too_long=too_long,  # type: ignore[arg-type]
            max_buffer_bytes=max_buffer_bytes,
        )
    if candidates is not None:
        stage = sp.Balance(stage, candidates=candidates, cost=cost, max_buffer_bytes=max_buffer_bytes)
    return batched(sp.Batcher(stage, size=size, drop_last=drop_last))


def weights_of(names: list[str], how: str, by: str, point: int) -> Any:
    """Return weights of sources. In a schedule the second starts and the first ends, or all change together."""
    fixed = {name: 1 + 2 * i for i, name in enumerate(names)}
    if how == "none" and by == "samples":
        return None
    if how == "zero":
        return {**fixed, names[0]: 0}
    if how in ("step", "linear"):
        begun = {**fixed, names[1]: 0}
        ended = {**dict.fromkeys(names, 1), names[0]: 0}
        points = [(0, begun), (point, fixed), (2 * point, {**fixed, names[0]: 9}), (3 * point, ended)]
        return sp.Schedule(points, unit=by, shape=how)  # type: ignore[arg-type]
    return fixed


def reads_of(blend: str | None) -> int:
    """Return how often the pipeline reads each sample in an epoch."""
    return 1 if blend is None else 3


def numbers(batch: Any) -> list[int]:
    """Return the ids of the samples in a batch of the toy pipeline."""
    found: list[int] = []
    for item in batch["items"]:
        found += item["id"] if isinstance(item["id"], list) else [item["id"]]
    return found
