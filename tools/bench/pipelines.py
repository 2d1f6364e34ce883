"""The pipelines that the benchmarks run; it imports neither torch nor a peer, so that a worker starts with little."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import savable_pipeline as sp
from savable_pipeline import custom

Decode: TypeAlias = Callable[[Mapping[str, bytes]], Any]
Collate: TypeAlias = Callable[[list[Any]], Any]


class FunctionEncoder(sp.TaskEncoder):
    """Items by `decode`, batches by `collate`, the functions that peers are given too; None: items are stacked."""

    def __init__(self, decode: Decode, collate: Collate | None, *, seeded: bool = False) -> None:
        self._decode = decode
        self._collate = collate
        self.global_rng = seeded

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        """What `decode` makes of it."""
        return self._decode(sample)  # type: ignore[arg-type]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        """What `collate` makes of them."""
        return super().batch(items, rng) if self._collate is None else self._collate(items)


def pipeline(folder: str, encoder: sp.TaskEncoder, size: int, buffer: int, lane: sp.Lane) -> custom.Stage:
    """Batches of `size`, out of a shuffle buffer that all lanes share."""
    samples: custom.SampleStage = sp.TarShardReader(folder, lane)
    if buffer:
        samples = sp.ShuffleBuffer(samples, size=-(-buffer // lane.count))
    return sp.Batcher(sp.Encode(samples, encoder), size=size)


def decode_json(sample: Mapping[str, bytes]) -> Any:
    """What a JSON sample becomes in every loader."""
    return json.loads(sample["json"])


def own_json(sample: Any) -> Any:
    """The same by the sample's own method, which is faster."""
    return sample.json()


def nothing(sample: Mapping[str, bytes]) -> int:
    """An item that costs nothing."""
    return 7


def filled(items: list[Any]) -> Any:
    """A batch of 9.6 MB that is only filled."""
    import torch

    return sp.empty((64, 3, 224, 224), torch.uint8).fill_(7)


def slept(items: list[Any]) -> int:
    """A batch that takes 40 ms and no processor."""
    time.sleep(0.04)
    return 1


def imported(items: list[Any]) -> list[str]:
    """What the process that makes the batch has imported."""
    return sorted(sys.modules)
