"""Random changes of states with corrected checksums, and functions that load them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fuzz_values import changed, changed_bytes, encoded
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.state_numbers import ORDER, STATE
from savable_pipeline.run.state.summary import differences, shown, summarize

_HEAD = 16  # bytes of a packed state before its MessagePack


class FuzzEncoder(sp.TaskEncoder):
    """Encoder whose items repeat a sample's number one to four times. Every fifth sample has three items."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return iter([[number] * (1 + i) for i in range(3)]) if number % 5 == 0 else [number] * (number % 4 + 1)

    def length(self, item: Any) -> int:
        return len(item)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def packed_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    """Build a lane with the usual stages."""
    items = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=6), FuzzEncoder(), on_error="skip")
    return sp.Batcher(sp.OnlinePacker(items, max_length=6, open_packs=2, policy="sequential"), size=2)


def sorted_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    """Build a lane whose packing policy sorts items."""
    items = sp.Encode(sp.TarShardReader(shards, lane, epochs=2, shuffle=False), FuzzEncoder())
    return sp.Batcher(sp.OnlinePacker(items, max_length=9, open_packs=2, policy="first_fit_decreasing"), size=1)


def blended_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    """Build a lane that blends two sources by tokens, and batches by length."""
    encoder = FuzzEncoder()
    sources = {name: sp.Encode(sp.TarShardReader(shards, lane), encoder) for name in ("a", "b")}
    return custom.BucketBatcher(sp.Blend(sources, weights={"a": 2, "b": 1}, by="tokens"), bounds=[2, 4], size=2)


def blended_samples_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    """Build a lane that blends two sources of samples before the shuffle buffer."""
    samples = sp.Blend({name: sp.TarShardReader(shards, lane) for name in ("a", "b")}, weights={"a": 2, "b": 1})
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=5), FuzzEncoder()), size=3)


_PIPELINES = (packed_pipeline, sorted_pipeline, blended_pipeline, blended_samples_pipeline)


def states(folder: Path, rng: random.Random, count: int) -> Iterator[Callable[[], None]]:
    """Yield functions that load a changed state of one of the pipelines."""
    saved_states = []
    for pipeline in _PIPELINES:
        loader = _loader(pipeline, folder)
        for _ in range(7):
            next(loader)
        saved_states.append((pipeline, loader.state_dict()))
    for number in range(count):
        pipeline, state = saved_states[number % len(saved_states)]
        # "outside" changes the dict of the state itself, and each other name an entry of it
        name = rng.choice(["lane_00000", "lane_00001", "lane_00000", "lane_00001", "fingerprint", "outside"])
        if name == "outside":
            yield partial(_load, pipeline, folder, changed(state, rng))
        else:
            yield partial(_load, pipeline, folder, {**state, name: _changed_entry(state[name], name, rng)})


def _loader(pipeline: Any, folder: Path) -> sp.SavableLoader:
    return sp.SavableLoader(lambda lane: pipeline(str(folder / "shards"), lane), seed=3, lanes=2)


def _load(pipeline: Any, folder: Path, state: Any) -> None:
    """Describe, merge and resume a state, and raise the last error of ours that it causes."""
    errors = []
    for act in (_describe, lambda state: sp.merge_states([state]), lambda state: _resume(pipeline, folder, state)):
        try:
            act(state)
        except Exception as error:
            if not isinstance(error, sp.SavableError) and type(error) is not ValueError:
                raise
            errors.append(error)
    if errors:
        raise errors[-1]


def _resume(pipeline: Any, folder: Path, state: Any) -> None:
    """Resume from a state, and take a few batches."""
    loader = _loader(pipeline, folder)
    loader.load_state_dict(state)
    for _ in range(6):
        if next(loader, None) is None:
            break
        loader.trace()


def _describe(state: Any) -> None:
    """Call all functions that describe a state."""
    summary = summarize(state)
    differences(summary, summary)
    for fields in summary.lanes.values():
        for field, value in fields.items():
            shown(field, value)


def _changed_entry(raw: bytes, name: str, rng: random.Random) -> bytes:
    """Change a packed lane state or the packed fingerprint, and correct its checksum."""
    body = raw[_HEAD:]
    if rng.random() < 0.3:
        return _packed(changed_bytes(body, rng))
    value = msgspec.msgpack.decode(body)
    if name == "fingerprint":
        inner = zlib.decompress(value["compressed"])
        if rng.random() < 0.5:
            inner = encoded(changed(msgspec.msgpack.decode(inner), rng))
        else:
            inner = changed_bytes(inner, rng)
        return _packed(encoded({"compressed": zlib.compress(inner)}))
    return _packed(encoded(changed(value, rng)))


def _packed(body: bytes) -> bytes:
    """Put the header of a packed state before its MessagePack."""
    versions = STATE.to_bytes(2, "little") + ORDER.to_bytes(2, "little")
    return b"SAVL" + versions + xxh3_64_intdigest(body).to_bytes(8, "little") + body
