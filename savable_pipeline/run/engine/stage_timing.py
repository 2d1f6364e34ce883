"""Times of the stages of a lane and of samples, and the stages' event counters.

Every 16th batch is timed, unless another one was timed in the last quarter of a second. During this batch, the class of
each stage is replaced by a subclass whose methods measure. This takes a microsecond or two per sample. Other batches
cost nothing.
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

TIMED_EVERY = 16  # one of this many batches is timed
MIN_PAUSE_S = 0.25  # between the starts of two timed batches
READ = "read"  # name of the time in which samples read their parts
_TIMED_METHODS = ("__next__", "take", "open_samples", "fetch", "make")


class WatchedSamples(msgspec.Struct):
    """Samples of a timed batch.

    `samples` has, for each call of an encoder, the sample's shard, its index with the tag of its source, and the call's
    nanoseconds. `bytes_read` is the size of all parts that were read.
    """

    samples: list[tuple[str, int, int]]
    bytes_read: int = 0


def pop_counts(stages: Sequence[Stage]) -> dict[str, int | float]:
    """Return the event counters of these stages by `STAGE/NAME`, and clear them."""
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
def time_stages(stages: Sequence[Stage], watched: WatchedSamples | None = None) -> Iterator[dict[str, int]]:
    """Yield a dict of the nanoseconds spent in each stage, by class name.

    It is filled within this context. The time of a stage excludes the stages upstream. The time in which samples read
    their parts counts as `READ`, because a slow disk or network is not a slow encoder. `stages` are in the order of the
    data path, and the block calls the last one. The samples are added to `watched`, if it is passed.
    """
    clock = _Clock(watched)
    datasets = {id(stage.dataset): stage.dataset for stage in stages if isinstance(stage, RecordReader)}
    last = type(stages[-1]).__name__
    with contextlib.ExitStack() as undo:
        for stage in stages:
            if watched is not None and isinstance(stage, Encode):
                undo.callback(setattr, stage.keyed, "encode", stage.keyed.encode)
                stage.keyed.encode = _watched_encode(stage.keyed.encode, watched)
            vars(stage)["_clock"] = clock
            undo.callback(setattr, stage, "__class__", type(stage))
            stage.__class__ = _timed_class(type(stage))
        for dataset in datasets.values():
            undo.enter_context(dataset.observe_reads(clock.add_read))
        start = time.perf_counter_ns()
        try:
            yield clock.spent
        finally:
            clock.spent[last] += time.perf_counter_ns() - start - clock.upstream_ns


class _Clock:
    """Clock of the stages of a lane.

    `spent` has nanoseconds by class name of the stage. `upstream_ns` is the time that the current call of a stage spent
    in stages upstream and in reads.
    """

    def __init__(self, watched: WatchedSamples | None) -> None:
        self.spent: Counter[str] = Counter()
        self.upstream_ns = 0
        self._watched = watched

    def add_read(self, size: int, took_ns: int) -> None:
        """Count the time in which a sample read a part as `READ`.

        It does not count as time of the stage.
        """
        self.spent[READ] += took_ns
        self.upstream_ns += took_ns
        if self._watched is not None:
            self._watched.bytes_read += size

    def time(self, stage: Stage, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a stage's method, and add its time to the stage."""
        before, self.upstream_ns = self.upstream_ns, 0
        start = time.perf_counter_ns()
        try:
            return call(stage, *arguments)
        finally:
            took_ns = time.perf_counter_ns() - start
            self.spent[type(stage).__name__] += took_ns - self.upstream_ns
            self.upstream_ns = before + took_ns


_TIMED_CLASSES: dict[type[Stage], type[Stage]] = {}


def _timed_class(kind: type[Stage]) -> type[Stage]:
    """Return a subclass of `kind` whose methods add their time to the stage's clock."""
    if kind in _TIMED_CLASSES:
        return _TIMED_CLASSES[kind]

    def measured(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stage, *arguments: vars(stage)["_clock"].time(stage, call, *arguments)

    # Defaults stay unchanged, because `ChunkedStage.maker` compares them.
    defaults = [getattr(base, name, None) for base in (Stage, ChunkedStage) for name in _TIMED_METHODS]
    calls = {name: getattr(kind, name, None) for name in _TIMED_METHODS}
    methods = {name: measured(call) for name, call in calls.items() if call and call not in defaults}
    return _TIMED_CLASSES.setdefault(kind, type(kind.__name__, (kind,), methods))


def _watched_encode(encode: EncodeCall, watched: WatchedSamples) -> EncodeCall:
    """Return `encode` as a function that adds each sample and the nanoseconds of its call to `watched`."""

    def timed(sample: Sample, rng: Rng) -> Any:
        start = time.perf_counter_ns()
        try:
            return encode(sample, rng)
        finally:
            watched.samples.append((sample.shard, sample.index, time.perf_counter_ns() - start))

    return timed
