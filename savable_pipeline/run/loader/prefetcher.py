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
    """Stop the backend when the method raises, because the backend's position is then unknown."""

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

    If the caller asks for another slot than the next one, as at the start of an epoch, all requests are dropped, and
    the backend continues at that slot. After any error, including Ctrl-C, the backend is stopped, because its position
    is unknown.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._slot = -1  # the next slot to return; -1 before the first
        self._epoch = 0  # epoch of that slot
        self._received: deque[Delivery] = deque()  # received batches of the slots from `_slot` on
        self._rebuild_tickets: dict[bytes, Any] = {}  # tickets of batches to rebuild, by their `RebuildRequest`
        self._rebuild_count = 0
        self._requests: deque[Any] = deque()  # tickets of the slots after the received ones
        self._is_fault_raised = False  # whether an error has reported the backend's fault
        self.uncounted: Counter[str] = Counter()  # counters of stages, to be added to the next batch
        _close_at_exit(self, backend)

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
        """Return the next batch without removing it. Raises what `next` raises."""
        return self._receive(position, "batch")

    def put_back(self, position: Position, delivery: Delivery) -> None:
        """Put a batch back, so that the next call for the slot of `position` returns it."""
        self._slot, self._epoch = position.own_slot, position.epoch
        self._received.appendleft(delivery)

    @_stopping_on_error
    def again(self, position: Position, jobs: Iterable[bytes]) -> Delivery:
        """Return the batch of the first `RebuildRequest`, and request the following ones.

        Raises what `next` raises.
        """
        backend = self._backend_at(position)
        requested = list(islice(jobs, max(1, backend.capacity)))
        for job in requested:
            if job not in self._rebuild_tickets:
                self._rebuild_count += 1  # each rebuild has a lane of its own, so any worker may do it
                self._rebuild_tickets[job] = backend.request(
                    position.lane_count + self._rebuild_count, job, "again", position.facts.of_next_epoch
                )
        return backend.answer(self._rebuild_tickets.pop(requested[0]))

    @_stopping_on_error
    def prefetch(self, position: Position) -> None:
        """Request this rank's next slots from the workers, `prefetch` for each of them."""
        if not self._backend.capacity:
            return
        self._backend_at(position)
        self._request(position, "batch")

    @_stopping_on_error
    def query_has_next(self, position: Position, lanes: Iterable[int]) -> dict[int, Delivery]:
        """Ask lanes whether they have another batch, if that is unknown.

        Only call it before batches of these lanes are requested, because a lane that builds a batch has already left
        `position`.
        """
        tickets = self._request_peeks(position, lanes)
        answers = {lane: self._backend.answer(ticket) for lane, ticket in tickets.items()}
        for answer in answers.values():
            self.uncounted.update(answer.counts)
        return answers

    @_stopping_on_error
    def check_shards(self) -> None:
        """Raise `ShardError` if a shard of this epoch's batches has changed."""
        self._backend.check_shards()

    @_stopping_on_error
    def count(self, position: Position) -> dict[int, int]:
        """Return the number of batches left in each lane, by skipping them all."""
        tickets, counts = self._request_peeks(position, position.lanes), dict.fromkeys(position.lanes, 0)
        while tickets:
            for lane in list(tickets):
                answer = self._backend.answer(tickets.pop(lane))
                if answer.more:
                    counts[lane] += 1
                    tickets[lane] = self._backend.request(lane, answer.state, "skip", position.facts)
        self.restart()
        return counts

    def _request_peeks(self, position: Position, lanes: Iterable[int]) -> dict[int, Any]:
        backend = self._backend_at(position)
        return {lane: backend.request(lane, position.lanes[lane].state, "peek", position.facts) for lane in lanes}

    def _receive(self, position: Position, want: RequestKind, last: int = -1) -> Delivery:
        backend = self._backend_at(position)
        if not self._received:
            if not self._requests or self._slot < last:
                self._request(position, want, last, at_least=1)
            self._received.append(backend.answer(self._requests.popleft()))
        return self._received[0]

    def _request(self, position: Position, want: RequestKind, last: int = -1, at_least: int = 0) -> None:
        """Request this rank's next slots until the backend has as many requests as its capacity.

        At least `at_least` slots are requested, even if their lane may have no more batches. Slots to skip are
        requested only up to `last`, because later slots may not be skipped.
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

    def _backend_at(self, position: Position) -> Backend:
        """Return the running backend, which continues at `position`."""
        slot = position.own_slot
        if slot != self._slot or position.epoch != self._epoch:
            self.restart()
            self._slot, self._epoch = slot, position.epoch
        self._backend.start()
        return self._backend

    def _drop_requests(self) -> None:
        self._slot, self._received, self._requests, self._rebuild_tickets = -1, deque(), deque(), {}

    @_stopping_on_error
    def restart(self) -> None:
        """Drop all requests. The workers continue to run."""
        self._drop_requests()
        self._backend.forget_requests()

    def reset(self) -> None:
        """Drop all requests and end the workers."""
        self._drop_requests()
        self._backend.stop()
        if self._backend.fault and is_raised():
            self._is_fault_raised = True

    def restart_workers(self) -> None:
        """End the workers, and forget faults of batches yielded before."""
        self.reset()
        self._backend.fault, self._is_fault_raised = "", False

    def close(self) -> str:
        """End the workers and their host. They start again when needed.

        Returns the fault that the workers' last check of the shards found, or "" if an error has already reported it.
        """
        self.reset()
        self._backend.close()
        found, self._is_fault_raised = "" if self._is_fault_raised else self._backend.fault, True
        return found

    def numbers(self) -> dict[str, int]:
        """Return the backend's counters. Received batches count as ready, too."""
        numbers = self._backend.numbers()
        return {**numbers, "ready_batches": len(self._received) + numbers["ready_batches"]}


_exit_priority = 100


def _close_at_exit(owner: object, backend: Backend) -> None:
    """Close the backend when `owner` is collected, or at exit before Python joins children."""
    global _exit_priority
    _exit_priority += 1  # at exit, the newest is closed first
    Finalize(owner, backend.close, exitpriority=_exit_priority)
