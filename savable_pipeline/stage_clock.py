"""How long each stage of a lane takes, and what it counts.

One batch of 16 is timed. During it the methods by which stages ask each other are wrapped; no other batch pays for it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from savable_pipeline.stage import Stage

EVERY = 16
_ASKED = ("take", "take_refs", "samples", "fetch")


def take_counts(stages: Sequence[Stage], spent: Mapping[str, int]) -> dict[str, int | float]:
    """What these stages have counted since this was last called, as `STAGE/NAME`, and as `STAGE/ns` what they spent."""
    counts: dict[str, int | float] = {f"{name}/ns": nanoseconds for name, nanoseconds in spent.items()}
    for stage in stages:
        if stage.counts:
            name = type(stage).__name__
            for what, number in stage.counts.items():
                counts[f"{name}/{what}"] = counts.get(f"{name}/{what}", 0) + number
            stage.counts.clear()
    return counts


@contextlib.contextmanager
def timed(stages: Sequence[Stage]) -> Iterator[dict[str, int]]:
    """Inside, the nanoseconds that each stage takes, without those of the stages it asks, are added up by its name.

    The last of `stages` is the one that is called.
    """
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

    for stage in stages[:-1]:
        for method in _ASKED:
            setattr(stage, method, wrap(type(stage).__name__, getattr(stage, method)))
    start = time.perf_counter_ns()
    try:
        yield spent
    finally:
        spent[type(stages[-1]).__name__] += time.perf_counter_ns() - start - inner[0]
        for stage in stages[:-1]:
            for method in _ASKED:
                delattr(stage, method)
