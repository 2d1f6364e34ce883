"""`Pool`: the `Backend` of workers, which replaces them when they die or hang.

The trainer's process has, for each lane (logical worker), the state that came with the lane's last batch. So any worker
can run any lane at any time, and a worker that dies takes nothing with it:

    request  puts a request into the queue of a worker, or lets it wait until a queue has room
    answer   polls the workers until the answer has come; in the meantime it sends requests, and replaces workers
    replace  the next request of each lane of the worker carries the lane's state; requests that were not answered are
             sent again, in their order

A worker has up to `prefetch` requests in its queue, so that it is never idle. A request goes to the worker that could
start it first. If another worker runs the lane, the lane moves, and its buffered items are rebuilt, which takes time:

    request for lane 4    worker 0 runs lane 4, and is busy for 80 ms    worker 1 is idle: lane 4 moves to it in 2 ms,
                                                                         and rebuilds the items of its open packs in 10
"""

from __future__ import annotations

import logging
import os
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.data.dataset.ref import tag_of
from savable_pipeline.errors import ShardError, WorkerError
from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.connection import END_WAIT_S, STARTED, Connection, Host, WorkerEnd, log_shard_error
from savable_pipeline.run.engine.messages import Delivery, Failure, Request, RequestKind, WorkerStatus
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

RESTARTS_OVER_ONE = 3  # restarts because of the same sample, or in a row before a worker has started
_START_S = 300.0  # timeout for a worker's start, with the imports of the user's modules
_CHECK_S = 5.0  # timeout for workers to check their shards
_CHECK_STEP_S = 0.001  # pause between two polls of workers that check their shards
_MOVE_S = 0.002  # estimated time to build and restore a lane


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that has not been answered."""

    ticket: int
    lane: int
    kind: RequestKind


@dataclass(slots=True)
class LaneAssignment:
    """A lane: the state that came with its last batch, and the worker that runs it."""

    state: bytes
    facts: RunFacts  # facts of the run, with which the lane is restored
    worker: PoolWorker | None = None
    sent_count: int = 0  # requests in that worker's queue
    rebuild_s: float = 0.0
    avoid: list[tuple[int, int]] = field(default_factory=list)  # samples to drop that are not in `state` yet


@dataclass(slots=True, eq=False)
class PoolWorker:
    """A worker's connection, its requests, and lanes that it may drop."""

    connection: Connection
    busy_since: float  # time of its last answer, or of the first request after that
    started: bool = False
    requests: deque[PendingRequest] = field(default_factory=deque)  # requests without an answer, in order
    sent_count: int = 0  # number of requests sent
    answered_count: int = 0  # number of requests answered
    forget: list[int] = field(default_factory=list)  # lanes that it may drop, because they moved to another worker
    version: int = NO_FACTS.version  # version of the facts that were last sent to it
    hang_message: str = ""  # set if it was killed because of the timeout
    stack: str = ""


