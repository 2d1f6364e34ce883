"""Workers with a virtual clock, on a connection that delays, repeats or loses messages, or that hang or die.

    sp.SavableLoader(pipeline, seed=7, workers=FakeWorkers(2, world=World(seed=3)))

Each fake worker runs real lanes in the test's own process. A message, a request or an answer, takes a random time. As
on
a socket, messages stay in order. A message may arrive twice, or never, and the worker may die or hang at it. Nothing
sleeps or reads the time: a `World` depends only on its seed and its calls.
"""

from __future__ import annotations

import heapq
import pickle
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import savable_pipeline as sp
from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.run.engine.connection import STARTED, WorkerAnswer, WorkerEnd
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import LaneJob, Request, WorkerStatus
from savable_pipeline.run.engine.worker_main import answer_request
from savable_pipeline.run.transport.status_page import read_status, start_request

TROUBLES = ("late", "twice", "lost", "silent", "dead", "dies later", "cannot be ended")


class World:
    """A virtual clock with its future events, and random troubles.

    `troubles` is the probability of each trouble per message, by name.
    """

    def __init__(self, seed: int, troubles: dict[str, float] | None = None) -> None:
        self.draw = random.Random(seed)
        often = (0.0, 0.0, 0.01, 0.05, 0.2)
        self.troubles = {name: self.draw.choice(often) for name in TROUBLES} if troubles is None else troubles
        self.now = 0.0
        self.seen = dict.fromkeys(TROUBLES, 0)
        self.shared: dict[Any, Any] = {}
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def draw_trouble(self, trouble: str) -> bool:
        """Draw whether this trouble occurs now."""
        drawn = self.draw.random() < self.troubles.get(trouble, 0.0)
        self.seen[trouble] += drawn
        return drawn

    def call_later(self, seconds: float, do: Callable[[], None]) -> None:
        """Plan a call after some seconds."""
        self._planned += 1
        heapq.heappush(self._coming, (self.now + seconds, self._planned, do))

    def run_until(self, time: float, enough: Callable[[], bool]) -> None:
        """Advance the clock to `time`, or until `enough()` is true, with the calls planned until then."""
        while not enough() and self._coming and self._coming[0][0] <= time:
            at, _, do = heapq.heappop(self._coming)
            self.now = max(self.now, at)
            do()
        if not enough():
            self.now = max(self.now, time)

    def carry(self, message: Any, arrive: Callable[[Any], None], earliest: float) -> float:
        """Plan the arrival of a message: it may be late, arrive twice, or never. Returns the time of arrival."""
        raw = pickle.dumps(message)
        for _ in range(2 if self.draw_trouble("twice") else 1):
            if not self.draw_trouble("lost"):
                seconds = self.draw.choice((0.0, 0.001, 0.02)) + (
                    3.0 * self.draw.random() if self.draw_trouble("late") else 0.0
                )
                earliest = max(earliest, self.now + seconds)
                self.call_later(earliest - self.now, lambda: arrive(pickle.loads(raw)))
        return earliest


