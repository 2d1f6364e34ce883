"""The toy pipeline as a chain of `sp.read`, with the same stages and settings."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support.own_stages import FewOfMany, Numbered, Swapped
from tests.support.toy_pipelines import (
    InPairs,
    MeasuringEncoder,
    RandomPacks,
    ToyEncoder,
    by_parity,
    toy_pipeline,
    weights_of,
)
from tests.support.toy_stores import READERS, number_of


def no_multiple_of_five(sample: sp.Sample, rng: sp.Rng) -> bool:
    """Return whether to keep a sample. It also draws a random number. By 3, some of 12 lanes would get no samples."""
    return number_of(sample) % 5 > 0 and rng.random() < 0.9


def not_of_eight(item: Any) -> bool:
    """Return whether to keep an item."""
    return bool(item["length"] != 8)


def toy_chain(
    shards: str,
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
    stride: int = 8,
    point: int = 100,
    pack: str | None = "best_fit",
    max_length: int = 20,
    max_images: int | None = None,
    too_long: Any = None,
    max_buffer_bytes: int = 1 << 30,
    open_packs: int = 3,
    size: int = 2,
    drop_last: bool = False,
    skip: int = 7,
    fan_out: int = 5,
    max_cost: int | None = None,
    candidates: int | None = None,
    tells: bool = False,
    own: Collection[str] = (),
    filters: Collection[str] = (),
) -> sp.Pipeline:
    """Return a pipeline with the settings of `toy_pipeline`; `filters` are "samples" and "items", where to filter."""
    encoder = (MeasuringEncoder if tells else ToyEncoder)(skip=skip, fan_out=fan_out)
    cost = sp.attention_cost(hidden=1, per_image=3)

    def samples(shuffle: bool = shuffle, epochs: float | None = epochs) -> Any:
        how: Any = {"epochs": epochs, "shuffle": shuffle, "block_size": block_size, "window": window, "subset": subset}
        read = sp.read(shards, **READERS[store][1], **how)
        if join is not None:
            read = sp.join(read, {"joined": joined}, missing=join)  # type: ignore[arg-type]
        if "samples" in own:
            read = read.then(FewOfMany)
        return read.filter(no_multiple_of_five) if "samples" in filters else read

    def items(read: Any) -> Any:
        made = (read if buffer is None else read.shuffle(buffer)).encode(encoder)
        made = made.then(Swapped) if "items" in own else made
        return made.filter(not_of_eight) if "items" in filters else made

    def blended(sources: dict[str, Any], by: Any) -> Any:
        return sp.blend(sources, weights=weights_of(list(sources), weights, by, point), by=by, stride=stride)

    if blend is None:
        chain = items(samples())
    elif blend == "samples":
        chain = items(blended({"a": samples(), "b": samples(False), "c": samples()}, "samples"))
    elif blend == "items":
        chain = blended({"a": items(samples()), "b": samples().encode(encoder), "c": items(samples(False))}, by)
    elif blend == "ending":
        chain = items(blended({"a": samples(), "b": samples(epochs=1), "c": samples()}, "samples"))
    else:
        inner = blended({"a": samples(), "b": samples()}, "samples")
        chain = blended({"x": items(inner), "c": samples().encode(encoder)}, by)
    if pack in ("buckets", "groups", "both"):
        sizes: Any = {"buckets": size, "groups": {("parity", 0): size, ("parity", 1): 3}, "both": [size, 2, 3]}[pack]
        same: Any = {} if candidates is None else {"same_bucket": True, "candidates": candidates}
        group: Any = {"buckets": None, "groups": by_parity, "both": "third"}[pack]
        bounds = [] if pack == "groups" else [2, 5, 9]
        chain = chain.bucket(bounds, group=group, size=sizes, drop_last=drop_last, **same)
        return chain.then(Numbered) if "batches" in own else chain
    if pack == "items":
        select = RandomPacks(drops=skip > 0)
        chain = chain.then(custom.ItemPacker, size=4 * open_packs + 1, select=select, max_buffer_bytes=max_buffer_bytes)
    elif pack is not None:
        function = pack == "function"
        chain = chain.pack(
            max_length,
            policy=InPairs(max_length) if function else pack,
            open_packs=open_packs,
            max_images=None if function else max_images,
            max_cost=None if function else max_cost,
            cost=None if max_cost is None or function else cost,
            too_long=too_long,
            max_buffer_bytes=max_buffer_bytes,
        )
    if candidates is not None:
        chain = chain.balance(candidates, cost=cost, max_buffer_bytes=max_buffer_bytes)
    chain = chain.batch(size, drop_last=drop_last)
    return chain.then(Numbered) if "batches" in own else chain


def toy(shards: str, *, chain: bool, filters: Collection[str] = (), **settings: Any) -> Any:
    """Return a pipeline with these settings: a chain, or a function of a lane, which has no filters."""
    return toy_chain(shards, filters=filters, **settings) if chain else partial(toy_pipeline, shards, **settings)
