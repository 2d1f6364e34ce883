"""Measures the time that each stage of a lane and each sample takes, and collects the stages' event counters.

Every 16th batch is timed: a wrapper, put in place of each stage's source, times the calls to it. Other batches run
without wrappers, at no cost.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.capabilities import map_sources
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.sample_encoding import EncodeCall
from savable_pipeline.stages.stage import Stage

EVERY = 16
_TIMED = {"take", "take_refs", "open_samples", "fetch", "fetch_left"}


def take_counts(stages: Sequence[Stage], spent: Mapping[str, int]) -> dict[str, int | float]:
    """Collect and clear the event counters of these stages, as `STAGE/NAME`, and add the time spent, as `STAGE/ns`."""
    counts: dict[str, int | float] = {f"{name}/ns": nanoseconds for name, nanoseconds in spent.items()}
    for stage in stages:
        if stage.counts:
            name = type(stage).__name__
            for event, number in stage.counts.items():
                counts[f"{name}/{event}"] = counts.get(f"{name}/{event}", 0) + number
            stage.counts.clear()
    return counts


@contextlib.contextmanager
def timed(stages: Sequence[Stage]) -> Iterator[dict[str, int]]:
    """Within this context, sum up the nanoseconds of each stage by its name, without those of the stages upstream.

    `stages` are in the order of the data path: the last one is called.
    """
    clock = _Clock()
    for stage in stages:
        map_sources(stage, lambda source: cast(Stage, _TimedStage(source, clock)))
    start = time.perf_counter_ns()
    try:
        yield clock.spent
    finally:
        clock.spent[type(stages[-1]).__name__] += time.perf_counter_ns() - start - clock.inner
        for stage in stages:
            map_sources(stage, lambda source: cast(_TimedStage, source).stage)


class _Clock:
    """`spent`: nanoseconds by name of stage; `inner`: nanoseconds that the current call spent in stages upstream."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.inner = 0

    def time(self, stage: Stage, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of a stage and add the time it took."""
        before, self.inner = self.inner, 0
        start = time.perf_counter_ns()
        try:
            return call(*arguments, **named)
        finally:
            took = time.perf_counter_ns() - start
            self.spent[type(stage).__name__] += took - self.inner
            self.inner = before + took


class _TimedStage:
    """Wraps a stage while a batch is timed, and passes for one of its class."""

    def __init__(self, stage: Stage, clock: _Clock) -> None:
        self.stage = stage
        self._clock = clock

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.stage)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.stage, name)
        return partial(self._clock.time, self.stage, found) if name in _TIMED else found

    def __iter__(self) -> _TimedStage:
        return self

    def __next__(self) -> Any:
        return self._clock.time(self.stage, next, self.stage)


class WatchedSamples(msgspec.Struct):
    """What was seen of one batch. `samples`: shard, index with its source's tag, and nanoseconds of each call."""

    samples: list[tuple[str, int, int]]
    bytes_read: int = 0

    def add_bytes(self, read: int) -> None:
        """Count bytes that were read."""
        self.bytes_read += read


@contextlib.contextmanager
def watched(stages: Sequence[Stage]) -> Iterator[WatchedSamples]:
    """Within this context, record the samples that the encoders of these stages take, and the bytes read."""
    found = WatchedSamples([])
    datasets = {id(stage.dataset): stage.dataset for stage in stages if isinstance(stage, RecordReader)}
    encodes = [stage for stage in stages if isinstance(stage, Encode)]
    with contextlib.ExitStack() as undo:
        for dataset in datasets.values():
            undo.enter_context(dataset.noting_reads(found.add_bytes))
        for encode in encodes:
            undo.callback(setattr, encode.keyed, "encode", encode.keyed.encode)
            encode.keyed.encode = _timed(encode.keyed.encode, found)
        yield found


def _timed(call: EncodeCall, found: WatchedSamples) -> EncodeCall:
    def timed(sample: Sample, rng: Rng) -> Any:
        start = time.perf_counter_ns()
        try:
            return call(sample, rng)
        finally:
            found.samples.append((sample.shard, sample.index, time.perf_counter_ns() - start))

    return timed
