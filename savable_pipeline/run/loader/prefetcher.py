"""`Prefetcher`: requests the batches of a rank's next slots from a `Backend`.

slot of this rank    4            6             8             10
                     returned     requested     requested     not requested yet
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
from savable_pipeline.run.engine.connection import is_raising_changed_shard
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
    """Returns batches slot by slot.

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
        self._is_error_raised = False  # whether the backend's `shard_error` was raised already
        self.uncounted: Counter[str] = Counter()  # counters that came without a batch, to be added to the next batch
        _close_at_exit(self, backend)

    @_stopping_on_error
    def next(self, position: Position, kind: RequestKind = "batch", last: int = -1) -> Delivery:
        """Wait for the batch of this rank's next slot, and return it.

        Slots up to `last` may be requested ahead with the same `kind`. Raises the stages' own errors, or `WorkerError`.
        """
        delivery = self._wait_for_next(position, kind, last)
        self._received.popleft()
        self._slot += position.step
        if self.uncounted and kind == "batch":
            self.uncounted.update(delivery.counts)
            delivery, self.uncounted = replace(delivery, counts=self.uncounted), Counter()
        return delivery

    @_stopping_on_error
    def peek(self, position: Position) -> Delivery:
        """Return the next batch without removing it. Raises what `next` raises."""
        return self._wait_for_next(position, "batch")

    def put_back(self, position: Position, delivery: Delivery) -> None:
        """Put a batch back, so that the next call for the slot of `position` returns it."""
        self._slot, self._epoch = position.own_slot, position.epoch
        self._received.appendleft(delivery)

    @_stopping_on_error
    def again(self, position: Position, requests: Iterable[bytes]) -> Delivery:
        """Wait for the batch of the first `RebuildRequest`, and return it.

        The requests are packed. The following ones are sent ahead. Raises what `next` raises.
        """
        backend, facts = self._backend_at(position), position.facts.of_next_epoch
        next_requests = list(islice(requests, max(1, backend.capacity)))
        for request in next_requests:
            if request not in self._rebuild_tickets:
                self._rebuild_count += 1
                # a lane number that no other request has, so that any worker may rebuild the batch
                unused_lane = position.lane_count + self._rebuild_count
                self._rebuild_tickets[request] = backend.request(unused_lane, request, "again", facts)
        return backend.answer(self._rebuild_tickets.pop(next_requests[0]))

    @_stopping_on_error
    def prefetch(self, position: Position) -> None:
        """Request batches of this rank's next slots, up to the capacity of the workers."""
        if self._backend.capacity:
            self._backend_at(position)
            self._request(position, "batch")

    @_stopping_on_error
    def query_has_next(self, position: Position, lanes: Iterable[int]) -> dict[int, Delivery]:
        """Return the answers of lanes about whether they have another batch.

        Only call it before batches of these lanes are requested, because then the lanes are no longer at `position`.
        """
        tickets = self._request_peeks(position, lanes)
        answers = {lane: self._backend.answer(ticket) for lane, ticket in tickets.items()}
        for answer in answers.values():
            self.uncounted.update(answer.counts)
        return answers

    @_stopping_on_error
    def check_shards(self) -> None:
        """Raise `ShardError` if a shard changed after a batch was read from it."""
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
        """Ask lanes whether they have another batch. Return the tickets of the requests, by lane."""
        backend = self._backend_at(position)
        return {lane: backend.request(lane, position.lanes[lane].state, "peek", position.facts) for lane in lanes}

    def _wait_for_next(self, position: Position, kind: RequestKind, last: int = -1) -> Delivery:
        """Wait for the batch of this rank's next slot, and return it without removing it."""
        backend = self._backend_at(position)
        if not self._received:
            if not self._requests or self._slot < last:
                self._request(position, kind, last, at_least=1)
            self._received.append(backend.answer(self._requests.popleft()))
        return self._received[0]

    def _request(self, position: Position, kind: RequestKind, last: int = -1, at_least: int = 0) -> None:
        """Request batches of this rank's next slots until the backend has as many requests as its capacity.

        At least `at_least` are requested, even if their lanes may have no more batches. With "skip", only slots up to
        `last` are requested, because later ones may not be skipped.
        """
        wanted_count = max(at_least, self._backend.capacity)
        while len(self._requests) < wanted_count:
            ahead = len(self._requests) + len(self._received)
            slot = self._slot + ahead * position.step
            lane = slot % position.lane_count
            state, more = position.lanes[lane]
            has_no_batch = more is False or (position.final and slot >= position.end)
            if (has_no_batch or (kind == "skip" and slot > last)) and len(self._requests) >= at_least:
                return
            self._requests.append(self._backend.request(lane, state, kind, position.facts))

    def _backend_at(self, position: Position) -> Backend:
        """Return the running backend, after dropping its requests if they are not for `position`."""
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
        if self._backend.shard_error and is_raising_changed_shard():
            self._is_error_raised = True

    def restart_workers(self) -> None:
        """End the workers, and forget changed shards.

        The run continues from a loaded state.
        """
        self.reset()
        self._backend.shard_error, self._is_error_raised = "", False

    def close(self) -> str:
        """End the workers and their host. They start again when needed.

        Returns the message about a changed shard that the workers found, or "" if it was raised already.
        """
        self.reset()
        self._backend.close()
        message = "" if self._is_error_raised else self._backend.shard_error
        self._is_error_raised = True
        return message

    def numbers(self) -> dict[str, int]:
        """Return the backend's counters. Batches received here count as ready, too."""
        numbers = self._backend.numbers()
        return {**numbers, "ready_batches": len(self._received) + numbers["ready_batches"]}


_exit_priority = 100  # of the newest backend; a higher priority is closed earlier


def _close_at_exit(owner: object, backend: Backend) -> None:
    """Close the backend when `owner` is collected, or at exit before Python joins children."""
    global _exit_priority
    _exit_priority += 1
    Finalize(owner, backend.close, exitpriority=_exit_priority)
