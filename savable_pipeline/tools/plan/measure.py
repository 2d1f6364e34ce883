"""`RankMeasurement`: what one rank of the run does on this machine: its rate, stages, state and resume."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.stage_timing import timed
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.stage import Stage

_TIMED = 16  # batches whose stages are timed, at most
_WARM = 2  # batches of each worker before its rate is measured
_COPIES = 5  # of the state


@dataclass(frozen=True)
class Rate:
    """The rate of one rank with this many workers."""

    workers: int
    first_s: float
    """From making the loader to its first batch: shards are opened, workers started, buffers filled."""
    batches: int
    batches_per_s: float
    items_per_s: float


@dataclass(frozen=True)
class RankMeasurement:
    """Of one rank, on this machine."""

    cores: int
    rates: list[Rate]
    stages: dict[str, float]
    """Milliseconds of each stage a batch, without workers, in the order of the data path."""
    stages_of: int
    """Batches that were timed."""
    state_bytes: int
    state_ms: float
    """To take the state of this rank, the median of five."""
    resume_s: float
    """From making a loader and giving it the state to its first batch, without workers."""


def worker_counts(cores: int, lanes: int) -> list[int]:
    """0, 1, 2, 4, … up to the cores, or to the lanes of a rank if these are fewer."""
    most = min(cores, lanes)
    doubled = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return sorted({0, *doubled, most})


def measure(
    settings: LoaderSettings, *, ranks: int, seconds: float, told: Callable[[int, int], None] = lambda done, total: None
) -> RankMeasurement:
    """Run rank 0 of `ranks` for `seconds` with each number of workers; `told` gets the number of runs that are done."""
    alone = replace(settings, rank=0, world_size=ranks, group=None, mesh=None, ledger=None, num_workers=0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = worker_counts(cores, settings.lanes // ranks)
    stages, timed_batches = _stage_times(alone, seconds)
    told(1, len(counts) + 2)
    rates = []
    for number, workers in enumerate(counts):
        rates.append(_rate(replace(alone, num_workers=workers), seconds))
        told(2 + number, len(counts) + 2)
    state_bytes, state_ms, resume_s = _state(alone, seconds)
    told(len(counts) + 2, len(counts) + 2)
    return RankMeasurement(cores, rates, stages, timed_batches, state_bytes, state_ms, resume_s)


def _run(settings: LoaderSettings) -> Run:
    """A rank that agrees with itself on the end of an epoch: the others are not there."""
    return Run(settings, agree=lambda vote: vote)


def _take(run: Run) -> None:
    """Take the next batch, of the next epoch where one is over."""
    try:
        next(run)
    except StopIteration:
        next(iter(run))


def _rate(settings: LoaderSettings, seconds: float) -> Rate:
    start = time.perf_counter()
    with closing(_run(settings)) as run:
        _take(iter(run))
        first_s = time.perf_counter() - start
        for _ in range(_WARM * settings.num_workers):
            _take(run)
        run.stats.numbers()
        begun, batches = time.perf_counter(), 0
        while not batches or time.perf_counter() - begun < seconds:
            _take(run)
            batches += 1
        took = time.perf_counter() - begun
        items = float(run.stats.numbers()["items_per_s"])
    return Rate(settings.num_workers, first_s, batches, batches / took, items)


def _stage_times(settings: LoaderSettings, seconds: float) -> tuple[dict[str, float], int]:
    """Milliseconds a batch of each stage, and of how many batches that is the mean."""
    runner = LaneRunner(settings.pipeline, seed=settings.seed, lanes=settings.lanes, pad=settings.pad, shared={})
    with as_in_a_worker(set(KINDS)):
        last = runner.build(0, 0)[0]
        stages = list(upstream(last))
        next(last)  # which fills the buffers
        begun, batches = time.perf_counter(), 0
        spent = dict.fromkeys([type(stage).__name__ for stage in stages], 0)
        while batches < _TIMED and (not batches or time.perf_counter() - begun < seconds):
            if not _time_batch(stages, spent):
                break
            batches += 1
    return {name: ns / max(1, batches) / 1e6 for name, ns in spent.items()}, batches


def _time_batch(stages: list[Stage], spent: dict[str, int]) -> bool:
    """Add the time of a batch; False at the end of the pass."""
    with timed(stages) as clock:
        try:
            next(stages[-1])
        except StopIteration:
            return False
    for name, ns in clock.items():
        spent[name] = spent.get(name, 0) + ns
    return True


def _state(settings: LoaderSettings, seconds: float) -> tuple[int, float, float]:
    """Bytes of a rank's state in the middle of an epoch, milliseconds to take it, seconds to a resumed first batch."""
    with closing(_run(settings)) as run:
        begun, taken = time.perf_counter(), 0
        _take(iter(run))
        while taken < 2 * len(run.position.lanes) and time.perf_counter() - begun < seconds:
            _take(run)
            taken += 1
        took = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            state = run.state_dict()
            took.append(time.perf_counter() - start)
    start = time.perf_counter()
    with closing(_run(settings)) as resumed:
        resumed.load_state_dict(state)
        _take(iter(resumed))
        resume_s = time.perf_counter() - start
    size = sum(len(value) for value in state.values() if isinstance(value, bytes))
    return size, 1000 * statistics.median(took), resume_s
