"""Measures the time that each stage of a lane and each sample takes, and collects the stages' event counters.

Every 16th batch is timed, unless another was in the last quarter of a second. Meanwhile each stage is of a subclass of
its class, whose methods measure. This takes a microsecond or two a sample, and other batches run at no cost.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.chunked_stage import ChunkedStage
from savable_pipeline.stages.encode import Encode, EncodeCall
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

EVERY, PAUSE_S = 16, 0.25
READ = "read"  # the name of the time in which samples read their parts
_TIMED = ("__next__", "take", "open_samples", "fetch", "make")


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

    The time in which samples read their parts is that of `READ`, not of the stage that asks for them: a slow disk or
    network is not a slow encoder. `stages` are in the order of the data path: the last one is called.
    """
    clock = _Clock()
    datasets = {id(stage.dataset): stage.dataset for stage in stages if isinstance(stage, RecordReader)}
    classes = [type(stage) for stage in stages]
    for stage in stages:
        vars(stage)["_clock"] = clock
        stage.__class__ = _measuring(type(stage))
    start = time.perf_counter_ns()
    try:
        with contextlib.ExitStack() as undo:
            for dataset in datasets.values():
                undo.enter_context(dataset.noting_reads(clock.add_read))
            yield clock.spent
    finally:
        clock.spent[classes[-1].__name__] += time.perf_counter_ns() - start - clock.inner
        for stage, kind in zip(stages, classes, strict=True):
            stage.__class__ = kind


class _Clock:
    """`spent`: nanoseconds by name of stage; `inner`: nanoseconds that the current call spent in stages upstream."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.inner = 0

    def add_read(self, _bytes: int, took: int) -> None:
        """Add the time that a sample took to read a part, and take it off the stage that asked for it."""
        self.spent[READ] += took
        self.inner += took

    def time(self, stage: Stage, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of a stage and add the time it took."""
        before, self.inner = self.inner, 0
        start = time.perf_counter_ns()
        try:
            return call(stage, *arguments)
        finally:
            took = time.perf_counter_ns() - start
            self.spent[type(stage).__name__] += took - self.inner
            self.inner = before + took


_MEASURING: dict[type[Stage], type[Stage]] = {}


def _measuring(kind: type[Stage]) -> type[Stage]:
    """A subclass of this class that adds the time of its methods to the stage's clock."""
    if kind in _MEASURING:
        return _MEASURING[kind]

    def measured(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stage, *arguments: vars(stage)["_clock"].time(stage, call, *arguments)

    # Defaults stay as they are: `maker_of` recognizes them.
    defaults = [getattr(base, name, None) for base in (Stage, ChunkedStage) for name in _TIMED]
    methods = {name: measured(call) for name in _TIMED if (call := getattr(kind, name, None)) and call not in defaults}
    return _MEASURING.setdefault(kind, type(kind.__name__, (kind,), methods))


class WatchedSamples(msgspec.Struct):
    """What was seen of one batch. `samples`: shard, index with its source's tag, and nanoseconds of each call."""

    samples: list[tuple[str, int, int]]
    bytes_read: int = 0

    def add_bytes(self, read: int, _took: int) -> None:
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
