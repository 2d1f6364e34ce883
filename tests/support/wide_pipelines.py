"""A pipeline over every store, with every way to blend, join, pack, batch and balance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import savable_pipeline as sp
from tests.conftest import write_numbered_shards, write_tar
from tests.support.toy_pipelines import TellingEncoder

WIDTH = 3  # tokens of a sample in a token file


class WideEncoder(TellingEncoder):
    """The toy encoder for samples of any store: a sample of tokens has the number of its window."""

    def __init__(self, *, skip: int, fan_out: int, tells: bool) -> None:
        super().__init__(skip=skip, fan_out=fan_out)
        self.tells = tells

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        made = super().encode(_Numbered(sample), rng)  # type: ignore[arg-type]
        caption = sample.get("joined.txt")
        if isinstance(made, sp.Skip):
            return made
        if isinstance(made, dict):
            return {**made, "caption": caption}
        return ({**item, "caption": caption} for item in made)

    def length_of(self, sample: sp.Sample) -> int | None:
        return super().length_of(_Numbered(sample)) if self.tells else None  # type: ignore[arg-type]

    def images_of(self, sample: sp.Sample) -> int:
        return super().images_of(_Numbered(sample))  # type: ignore[arg-type]

    def third(self, item: Any) -> int:
        """The group of an item."""
        return int(item["length"]) % 3


class _Numbered:
    """A sample of any store as the toy encoder reads it."""

    def __init__(self, sample: sp.Sample) -> None:
        self._sample = sample

    def json(self) -> dict[str, int]:
        if "tokens" in self._sample:
            return {"id": int(self._sample.array("tokens")[0]) // WIDTH}
        return {"id": int(self._sample.json()["id"])}


def by_parity(item: Any) -> tuple[str, int]:
    """A group that is a tuple."""
    return "parity", int(item["length"]) % 2


def in_pairs(lengths: list[int], *, most: int) -> Sequence[Sequence[int]]:
    """A packing function: the longest with the shortest where they fit, else alone."""
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    groups: list[list[int]] = []
    while order:
        group = [order.pop()]
        if order and lengths[group[0]] + lengths[order[0]] <= most:
            group.append(order.pop(0))
        groups.append(group)
    return groups


class InPairs:
    """`in_pairs` with its limit, which a state must agree on."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, lengths: list[int]) -> Sequence[Sequence[int]]:
        return in_pairs(lengths, most=self.most)

    def settings(self) -> dict[str, int]:
        return {"most": self.most}


# Stores.


def write_store(kind: str, folder: Path, sizes: list[int]) -> None:
    """Numbered samples with the keys of the tars, in the folder of the kind."""
    main = folder / kind
    main.mkdir(parents=True, exist_ok=True)
    if kind == "tar":
        write_numbered_shards(main, sizes)
    first = 0
    for shard, size in enumerate(sizes):
        numbers = range(first, first + size)
        first += size
        if kind != "tar":
            _WRITE[kind](main / f"{shard:04d}", numbers)


def write_captions(folder: Path, count: int) -> None:
    """A tar in `joined` of captions of most of the first `count` samples."""
    captions = [(f"s{i:06d}.txt", f"caption {i}".encode()) for i in range(count) if i % 11]
    write_tar(folder / "joined" / "0.tar", captions)


def _texts(numbers: range) -> list[str]:
    return [json.dumps({"id": i, "key": f"s{i:06d}"}) for i in numbers]


def _table(numbers: range) -> pa.Table:
    return pa.table({"json": pa.array(_texts(numbers), pa.string()), "key": [f"s{i:06d}" for i in numbers]})


def _write_parquet(path: Path, numbers: range) -> None:
    pq.write_table(_table(numbers), path.with_suffix(".parquet"), row_group_size=7, write_page_checksum=True)


def _write_arrow(path: Path, numbers: range) -> None:
    table = _table(numbers)
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=6)


def _write_jsonl(path: Path, numbers: range) -> None:
    path.with_suffix(".jsonl").write_text("".join(f"{text}\n" for text in _texts(numbers)))


def _write_tokens(path: Path, numbers: range) -> None:
    tokens = np.arange(numbers.start * WIDTH, numbers.stop * WIDTH, dtype=np.uint16)
    np.save(path.with_suffix(".npy"), tokens)