class FakeConnection:
    """Connection to a fake worker of a `World`."""

    viewed_batches = 0

    def __init__(self, world: World, host: FakeHost, name: str, job: LaneJob, pinned: PinnedShards) -> None:
        self.name = name
        self.has_ended = False
        self._world, self._host = world, host
        self._alive, self._busy, self._silent, self._checked = True, False, False, True
        self._requests: deque[Request] = deque()
        self._received = 0
        self._there, self._back = 0.0, 0.0  # times at which the last message of each direction arrives
        self._arrived: list[tuple[int, WorkerAnswer]] = []
        self._words = memoryview(bytearray(64)).cast("Q")
        start_request(self._words, 0)
        self._runner = LaneRunner(
            job, shared=world.shared, status=self._words, pinned=dict(pinned),
        )  # fmt: skip
        self._answer(STARTED, 1)

    def _answer(self, number: int, answer: WorkerAnswer) -> None:
        if self._survives():
            self._back = self._world.carry((number, answer), self._receive_answer, self._back)

    def _survives(self) -> bool:
        """Return whether the worker receives this message. It may die of it, now or a little later."""
        self._silent = self._silent or self._world.draw_trouble("silent")
        if self._alive and self._world.draw_trouble("dies later"):
            self._world.call_later(self._world.draw.random(), self.die)
        if self._alive and self._world.draw_trouble("dead"):
            self.die()
        return self._alive and not self._silent

    def die(self) -> None:
        """End the worker at once. Its sent messages arrive before or after the host knows of its end."""
        if self._alive:
            self._alive = False
            self._world.call_later(self._world.draw.choice((0.0, 0.01, 2.0)), self._report_end)

    def _report_end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._host.ended.append(WorkerEnd(self, "ended by signal SIGKILL"))

    def _receive_answer(self, message: tuple[int, WorkerAnswer]) -> None:
        self._arrived.append(message)
        self._host.heard.add(self)

    def send(self, request: Request) -> None:
        self._there = self._world.carry(request, self._receive_request, self._there)

    def _receive_request(self, request: Request) -> None:
        if self._survives():
            if request.number == self._received + 1:
                self._received += 1
                self._requests.append(request)
            self._work()

    def _work(self) -> None:
        if self._alive and not self._busy and self._requests:
            self._busy = True
            request = self._requests.popleft()
            start_request(self._words, request.number)
            self._world.call_later(0.001 + 0.05 * self._world.draw.random(), lambda: self._finish_request(request))

    def _finish_request(self, request: Request) -> None:
        self._busy = False
        if self._survives():
            self._answer(request.number, answer_request(self._runner, request))
            self._work()

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        found, self._arrived = self._arrived, []
        if not found and not self._alive:
            raise EOFError
        return found

    def check_shards(self) -> None:
        self._checked = False
        if self._survives():
            self._world.call_later(0.01, lambda: setattr(self, "_checked", self._alive))

    def has_checked(self) -> bool:
        return self._checked

    def shard_error(self) -> str:
        return ""

    def working_on(self) -> WorkerStatus:
        return WorkerStatus(*read_status(self._words))

    def stack(self) -> str:
        self._world.run_until(self._world.now + 0.5, lambda: False)
        return ""

    def kill(self) -> bool:
        if not self._world.draw_trouble("cannot be ended"):
            self.die()
        return True

    def close(self) -> None:
        self._host.heard.discard(self)


class FakeHost:
    """A host that starts fake workers, and advances the virtual clock while it waits."""

    def __init__(self, world: World, job: LaneJob) -> None:
        self.ended: list[WorkerEnd] = []
        self.heard: set[FakeConnection] = set()
        self._world, self._job = world, job
        self._workers: list[FakeConnection] = []

    def now(self) -> float:
        return self._world.now

    def count(self, wanted: int) -> int:
        return wanted

    def start_worker(self, pinned: PinnedShards) -> FakeConnection:
        made = FakeConnection(self._world, self, f"fake {len(self._workers)}", self._job, pinned)
        self._workers.append(made)
        return made

    def wait(self, seconds: float) -> tuple[list[FakeConnection], list[WorkerEnd]]:
        until = self._world.now + (max(seconds, 1e-6) if seconds else 0.0)  # a shorter wait would not advance the clock
        self._world.run_until(until, lambda: bool(self.heard or self.ended))
        heard, ended, self.ended = [each for each in self._workers if each in self.heard], self.ended, []
        self.heard.clear()
        return heard, ended

    def end_workers(self) -> None:
        for worker in self._workers:
            worker.die()
            worker.has_ended = True
        self._workers = []
        self.heard.clear()
        self.ended.clear()

    close = end_workers


@dataclass(frozen=True)
class FakeWorkers(sp.Workers):
    """The workers of a loader, in a `World`."""

    world: World = field(default_factory=lambda: World(0))

    def host(self, job: LaneJob, share: tuple[int, int] = (0, 1)) -> FakeHost:
        return FakeHost(self.world, job)
