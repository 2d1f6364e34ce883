"""`Prefetcher`: requests the batches of a rank's next slots from a `Backend`.

slot of this rank    4              6             8             10
                     handed out     requested     requested     not requested yet
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import islice
from multiprocessing.util import Finalize
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.connection import is_raised
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.loader.position import Position

P = ParamSpec("P")
R = TypeVar("R")


def _stopping_on_error(call: Callable[Concatenate[Prefetcher, P], R]) -> Callable[Concatenate[Prefetcher, P], R]:
    """Stop the backend when a method raises: its position is then unknown."""

    @wraps(call)
    def guarded(self: Prefetcher, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(self, *args, **kwargs)
        except BaseException:
            self.reset()
            raise

    return guarded


class Prefetcher:
    """Hands out batches slot by slot.

    When asked for another slot than the next one, as at the start of an epoch, it drops its requests, and the backend
    continues there. After any error, including Ctrl-C, the backend's position is unknown: it is stopped.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._slot = -1  # the next slot to return; -1 before the first
        self._epoch = 0  # epoch of that slot
        self._received: deque[Delivery] = deque()  # received batches of the slots from there on
        self._again: dict[bytes, Any] = {}  # tickets of batches to rebuild, by their `RebuildRequest`
        self._remakes = 0
        self._requests: deque[Any] = deque()  # tickets of later slots
        self._is_fault_raised = False  # whether an error has reported the backend's fault
        self.uncounted: Counter[str] = Counter()  # counters of stages, to be added to the next batch
        _close_with(self, backend)

    @_stopping_on_error
    def next(self, position: Position, want: RequestKind = "batch", last: int = -1) -> Delivery:
        """Return the batch of this rank's next slot, after waiting for it.

        Slots up to `last` will be requested in the same way. Raises the stages' own errors, or `WorkerError`.
        """
        delivery = self._receive(position, want, last)
        self._received.popleft()
        self._slot += position.step
        if self.uncounted and want == "batch":
            self.uncounted.update(delivery.counts)
            delivery, self.uncounted = replace(delivery, counts=self.uncounted), Counter()
        return delivery

    @_stopping_on_error
    def peek(self, position: Position) -> Delivery:
        """Return the next batch without removing it. Raises errors of `next`."""
        return self._receive(position, "batch")

    def put_back(self, position: Position, delivery: Delivery) -> None:
        """Return this batch again at the next call for the slot of `position`."""
        self._slot, self._epoch = position.own_slot, position.epoch
        self._received.appendleft(delivery)

    @_stopping_on_error
    def again(self, position: Position, jobs: Iterable[bytes]) -> Delivery:
        """Return the batch of the first of these `RebuildRequest`s, and request others.

        Raises what `next` raises.
        """
        backend = self._start(position)
        asked = list(islice(jobs, max(1, backend.capacity)))
        for job in asked:
            if job not in self._again:
                self._remakes += 1  # a lane of its own, for any worker
                self._again[job] = backend.request(
                    position.lane_count + self._remakes, job, "again", position.facts.of_next_epoch
                )
        return backend.answer(self._again.pop(asked[0]))

    @_stopping_on_error
    def prefetch(self, position: Position) -> None:
        """Request this rank's next slots from the workers, `prefetch` for each of them."""
        if not self._backend.capacity:
            return
        self._start(position)
        self._request(position, "batch")

    @_stopping_on_error
    def query_has_next(self, position: Position, lanes: Iterable[int]) -> dict[int, Delivery]:
        """Ask lanes whether they have another batch, if that is unknown.

        Only call it before batches of these lanes are requested, because a lane that is building one has another
        position.
        """
        asked = self._peek_at(position, lanes)
        found = {lane: self._backend.answer(ticket) for lane, ticket in asked.items()}
        for peek in found.values():
            self.uncounted.update(peek.counts)
        return found

    @_stopping_on_error
    def check_shards(self) -> None:
        """Raise `ShardError` if a shard of this epoch's batches has changed."""
        self._backend.check_shards()

    @_stopping_on_error
    def count(self, position: Position) -> dict[int, int]:
        """Count the batches that each lane has from here on, by skipping them all."""
        asked, counts = self._peek_at(position, position.lanes), dict.fromkeys(position.lanes, 0)
        while asked:
            for lane in list(asked):
                found = self._backend.answer(asked.pop(lane))
                if found.more:
                    counts[lane] += 1
                    asked[lane] = self._backend.request(lane, found.state, "skip", position.facts)
        self.restart()
        return counts

    def _peek_at(self, position: Position, lanes: Iterable[int]) -> dict[int, Any]:
        backend = self._start(position)
        return {lane: backend.request(lane, position.lanes[lane].state, "peek", position.facts) for lane in lanes}

    def _receive(self, position: Position, want: RequestKind, last: int = -1) -> Delivery:
        backend = self._start(position)
        if not self._received:
            if not self._requests or self._slot < last:
                self._request(position, want, last, at_least=1)
            self._received.append(backend.answer(self._requests.popleft()))
        return self._received[0]

    def _request(self, position: Position, want: RequestKind, last: int = -1, at_least: int = 0) -> None:
        """Request this rank's next slots, as many as the backend's capacity.

        At least `at_least` are requested, even of a lane that may have no more batches.

        Slots to skip are requested up to `last`: whether later slots are skipped is not known yet.
        """
        most = max(at_least, self._backend.capacity)
        while len(self._requests) < most:
            ahead = len(self._requests) + len(self._received)
            slot = self._slot + ahead * position.step
            lane = slot % position.lane_count
            at = position.lanes[lane]
            unwanted = at.more is False or (position.final and slot >= position.end) or (want == "skip" and slot > last)
            if unwanted and len(self._requests) >= at_least:
                return
            self._requests.append(self._backend.request(lane, at.state, want, position.facts))

    def _start(self, position: Position) -> Backend:
        """Return the running backend at `position`."""
        slot = position.own_slot
        if slot != self._slot or position.epoch != self._epoch:
            self.restart()
            self._slot, self._epoch = slot, position.epoch
        self._backend.start()
        return self._backend

    def _forget(self) -> None:
        self._slot, self._received, self._requests, self._again = -1, deque(), deque(), {}

    @_stopping_on_error
    def restart(self) -> None:
        """Drop all requests. The workers continue to run."""
        self._forget()
        self._backend.forget_requests()

    def reset(self) -> None:
        """Drop all requests and end the workers."""
        self._forget()
        self._backend.stop()
        if self._backend.fault and is_raised():
            self._is_fault_raised = True

    def restart_workers(self) -> None:
        """End the workers. Batches yielded before no longer count."""
        self.reset()
        self._backend.fault, self._is_fault_raised = "", False

    def close(self) -> str:
        """End the workers and their host. They start again when needed.

        Returns the fault that the workers' last check of the shards found, unless an error has reported it, or "".
        """
        self.reset()
        self._backend.close()
        found, self._is_fault_raised = "" if self._is_fault_raised else self._backend.fault, True
        return found

    def numbers(self) -> dict[str, int]:
        """Return the backend's counters, with the batches that were received."""
        numbers = self._backend.numbers()
        return {**numbers, "ready_batches": len(self._received) + numbers["ready_batches"]}


_priority = 100


def _close_with(owner: object, backend: Backend) -> None:
    """Close the backend when `owner` is collected, or before Python joins children."""
    global _priority
    _priority += 1  # at exit, the newest is closed first
    Finalize(owner, backend.close, exitpriority=_priority)
