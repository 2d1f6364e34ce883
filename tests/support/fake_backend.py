"""A `Backend` without a pipeline, whose batch k of lane n in epoch e is (e, n, k), and a run with it.

fake_run(FakeBackend(lengths=None), lanes=4)    yields (0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 0, 1), …
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from tests.support.toy_faults import number_pipeline

COUNTERS = {"ready_batches", "viewed_batches", "restarts", "num_workers", "moved_lanes"}


class FakeBackend:
    """A backend whose lanes have these `lengths`; None: endless.

    `calls` lists all calls except those for batches. `fails`, if set, is called before each answer and may raise.
    """

    def __init__(self, lengths: list[int] | None = None, capacity: int = 0) -> None:
        self.shard_error, self.capacity = "", capacity
        self.calls: list[str] = []
        self.fails: Callable[[], object] = lambda: None
        self._lengths = lengths
        self._lanes: dict[int, LaneState] = {}
        self._answers: dict[int, Delivery] = {}
        self._tickets = 0

    def request(self, lane: int, state: bytes, kind: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> int:
        at = self._lanes.setdefault(lane, unpack_state(state, LaneState, "lane"))
        length = None if self._lengths is None else self._lengths[lane]
        batch = (at.epoch, lane, at.batches) if kind == "batch" else None
        exhausted = kind != "peek" and length is not None and at.batches >= length
        done = at.batches + (kind != "peek" and not exhausted)
        more = length is None or done < length
        self._lanes[lane] = LaneState(lane, at.epoch, done, more, facts=facts.digest)
        self._tickets += 1
        self._answers[self._tickets] = Delivery(batch, pack_state(self._lanes[lane]), more, exhausted)
        return self._tickets

    def answer(self, ticket: int) -> Delivery:
        self.fails()
        return self._answers.pop(ticket)

    def agree(self, vote: Callable[[], int]) -> int:
        return vote()

    def forget_requests(self) -> None:
        self._lanes, self._answers = {}, {}

    def open(self) -> None:
        self.calls.append("open")

    def start(self) -> None:
        if self.calls[-1:] != ["start"]:
            self.calls.append("start")

    def stop(self) -> None:
        self.forget_requests()
        self.calls.append("stop")

    def close(self) -> None:
        self.stop()
        self.calls.append("close")

    def verify_delivered(self) -> None:
        self.calls.append("verify_delivered")

    def check_shards(self) -> None:
        self.calls.append("check_shards")

    def numbers(self) -> dict[str, int]:
        return {**dict.fromkeys(COUNTERS, 0), "ready_batches": len(self._answers)}


def fake_run(backend: Backend, shards: Any, *, lanes: int, epochs: int | None = None, **settings: Any) -> Run:
    """Return a run with a backend. Of the data at `shards`, only whether it is finite matters."""
    pipeline = partial(number_pipeline, str(shards), epochs=epochs)
    loader_settings = LoaderSettings(pipeline, seed=0, lanes=lanes, **settings)
    return Run(loader_settings, vote_function=lambda vote: vote, backend=backend)