_WRITE: dict[str, Callable[[Path, range], None]] = {
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "jsonl": _write_jsonl,
    "tokens": _write_tokens,
}
READERS: dict[str, Any] = {
    "tar": sp.TarShardReader,
    "parquet": partial(sp.ParquetReader, key="key"),
    "arrow": partial(sp.ArrowReader, key="key"),
    "jsonl": partial(sp.JsonlReader, key="key"),
    "tokens": partial(sp.TokenReader, length=WIDTH),
}


# The pipeline.


def wide_pipeline(
    folder: str,
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
    max_held_bytes: int = 1 << 30,
    open_packs: int = 3,
    size: int = 2,
    drop_last: bool = False,
    skip: int = 7,
    fan_out: int = 5,
    max_cost: int | None = None,
    hold: int | None = None,
    tells: bool = False,
) -> sp.Stage:
    """Every stage, each with its settings, or without it.

    `blend` is None, "samples" (readers), "items" (branches), "nested" or "ending" (one source ends). `weights` is how:
    "fixed", "none" given, one of them "zero", or a schedule by "step" or "linear", with changes at `point` samples and
    twice that. `pack` is a policy, "function", or batches by "buckets", "groups" or "both".
    """
    encoder = WideEncoder(skip=skip, fan_out=fan_out, tells=tells)
    cost = sp.attention_cost(hidden=1, per_image=3)

    def reader(shuffle: bool = shuffle, epochs: float | None = epochs) -> sp.SampleStage:
        how = {"epochs": epochs, "shuffle": shuffle, "block_size": block_size, "window": window, "subset": subset}
        read: sp.SampleStage = READERS[store](f"{folder}/{store}", lane, **how)
        if join is not None:
            read = sp.Join(read, {"joined": joined}, missing=join)  # type: ignore[arg-type]
        return read

    def items(samples: sp.Stage) -> sp.ItemStage:
        return sp.Encode(samples if buffer is None else sp.ShuffleBuffer(samples, size=buffer), encoder)  # type: ignore[arg-type]

    def blended(sources: dict[str, Any], by: str) -> Any:
        how: Any = {"weights": _weights(list(sources), weights, by, point), "by": by, "stride": stride}
        return sp.Blend(sources, until=until, **how)

    stage: Any
    if blend is None:
        stage = items(reader())
    elif blend == "samples":
        stage = items(blended({"a": reader(), "b": reader(False), "c": reader()}, "samples"))
    elif blend == "items":
        stage = blended({"a": items(reader()), "b": sp.Encode(reader(), encoder), "c": items(reader(False))}, by)
    elif blend == "ending":
        stage = items(blended({"a": reader(), "b": reader(epochs=1), "c": reader()}, "samples"))
    else:
        inner = blended({"a": reader(), "b": reader()}, "samples")
        stage = blended({"a": items(inner), "c": sp.Encode(reader(), encoder)}, by)
    if pack in ("buckets", "groups", "both"):
        group: Any = {"buckets": None, "groups": by_parity, "both": "third"}[pack]
        bounds = [] if pack == "groups" else [2, 5, 9]
        sizes: Any = {"buckets": size, "groups": {("parity", 0): size, ("parity", 1): 3}, "both": [size, 2, 3]}[pack]
        return sp.BucketBatcher(stage, bounds=bounds, group=group, size=sizes, drop_last=drop_last)
    if pack is not None:
        stage = sp.OnlinePacker(
            stage,
            max_length=max_length,
            policy=InPairs(max_length) if pack == "function" else pack,  # type: ignore[arg-type]
            open_packs=open_packs,
            max_images=None if pack == "function" else max_images,
            max_cost=None if pack == "function" else max_cost,
            cost=None if max_cost is None or pack == "function" else cost,
            too_long=too_long,  # type: ignore[arg-type]
            max_held_bytes=max_held_bytes,
        )
    if hold is not None:
        stage = sp.Balance(stage, hold=hold, cost=cost, max_held_bytes=max_held_bytes)
    return sp.Batcher(stage, size=size, drop_last=drop_last)


def _weights(names: list[str], how: str, by: str, point: int) -> Any:
    """Weights of sources; in a schedule the second begins and the first ends, or all change together."""
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
