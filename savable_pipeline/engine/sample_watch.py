"""Watches the samples of a timed batch: how long the encoder takes for each, reading included, and the bytes read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from savable_pipeline.core.rng import Rng
from savable_pipeline.dataset.dataset import Dataset
from savable_pipeline.dataset.sample import Sample
from savable_pipeline.stages.encode import Encode, EncodeCall
from savable_pipeline.stages.reader import RecordReader
from savable_pipeline.stages.stage import Stage


class Watched(msgspec.Struct):
    """What was seen of one batch. `samples`: shard, index with its source's tag, and nanoseconds of each call."""

    samples: list[tuple[str, int, int]]
    bytes_read: int = 0


@contextlib.contextmanager
def watched(stages: Sequence[Stage]) -> Iterator[Watched]:
    """Within this context, note what the encoders of these stages are given, and what is read."""
    found = Watched([])
    datasets = {id(stage.dataset): stage.dataset for stage in stages if isinstance(stage, RecordReader)}
    encodes = [stage for stage in stages if isinstance(stage, Encode)]
    reads = [(dataset, dataset.read, dataset.array) for dataset in datasets.values()]
    calls = [(encode, encode.exchange(lambda call: _timed(call, found))) for encode in encodes]
    for dataset in datasets.values():
        _count_bytes(dataset, found)
    try:
        yield found
    finally:
        for dataset, read, array in reads:
            dataset.read, dataset.array = read, array
        for encode, call in calls:
            encode.exchange(partial(_instead, call))


def _instead(call: EncodeCall, _: EncodeCall) -> EncodeCall:
    return call


def _timed(call: EncodeCall, found: Watched) -> EncodeCall:
    def timed(sample: Sample, rng: Rng) -> Any:
        start = time.perf_counter_ns()
        try:
            return call(sample, rng)
        finally:
            found.samples.append((sample.shard, sample.index, time.perf_counter_ns() - start))

    return timed


def _count_bytes(dataset: Dataset, found: Watched) -> None:
    read, array = dataset.read, dataset.array

    def counted_read(*place: Any) -> bytes:
        data = read(*place)
        found.bytes_read += len(data)
        return data

    def counted_array(*place: Any) -> Any:
        data = array(*place)
        found.bytes_read += data.nbytes
        return data

    dataset.read, dataset.array = counted_read, counted_array
