"""`StageClock`: takes the counts of a lane's stages with each batch, and on some batches how long each stage took.

One batch of 16 is timed. During it the methods by which stages ask each other are wrapped; no other batch pays for it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from savable_pipeline.stage import Stage, upstream

EVERY = 16
_ASKED = ("take", "take_refs", "samples", "fetch")


class StageClock:
    """Counts of one host's lanes."""

    def __init__(self) -> None:
        self._batches = 0

    @contextlib.contextmanager
    def running(self, last: Stage) -> Iterator[dict[str, int | float]]:
        """While a lane makes a batch. What it counted is in the dict at the end, as `STAGE/NAME`.

        On a timed batch there is `STAGE/ns`, the time in the stage itself, by which to split that of all batches.
        """
        counts: dict[str, int | float] = {}
        timed = self._batches % EVERY == 0
        self._batches += 1
        with _timed(last) if timed else _untimed() as spent:
            yield counts
        for stage in upstream(last):
            name = type(stage).__name__
            if stage.counts:
                for what, number in stage.counts.items():
                    counts[f"{name}/{what}"] = counts.get(f"{name}/{what}", 0) + number
                stage.counts.clear()
        for name, nanoseconds in spent.items():
            counts[f"{name}/ns"] = nanoseconds


@contextlib.contextmanager
def _untimed() -> Iterator[dict[str, int]]:
    yield {}


@contextlib.contextmanager
def _timed(last: Stage) -> Iterator[dict[str, int]]:
    """Inside, the nanoseconds that each stage takes, without those of the stages it asks, are added up by its name."""
    spent: Counter[str] = Counter()
    inner = [0]  # time of the stages that the one at work has asked

    def wrap(name: str, asked: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before, inner[0] = inner[0], 0
            start = time.perf_counter_ns()
            try:
                return asked(*arguments)
            finally:
                took = time.perf_counter_ns() - start
                spent[name] += took - inner[0]
                inner[0] = before + took

        return call

    wrapped = [stage for stage in upstream(last) if stage is not last]
    for stage in wrapped:
        for method in _ASKED:
            stage.__dict__[method] = wrap(type(stage).__name__, getattr(stage, method))
    start = time.perf_counter_ns()
    try:
        yield spent
    finally:
        spent[type(last).__name__] += time.perf_counter_ns() - start - inner[0]
        for stage in wrapped:
            for method in _ASKED:
                del stage.__dict__[method]
