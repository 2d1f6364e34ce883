"""`Prefetcher`: requests the batches of a rank's next slots ahead of the trainer, from workers or from this process.

slot of this rank    4              6             8             10
                     handed out     requested     requested     not requested yet
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from multiprocessing.util import Finalize
from typing import Any

from savable_pipeline.errors import ShardError
from savable_pipeline.run.engine.connection import Host, is_raised
from savable_pipeline.run.engine.in_process import InProcess
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.engine.pool import Pool
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.settings import LoaderSettings

log = logging.getLogger(__name__)


class Prefetcher:
    """Hands out batches slot by slot.

    When asked for another slot than the next one, as at the start of an epoch, it forgets its requests, and the makers
    of batches begin there. After any error, including Ctrl-C, their position is unknown: they are ended.
    """

    def __init__(self, settings: LoaderSettings, local: LocalLanes) -> None:
        self._settings = settings
        self._local = local
        self._slot = -1  # the next to hand out; -1 before the first
        self._epoch = 0  # that it is of
        self._received: deque[Delivery] = deque()  # the batches of the slots from there on that have come
        self._again: dict[bytes, Any] = {}  # tickets of batches that are made again, by their `Remake`
        self._remakes = 0
        self._requests: deque[Any] = deque()  # tickets of the slots after these
        self._host: Host | None = None
        self._makers: Pool | InProcess | None = None
        self._end_host: Callable[[], Any] = _nothing
        self._end_makers: Callable[[], Any] = _nothing
        self._restarts = self._moves = 0  # of the pools that are gone
        self._fault = ""  # of batches that were given, as the makers that are gone found at last
        self._raised = False  # whether an error has reported it

    def next(self, position: Position, want: RequestKind = "batch", last: int = -1) -> Delivery:
        """Hand out the batch of this rank's next slot, and forget it. Waits for it.

        Slots up to `last` will be requested in the same way. Raises the stages' own errors, or `WorkerError`.
        """
        try:
            delivery = self._receive(position, want, last)
            self._received.popleft()
            self._slot += position.step
        except BaseException:
            self.reset()
            raise
        return delivery

    def peek(self, position: Position) -> Delivery:
        """The batch that `next` will hand out. Raises what `next` raises."""
        try:
            return self._receive(position, "batch")
        except BaseException:
            self.reset()
            raise

    def put_back(self, position: Position, delivery: Delivery) -> None:
        """Hand this batch out again, when asked for the next slot of `position`."""
        self._slot, self._epoch = position.own_slot, position.epoch
        self._received.appendleft(delivery)

    def again(self, position: Position, jobs: Iterable[bytes]) -> Delivery:
        """The batch of the first of these `Remake`s; others are requested with it. Raises what `next` raises."""
        try:
            makers = self._start(position)
            asked = list(islice(jobs, max(1, self._settings.workers.prefetch * makers.count)))
            for job in asked:
                if job not in self._again:
                    self._remakes += 1  # a lane for itself, that any worker may take
                    self._again[job] = makers.ask(
                        position.lane_count + self._remakes, job, "again", position.facts.of_next_epoch
                    )
            return makers.answer(self._again.pop(asked[0]))
        except BaseException:
            self.reset()
            raise

    def prefetch(self, position: Position) -> None:
        """Request this rank's next slots from the workers, `prefetch` for each of them."""
        if not self._settings.num_workers:
            return
        try:
            self._request(self._start(position), position, "batch")
        except BaseException:
            self.reset()
            raise

    def find_more(self, position: Position) -> dict[int, Delivery]:
        """Ask lanes, where it is not known, whether they have another batch. Returns their answers, by lane.

        Only before batches of these lanes are requested: a lane that is making one is elsewhere.
        """
        try:
            makers = self._start(position)
            tickets: dict[int, Any] = {
                lane: makers.ask(lane, position.lanes[lane].state, "peek", position.facts)
                for lane in position.unknown_lanes
            }
            return {lane: makers.answer(ticket) for lane, ticket in tickets.items()}
        except BaseException:
            self.reset()
            raise

    def verify_given(self) -> None:
        """Raise `ShardError` if a shard changed that given batches may be made of, as far as is known.

        Lanes in this process look; workers are not asked, but may have reported. Other threads may do this too.
        """
        if self._fault:
            raise ShardError(self._fault, reason="changed shard")
        makers = self._makers
        if makers is not None:
            makers.verify_delivered()

    def look(self) -> None:
        """The same, once the last batch of a pass is given: workers are asked."""
        if self._makers is None:
            self.verify_given()
            return
        try:
            self._makers.look()
        except BaseException:
            self.reset()
            raise

    def count(self, position: Position) -> dict[int, int]:
        """How many batches each of this rank's lanes has from here on, by passing over all of them, side by side."""
        try:
            makers = self._start(position)
            counts = dict.fromkeys(position.lanes, 0)
            tickets: dict[int, Any] = {
                lane: makers.ask(lane, at.state, "peek", position.facts) for lane, at in position.lanes.items()
            }
            while tickets:
                for lane, ticket in list(tickets.items()):
                    found = makers.answer(ticket)
                    del tickets[lane]
                    if found.more:
                        counts[lane] += 1
                        tickets[lane] = makers.ask(lane, found.state, "skip", position.facts)
            self.restart()
        except BaseException:
            self.reset()
            raise
        return counts

    def _receive(self, position: Position, want: RequestKind, last: int = -1) -> Delivery:
        makers = self._start(position)
        if not self._received:
            if not self._requests or self._slot < last:
                self._request(makers, position, want, last, at_least=1)
            self._received.append(makers.answer(self._requests.popleft()))
        return self._received[0]

    def _request(
        self, makers: Pool | InProcess, position: Position, want: RequestKind, last: int = -1, at_least: int = 0
    ) -> None:
        """Request this rank's next slots: `at_least` some, more as far as `prefetch` allows and the lanes have batches.

        Slots to skip are requested up to `last`: whether later slots are skipped is not known yet.
        """
        most = max(at_least, self._settings.workers.prefetch * makers.count)
        while len(self._requests) < most:
            ahead = len(self._requests) + len(self._received)
            slot = self._slot + ahead * position.step
            lane = slot % position.lane_count
            at = position.lanes[lane]
            unwanted = at.more is False or (position.final and slot >= position.end) or (want == "skip" and slot > last)
            if unwanted and len(self._requests) >= at_least:
                return
            self._requests.append(makers.ask(lane, at.state, want, position.facts))

    # Workers, or this process in their place.

    def begin_workers(self, own_lanes: int) -> None:
        """Begin what starts workers, if there are to be some. Raises ValueError for a pipeline they cannot be sent."""
        workers = self._settings.num_workers
        if workers > own_lanes:
            log.warning(
                "%d workers for the %d lanes of this rank: some stay idle. For a new run, use lanes=%d or more.",
                workers,
                own_lanes,
                workers * (self._settings.lanes // own_lanes),
            )
        if workers:
            self._begin_host()

    def _begin_host(self) -> Host:
        """Begin what begins workers: early, before this process has more threads or uses a GPU."""
        if self._host is None:
            ranks = self._settings.find_ranks()
            self._host = self._settings.workers.host(self._settings.job, (ranks.rank, ranks.world_size))
            self._end_host = _close_with(self, self._host)
        return self._host

    def _start(self, position: Position) -> Pool | InProcess:
        """The makers of batches, at `position`; started if need be."""
        slot = position.own_slot
        if slot != self._slot or position.epoch != self._epoch:
            self.restart()
            self._slot, self._epoch = slot, position.epoch
        if self._makers is None:
            self._makers = self._new_makers()
        return self._makers

    def _new_makers(self) -> Pool | InProcess:
        if not self._settings.num_workers:
            in_process = InProcess(self._local.runner)
            self._end_makers = _close_with(self, in_process)
            return in_process
        last_stage = self._local.last_stage  # opens, and on first use indexes, the shards once, before any worker does
        workers = replace(self._settings.workers, count=self._settings.num_workers)
        pool = Pool(self._begin_host(), workers, last_stage, self._local.pinned, restarts=self._restarts)
        self._end_makers = _close_with(self, pool)
        return pool

    def restart(self) -> None:
        """Forget all requests; the workers keep running."""
        self._slot, self._received, self._requests, self._again = -1, deque(), deque(), {}
        if self._makers is not None:
            try:
                self._makers.restart()
            except BaseException:
                self.reset()
                raise

    def reset(self) -> None:
        """End the workers and forget all requests."""
        makers, end = self._makers, self._end_makers
        self._makers, self._end_makers = None, _nothing
        self._slot, self._received, self._requests, self._again = -1, deque(), deque(), {}
        if makers is not None:
            self._restarts = makers.restarts
            self._moves += makers.moves
        end()
        if makers is not None and makers.fault:
            self._fault, self._raised = makers.fault, self._raised or is_raised()

    def begin_anew(self) -> None:
        """End the workers; batches given before no longer count."""
        self.reset()
        self._fault, self._raised = "", False

    def close(self) -> str:
        """End the workers and the process that starts them; they start again when needed.

        Returns what their last look at the shards has found and no error has reported; "" if nothing is wrong.
        """
        self.reset()
        end = self._end_host
        self._host, self._end_host = None, _nothing
        end()
        found, self._raised = "" if self._raised else self._fault, True
        return found

    def numbers(self) -> dict[str, int]:
        """Counters: ready batches, batches that the trainer views, worker restarts, moved lanes."""
        makers = self._makers
        return {
            "ready_batches": len(self._received) + (makers.ready if makers else 0),
            "viewed_batches": makers.viewed if makers else 0,
            "restarts": makers.restarts if makers else self._restarts,
            "num_workers": makers.count if makers else self._settings.num_workers,
            "moved_lanes": self._moves + (makers.moves if makers else 0),
        }


_priority = 100


def _close_with(owner: object, closed: Host | Pool | InProcess) -> Any:
    """Arrange for `closed.close()` when `owner` is garbage-collected, or at exit before Python joins its children."""
    global _priority
    _priority += 1  # at exit, the newest is closed first
    return Finalize(owner, closed.close, exitpriority=_priority)


def _nothing() -> None:
    pass
