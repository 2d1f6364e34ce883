"""Watches the samples of a timed batch: how long the encoder takes for each, reading included, and the bytes read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.encode import Encode, EncodeCall
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage


class Watched(msgspec.Struct):
    """What was seen of one batch. `samples`: shard, index with its source's tag, and nanoseconds of each call."""

    samples: list[tuple[str, int, int]]
    bytes_read: int = 0

    def add_bytes(self, read: int) -> None:
        """Count bytes that were read."""
        self.bytes_read += read


@contextlib.contextmanager
def watched(stages: Sequence[Stage]) -> Iterator[Watched]:
    """Within this context, record the samples that the encoders of these stages take, and the bytes read."""
    found = Watched([])
    datasets = {id(stage.dataset): stage.dataset for stage in stages if isinstance(stage, RecordReader)}
    encodes = [stage for stage in stages if isinstance(stage, Encode)]
    with contextlib.ExitStack() as undo:
        for dataset in datasets.values():
            undo.enter_context(dataset.noting_reads(found.add_bytes))
        for encode in encodes:
            undo.callback(encode.exchange, partial(_instead, encode.exchange(partial(_timed, found=found))))
        yield found


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