class Pool(Backend):
    """Workers, and the requests to them.

    A worker that dies, or takes longer than `timeout` seconds for a batch, is replaced. Its lanes are restored from the
    states that came with their last batches, and its open requests are sent again. If workers die more than 3 times at
    one sample, the sample is skipped if `on_error` of the current stage allows it, and otherwise a `WorkerError` is
    raised, as it is after `max_restarts` replacements in all. `last_stage` returns the last stage of a lane, from which
    the current stage is found by its depth.
    """

    def __init__(
        self, open_host: Callable[[], Host], workers: Workers, last_stage: Callable[[], Stage], pinned: PinnedShards
    ) -> None:
        self._open_host = open_host
        self._worker_count = workers.count or 0
        self._prefetch = workers.prefetch
        self._timeout = workers.timeout
        self._max_restarts = workers.max_restarts
        self._find_last_stage = last_stage
        self._pinned = pinned  # shards that its workers read
        self._lanes: dict[int, LaneAssignment] = {}
        self._requests: dict[int, PendingRequest] = {}  # requests without an answer, by ticket
        self._waiting: list[PendingRequest] = []  # the requests that were not sent to a worker yet
        self._ready: dict[int, Delivery | Failure] = {}  # answers, by ticket
        self._deaths: Counter[WorkerStatus | str | None] = Counter()  # by cause, see `_describe_end`
        self._ticket = STARTED
        self._owner = os.getpid()
        self._batch_s = 0.0  # average time to build a batch
        self._restarts = self._moves = 0
        self._workers: list[PoolWorker] = []
        self._replaced_worker_error = ""
        self.shard_error = ""

    @cached_property
    def _host(self) -> Host:
        return self._open_host()

    def open(self) -> None:
        """Open the host."""
        assert self._host

    def start(self) -> None:
        """Start the workers unless they run."""
        if self._workers:
            return
        # Shards without an index are indexed once, before any worker reads them.
        self._last_stage = self._find_last_stage()
        self._deaths.clear()
        self._batch_s = 0.0
        try:
            self._start_missing()
        except BaseException:
            self.stop()
            raise

    def _new_worker(self) -> PoolWorker:
        return PoolWorker(self._host.start_worker(self._pinned), self._host.now())

    def _start_missing(self) -> bool:
        """Start the workers that are missing, and return whether there were any."""
        before = len(self._workers)
        while len(self._workers) < self._host.count(self._worker_count):
            self._workers.append(self._new_worker())
        return len(self._workers) > before

    @property
    def capacity(self) -> int:
        """Return `prefetch` requests per worker."""
        return self._prefetch * (len(self._workers) or self._worker_count)

    def numbers(self) -> dict[str, int]:
        """Return the counters of `Backend.numbers`.

        Batches are viewed until the trainer drops their tensors.
        """
        return {
            "ready_batches": len(self._ready),
            "viewed_batches": sum(worker.connection.viewed_batches for worker in self._workers),
            "restarts": self._restarts,
            "num_workers": len(self._workers) or self._worker_count,
            "moved_lanes": self._moves,
        }

    def request(self, lane: int, state: bytes, kind: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> int:
        """Send a request to a worker, or queue it until one has room."""
        _check_owner(self._owner)
        self._lanes.setdefault(lane, LaneAssignment(state, facts))
        self._ticket += 1
        request = PendingRequest(self._ticket, lane, kind)
        self._requests[request.ticket] = request
        self._waiting.append(request)
        self._assign()
        return request.ticket

    def _assign(self) -> None:
        """Send waiting requests, in order, to workers with room in their queues."""
        waiting = []
        for request in self._waiting:
            worker = self._choose_worker(self._lanes[request.lane])
            if worker is None:
                waiting.append(request)
            else:
                self._send(request, worker)
        self._waiting = waiting

    def _choose_worker(self, lane: LaneAssignment) -> PoolWorker | None:
        """Return the worker that could start the lane's next batch first, or None if its queue is full."""
        if lane.sent_count:  # only its current worker has the state after the requested batches
            assert lane.worker is not None
            return lane.worker if len(lane.worker.requests) < self._prefetch else None

        def start_time(worker: PoolWorker) -> tuple[float, bool, int]:
            """Return the seconds until a worker could start the batch.

            The other values decide between equal times.
            """
            wait_s = len(worker.requests) * self._batch_s
            if worker.requests:
                wait_s -= min(self._host.now() - worker.busy_since, self._batch_s)
            must_move = lane.worker is not None and worker is not lane.worker
            return wait_s + (_MOVE_S + lane.rebuild_s if must_move else 0.0), must_move, len(worker.requests)

        first = min(self._workers, key=start_time)
        return first if len(first.requests) < self._prefetch else None

    def _send(self, request: PendingRequest, worker: PoolWorker) -> None:
        """Send a request to a worker, with the lane's state if the lane moves to it."""
        lane = self._lanes[request.lane]
        state = facts = None
        if worker is not lane.worker:
            state = lane.state
            if (version := lane.facts.version) != worker.version:
                facts, worker.version = lane.facts, version
            if lane.worker is not None:
                lane.worker.forget.append(request.lane)
                self._moves += 1
            lane.worker = worker
        if not worker.requests:
            worker.busy_since = self._host.now()
        lane.sent_count += 1
        worker.sent_count += 1
        worker.requests.append(request)
        # A lane that has moved back to this worker must not be dropped.
        returned = {each for each in worker.forget if (its := self._lanes.get(each)) and its.worker is worker}
        forget = tuple(each for each in worker.forget if each not in returned)
        worker.forget.clear()
        number, avoid, version = worker.sent_count, tuple(lane.avoid), worker.version
        worker.connection.send(Request(number, request.lane, state, request.kind, forget, avoid, version, facts))

    def forget_requests(self) -> None:
        """Drop all requests. Answers that still arrive are ignored."""
        for number, lane in self._lanes.items():
            if lane.worker is not None:
                lane.worker.forget.append(number)
        self._waiting, self._ready, self._requests, self._lanes = [], {}, {}, {}

    def answer(self, ticket: int) -> Delivery:
        """Wait for a worker's answer.

        Raises the library's error of the worker, or `WorkerError`.
        """
        _check_owner(self._owner)
        self._poll(0.0)
        waiting_since = self._host.now()
        while ticket not in self._ready:
            self._poll(self._kill_hung_workers(waiting_since))
        _raise_if_changed(self._reported_error(self._workers))
        answer = self._ready.pop(ticket)
        if isinstance(answer, Failure):
            raise answer.raised()
        return answer

    def verify_delivered(self) -> None:
        """Raise `ShardError` if a worker has reported a changed shard."""
        _raise_if_changed(self.shard_error or self._reported_error(self._workers))

    def check_shards(self) -> None:
        """Have the workers look for changed shards, and wait a few seconds at most."""
        _check_owner(self._owner)
        asked = [worker for worker in self._workers if worker.started]
        for worker in asked:
            worker.connection.check_shards()
        deadline = self._host.now() + _CHECK_S
        while any(worker in self._workers and not worker.connection.has_checked() for worker in asked):
            if self._host.now() > deadline:
                break  # a worker that did not answer will check again when it ends
            self._poll(_CHECK_STEP_S)
        self.verify_delivered()

    def _reported_error(self, workers: Iterable[PoolWorker]) -> str:
        """Return the message about a changed shard that one of these or of the replaced workers reported, or ""."""
        reported = [worker.connection.shard_error() for worker in workers]
        return self._replaced_worker_error or next(filter(None, reported), "")

    def _poll(self, seconds: float) -> None:
        """Wait up to `seconds` for answers and ends of workers, handle them, and send requests."""
        ready, ended = self._host.wait(seconds)
        if self._start_missing() or ready or ended:
            for worker in self._workers:
                if worker.connection in ready:
                    self._receive_from(worker)
            if ended:
                self._handle_ended(ended)
            self._assign()

    def _receive_from(self, worker: PoolWorker) -> bool:
        """Handle the answers that a worker has sent. Return False if there were none."""
        try:
            received = worker.connection.receive()
        except EOFError:
            worker.connection.kill()  # in case it is still alive
            return False
        for number, answer in received:
            if number != STARTED:
                if number == worker.answered_count + 1:  # otherwise an answer was lost, and the worker will be replaced
                    self._add_answer(worker, answer)
            elif isinstance(answer, Failure) and answer.error is not None:
                raise answer.error
            elif not worker.started:
                worker.started, worker.busy_since = True, self._host.now()
                del self._deaths["start"]  # count only deaths in a row before a start
        return bool(received)

    def _add_answer(self, worker: PoolWorker, answer: Any) -> None:
        """Store a worker's answer to its oldest request, and the lane's state after it."""
        worker.busy_since = self._host.now()
        worker.answered_count += 1
        request = worker.requests.popleft()
        if self._requests.pop(request.ticket, None) is None:  # the request was dropped at the end of its epoch
            return
        self._ready[request.ticket] = answer
        lane = self._lanes[request.lane]
        lane.sent_count -= 1
        if request.kind == "again":  # each repeated batch has a lane of its own
            del self._lanes[request.lane]
        if isinstance(answer, Delivery):
            lane.state, lane.rebuild_s = answer.state, answer.rebuild_s
            lane.avoid.clear()
            # a moving average with a weight of 1/8 for the last batch
            self._batch_s += (answer.seconds - self._batch_s) / 8 if self._batch_s else answer.seconds

    def _handle_ended(self, ended: list[WorkerEnd]) -> None:
        """Replace ended workers, or raise the error with which each replacement would end too."""
        start_error = None
        for worker in list(self._workers):
            end = next((each for each in ended if each.worker is worker.connection), None)
            if end is None:
                continue
            while self._receive_from(worker):
                pass  # handle the answers that it sent before it died
            start_error = start_error or end.error
            if end.error is None:
                self._replace(worker, worker.hang_message or end.how, lost=end.lost and not worker.hang_message)
        if start_error is not None:
            raise start_error

    def _kill_hung_workers(self, waiting_since: float) -> float:
        """Kill workers that exceed the timeout, and return the seconds until the next one does.

        Time before `waiting_since` does not count. Raises `WorkerError` for a worker that has not started in 300 s, or
        that hangs and cannot be killed.
        """
        now = self._host.now()
        soonest = min(self._timeout, END_WAIT_S)
        for worker in list(self._workers):
            # SIGKILL does not end a process that hangs in a system call
            if worker.hang_message and now - worker.busy_since > END_WAIT_S:
                self._replace(worker, worker.hang_message)
            if (worker.started and not worker.requests) or worker.hang_message:
                continue
            limit = self._timeout if worker.started else _START_S
            remaining_s = limit - (now - max(worker.busy_since, waiting_since))
            if remaining_s > 0:
                soonest = min(soonest, remaining_s)
            elif not worker.started:
                raise WorkerError(
                    f"a worker did not start within {limit:g} s. Look for slow code at import of the modules of the "
                    "pipeline."
                )
            else:
                self._kill_hung_worker(worker, f"gave no batch in {limit:g} s")
        return soonest

    def _kill_hung_worker(self, worker: PoolWorker, how: str) -> None:
        """Kill a worker after reading its stack. Raises `WorkerError` if it cannot be killed."""
        worker.stack = worker.connection.stack()
        worker.busy_since = self._host.now()
        if not worker.connection.kill():
            (_, message), stack = self._describe_end(worker, how), _indented(worker.stack)
            raise WorkerError(
                f"{message}. Its thread cannot be killed and continues. Save the state and restart the process.{stack}"
            )
        worker.hang_message = f"{how} and was killed"

    def _describe_end(self, worker: PoolWorker, how: str) -> tuple[WorkerStatus | str | None, str]:
        """Return the cause of a worker's end, and a message.

        `how` says how it ended, such as "ended by signal SIGKILL". The cause is the worker's status if it was building
        a batch, "start" if it had not started, and else None.
        """
        status = worker.connection.working_on()
        if worker.requests and status.request == worker.answered_count + 1:
            first = worker.requests[0]
            # the ticket, unlike the number of a request, is the same on each worker that gets the request
            cause: WorkerStatus | str | None = status._replace(request=first.ticket)
            when = f"while it built a batch of lane {first.lane}{format_location(self._last_stage, status)}"
        else:
            cause = None if worker.started else "start"
            when = "between two batches" if worker.started else "before it had started"
        return cause, f"worker {self._workers.index(worker)} ({worker.connection.name}) {how}, {when}"

    def _replace(self, worker: PoolWorker, how: str, *, lost: bool = False) -> None:
        """Replace a worker that ended, if one is still needed, and send its requests again.

        Raises `WorkerError` if workers have been replaced too often. A worker that was `lost` does not count as one.
        """
        cause, message = self._describe_end(worker, how)
        stack = "" if lost else _indented(worker.stack or worker.connection.stack())
        self._replaced_worker_error = self._reported_error(self._workers)
        worker.connection.close()
        deaths = 0
        if lost:
            log.warning("%s. Other workers take over its lanes.", message)
        else:
            deaths = self._count_death(cause, message, stack)
        for lane in self._lanes.values():
            if lane.worker is worker:
                lane.worker, lane.sent_count = None, 0
        is_requested = worker.requests and worker.requests[0].ticket in self._requests
        if is_requested and isinstance(cause, WorkerStatus) and deaths > RESTARTS_OVER_ONE:
            self._skip_or_fail(worker.requests[0], cause, f"{message}: death {deaths} there{stack}")
        unanswered = [request for request in worker.requests if request.ticket in self._requests]
        self._waiting = sorted([*unanswered, *self._waiting], key=lambda request: request.ticket)
        index, is_needed = self._workers.index(worker), len(self._workers) <= self._host.count(self._worker_count)
        self._workers[index : index + 1] = [self._new_worker()] if is_needed else []

    def _count_death(self, cause: WorkerStatus | str | None, message: str, stack: str) -> int:
        """Return the number of workers that ended for this cause.

        Raises `WorkerError` if too many have ended.
        """
        self._restarts += 1
        self._deaths[cause] += 1
        deaths, advice = self._deaths[cause], f"The loader's state is intact: save it or continue.{stack}"
        if cause == "start" and deaths > RESTARTS_OVER_ONE:
            raise WorkerError(f"{message}, as did the {deaths - 1} workers before it. {advice}")
        if self._restarts > self._max_restarts:
            limit = f"more than max_restarts={self._max_restarts} workers ended"
            raise WorkerError(f"{message}: {limit}. {advice}")
        log.warning("%s. It was replaced, restart %d of %d.%s", message, self._restarts, self._max_restarts, stack)
        return deaths

    def _skip_or_fail(self, first: PendingRequest, status: WorkerStatus, message: str) -> None:
        """Skip a sample that kills workers if `on_error` allows it. Otherwise, fail all requests for its lane.

        `first` is the request for the batch of the sample, and `status` names the sample.
        """
        lane = self._lanes[first.lane]
        error = WorkerError(message)
        if status.sample is not None and can_skip(self._last_stage, status, error):
            lane.avoid.append((status.sample, status.epoch))
            log.warning("%s. The sample is skipped from now on.", message)
            return
        failed = Failure(error, message)
        for request in [request for request in self._requests.values() if request.lane == first.lane]:
            self._ready[request.ticket] = failed
            del self._requests[request.ticket]
        self._waiting = [request for request in self._waiting if request.ticket in self._requests]

    def stop(self) -> None:
        """End the workers after a last check of their shards, and kill those that hang.

        In a forked child, only close the inherited descriptors.
        """
        workers, self._workers = self._workers, []
        self.forget_requests()
        try:
            if workers and os.getpid() == self._owner:
                self._host.end_workers()
        finally:
            if message := self._reported_error(workers):
                self.shard_error, self._replaced_worker_error = message, ""
                log_shard_error(message)
            for worker in workers:
                worker.connection.close()

    def close(self) -> None:
        """Stop, and close the host."""
        self.stop()
        host: Host | None = self.__dict__.pop("_host", None)
        if host is not None and os.getpid() == self._owner:
            host.close()


def _check_owner(owner: int) -> None:
    if os.getpid() != owner:
        raise WorkerError("the workers of this loader belong to the parent process. Create a loader in this process.")


def _raise_if_changed(message: str) -> None:
    """Raise `ShardError` with a message about a changed shard, unless it is ""."""
    if message:
        raise ShardError(message, reason="changed shard")


def _indented(stack: str) -> str:
    return "\n" + textwrap.indent(stack.strip(), "    ") if stack.strip() else ""


def format_location(last: Stage, status: WorkerStatus) -> str:
    """Return ", in STAGE, shard …" for a message; "" if the status has no stage.

    The sample of the status is named, too, if there is one.
    """
    stage = _stage_at(last, status)
    if stage is None:
        return ""
    if status.sample is None or stage.info.encoder is None or stage.sources[0].info.encoder is not None:
        return f", in {type(stage).__name__}"
    sample = stage.sources[0].fetch((status.sample, status.epoch, 0))
    return f", in {type(stage).__name__}, shard {sample.shard}, key {sample.key!r}, {sample.location}"


def can_skip(last: Stage, status: WorkerStatus, error: WorkerError) -> bool:
    """Return whether the stage's `on_error` allows skipping the sample of a status."""
    stage = _stage_at(last, status)
    return stage is not None and hasattr(stage, "can_skip") and bool(stage.can_skip(error))


def _stage_at(last: Stage, status: WorkerStatus) -> Stage | None:
    """Return the stage of a status, found upstream of the `last` one, or None."""
    # The stages of several sources may have the same depth. The index of a sample has the tag of its source.
    tag = tag_of(status.sample or 0)
    stages = (stage for stage in upstream(last) if stage.info.depth == status.depth and tag in stage.info.tags)
    return next(stages, None)
