"""Times of the stages of a lane and of samples, and the stages' event counters.

Every 16th batch is timed, unless another was in the last quarter of a second. For this batch each stage gets a subclass
of its class, whose methods measure. This takes a microsecond or two per sample. Other batches cost nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.chunked_stage import ChunkedStage
from savable_pipeline.stages.encode import Encode, EncodeCall
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

EVERY, PAUSE_S = 16, 0.25
READ = "read"  # name of the time in which samples read their parts
_TIMED = ("__next__", "take", "open_samples", "fetch", "make")


class WatchedSamples(msgspec.Struct):
    """Samples of one batch that encoders received, and the bytes read.

    `samples` has shard, index with its source's tag, and nanoseconds of each call.
    """

    samples: list[tuple[str, int, int]]
    bytes_read: int = 0


def pop_counts(stages: Sequence[Stage]) -> dict[str, int | float]:
    """Collect and clear the event counters of these stages, as `STAGE/NAME`."""
    counts: dict[str, int | float] = {}
    for stage in stages:
        if stage.counts:
            name = type(stage).__name__
            for event, number in stage.counts.items():
                key = f"{name}/{event}"
                counts[key] = counts.get(key, 0) + number
            stage.counts.clear()
    return counts


@contextlib.contextmanager
def timed(stages: Sequence[Stage], record: WatchedSamples | None = None) -> Iterator[dict[str, int]]:
    """Sum up the nanoseconds of each stage by its name within this context.

    The time of a stage excludes the stages upstream. The time in which samples read their parts counts as `READ`,
    because a slow disk or network is not a slow encoder. `stages` are in the order of the data path, and the last one
    is called. `record` gets the samples that encoders receive, and the bytes read.
    """
    clock = _Clock(record)
    datasets = {id(stage.dataset): stage.dataset for stage in stages if isinstance(stage, RecordReader)}
    last = type(stages[-1]).__name__
    with contextlib.ExitStack() as undo:
        for stage in stages:
            if record is not None and isinstance(stage, Encode):
                undo.callback(setattr, stage.keyed, "encode", stage.keyed.encode)
                stage.keyed.encode = _timed(stage.keyed.encode, record)
            vars(stage)["_clock"] = clock
            undo.callback(setattr, stage, "__class__", type(stage))
            stage.__class__ = _measuring(type(stage))
        for dataset in datasets.values():
            undo.enter_context(dataset.observe_reads(clock.add_read))
        start = time.perf_counter_ns()
        try:
            yield clock.spent
        finally:
            clock.spent[last] += time.perf_counter_ns() - start - clock.inner


class _Clock:
    """Clock of the stages of a lane.

    `spent` has nanoseconds by name of stage, and `inner` the nanoseconds that the current call spent in stages
    upstream.
    """

    def __init__(self, record: WatchedSamples | None) -> None:
        self.spent: Counter[str] = Counter()
        self.inner = 0
        self._record = record

    def add_read(self, size: int, took: int) -> None:
        """Add the time in which a sample read a part, and subtract it from the stage."""
        self.spent[READ] += took
        self.inner += took
        if self._record is not None:
            self._record.bytes_read += size

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
    """Return a subclass of this class that adds the time of its methods to the stage's clock."""
    if kind in _MEASURING:
        return _MEASURING[kind]

    def measured(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stage, *arguments: vars(stage)["_clock"].time(stage, call, *arguments)

    # Defaults stay unchanged, because `ChunkedStage.maker` compares them.
    defaults = [getattr(base, name, None) for base in (Stage, ChunkedStage) for name in _TIMED]
    methods = {name: measured(call) for name in _TIMED if (call := getattr(kind, name, None)) and call not in defaults}
    return _MEASURING.setdefault(kind, type(kind.__name__, (kind,), methods))


def _timed(call: EncodeCall, found: WatchedSamples) -> EncodeCall:
    def timed(sample: Sample, rng: Rng) -> Any:
        start = time.perf_counter_ns()
        try:
            return call(sample, rng)
        finally:
            found.samples.append((sample.shard, sample.index, time.perf_counter_ns() - start))

    return timed
