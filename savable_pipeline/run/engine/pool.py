"""`Pool`: hands requests to worker processes, and replaces workers that die or hang.

A worker has up to `depth` requests queued, so that it is never idle between two; further requests wait here, in order.
A request goes to the worker that could begin it first. If another worker holds the lane, the lane moves: its state
goes with the request. So no request waits while a worker is free, whatever the numbers of lanes and workers:

    request for lane 4:   worker 0 holds it, busy for 80 ms more    worker 1 is idle; lane 4 moves to it: 2 ms, and
                                                                    10 ms to make the items of its open packs again
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import textwrap
import time
from collections import Counter
from typing import Any

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.errors import ShardError, WorkerError
from savable_pipeline.run.engine.blame import can_skip, where
from savable_pipeline.run.engine.last_look import tell
from savable_pipeline.run.engine.launchers import EXIT_WAIT_S, Launcher, wait_until_ended
from savable_pipeline.run.engine.messages import LOOK, STARTED, Delivery, Failure, Request, RequestKind
from savable_pipeline.run.engine.sealed_job import NOT_IMPORTED, UNGUARDED, UNGUARDED_CODE
from savable_pipeline.run.engine.worker_handle import LaneAssignment, PendingRequest, WorkerHandle
from savable_pipeline.run.engine.worker_main import answer_request
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.transport.status_page import STACK_SIGNAL, WorkerStatus
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

RESTARTS_OVER_ONE = 3  # restarts because of the same sample, or in a row before a worker has started
_START_S = 300.0  # timeout for a worker's start, with the imports of the user's modules
_STACK_S = 1.0  # timeout for a hanging worker to write its stack
_LOOK_S = 5.0  # timeout for workers to look at their shards
_LOOK_STEP_S = 0.001  # between two looks at whether they have
_MOVE_S = 0.002  # estimated time to build and restore a lane


class Pool:
    """Worker processes, and the requests to them.

    A worker that dies, or takes longer than `timeout` seconds over a batch, is replaced: its lanes are restored from
    the states that came with their last batches, and its open requests are sent again. This happens up to 3 times for
    one sample, and up to `max_restarts` times in all; then it is a `WorkerError`, unless the `on_error` of the stage at
    work, found from `last_stage`, allows the sample to be left out.
    """

    def __init__(
        self,
        launcher: Launcher,
        workers: Workers,
        last_stage: Stage,
        pinned: PinnedShards,
        *,
        restarts: int,
    ) -> None:
        self._launcher = launcher
        self._depth = workers.prefetch
        self._timeout = workers.timeout
        self._max_restarts = workers.max_restarts
        self._last_stage = last_stage
        self._pinned = pinned  # the shards that its workers read
        self._lanes: dict[int, LaneAssignment] = {}
        self._requests: dict[int, PendingRequest] = {}  # not answered yet, by ticket
        self._waiting: list[PendingRequest] = []  # those of them that no worker has
        self._ready: dict[int, Delivery | Failure] = {}
        self._deaths_over: Counter[Any] = Counter()
        self._ticket = STARTED
        self._owner = os.getpid()
        self._batch_s = 0.0  # average time to make a batch
        self.restarts = restarts  # in the run so far, with those of earlier pools
        self.moves = 0
        self._workers: list[WorkerHandle] = []
        self._by_number: dict[int, WorkerHandle] = {}
        self._started = 0
        self.fault = ""  # of batches that were given, which a worker reported that has ended since
        try:
            for _ in range(workers.count or 0):
                self._workers.append(self._new_worker())
        except BaseException:
            self.close()
            raise

    def _new_worker(self) -> WorkerHandle:
        self._started += 1
        worker = WorkerHandle(self._started, self._launcher, self._pinned)
        self._by_number[worker.number] = worker
        return worker

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that have started."""
        return [worker.pid for worker in self._workers if worker.pid]

    @property
    def ready(self) -> int:
        """The number of batches that have arrived and wait for `answer`."""
        return len(self._ready)

    @property
    def viewed(self) -> int:
        """The number of batches in shared memory that are viewed in this process: ready, or held by the trainer."""
        return sum(worker.segments.viewed for worker in self._workers)

    # Requests.

    def ask(self, lane: int, state: bytes, want: RequestKind = "batch") -> int:
        """Request the next batch of a lane whose position is `state`; returns a ticket for `answer`.

        Only the first request for a lane uses `state`; later ones continue after the lane's last request.
        """
        self._check_process()
        self._lanes.setdefault(lane, LaneAssignment(state))
        self._ticket += 1
        request = PendingRequest(self._ticket, lane, want)
        self._requests[request.ticket] = request
        self._waiting.append(request)
        self._assign()
        return request.ticket

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise WorkerError("this loader's workers belong to the process that forked this one: make a loader here")

    def _assign(self) -> None:
        """Send waiting requests, in order, to workers with room in their queues."""
        left = []
        for request in self._waiting:
            worker = self._choose(self._lanes[request.lane])
            if worker is None:
                left.append(request)
            else:
                self._send(request, worker)
        self._waiting = left

    def _choose(self, lane: LaneAssignment) -> WorkerHandle | None:
        """The worker that could begin a batch of this lane first; None if its queue is full."""
        if lane.sent:  # only the holder has the state after the batches that are under way
            assert lane.holder is not None
            return lane.holder if len(lane.holder.requests) < self._depth else None

        def begins(worker: WorkerHandle) -> tuple[float, bool, int]:
            busy = len(worker.requests) * self._batch_s
            if worker.requests:
                busy -= min(time.monotonic() - worker.since, self._batch_s)
            comes = lane.holder is not None and worker is not lane.holder
            return busy + (_MOVE_S + lane.rebuild_s if comes else 0.0), comes, len(worker.requests)

        first = min(self._workers, key=begins)
        return first if len(first.requests) < self._depth else None

    def _send(self, request: PendingRequest, worker: WorkerHandle) -> None:
        lane = self._lanes[request.lane]
        state = None
        if worker is not lane.holder:
            state = lane.state
            if lane.holder is not None:
                lane.holder.forget.append(request.lane)
                self.moves += 1
            lane.holder = worker
        if not worker.requests:
            worker.since = time.monotonic()
        lane.sent += 1
        worker.requests.append(request)
        held = {other for other in worker.forget if (at := self._lanes.get(other)) and at.holder is worker}
        forget = tuple(other for other in worker.forget if other not in held)
        worker.forget.clear()
        message = Request(request.ticket, request.lane, state, request.want, forget, tuple(lane.avoid))
        with contextlib.suppress(OSError):  # raised if the worker is dead, which `_hear` will notice
            worker.channel.send(pickle.dumps(message, protocol=5))

    def restart(self) -> None:
        """Forget all requests: answers that still arrive are dropped, and lanes begin at the states of new requests."""
        for number, lane in self._lanes.items():
            if lane.holder is not None:
                lane.holder.forget.append(number)
        self._waiting, self._ready, self._requests, self._lanes = [], {}, {}, {}

    # Answers.

    def answer(self, ticket: int) -> Delivery:
        """Wait for the answer to the request `ticket`. Raises the library's error of the worker, or `WorkerError`."""
        self._check_process()
        self._hear(0.0)
        waiting_since = time.monotonic()
        while ticket not in self._ready:
            self._hear(self._see_to_hanging(waiting_since))
        self.verify_given()
        found = self._ready.pop(ticket)
        if isinstance(found, Failure):
            raise found.raised()
        return found

    def verify_given(self) -> None:
        """Raise `ShardError` if a worker has reported that a shard of given batches changed. Asks no worker."""
        fault = self._reported()
        if fault:
            raise ShardError(fault, reason="changed shard")

    def look(self) -> None:
        """Make the workers look at their shards, and wait a few seconds at most. Raises as `verify_given`."""
        self._check_process()
        asked = [(worker, worker.status, worker.status.looks) for worker in self._workers if worker.pid]
        for worker, _, _ in asked:
            with contextlib.suppress(OSError):  # as in `_send`
                worker.channel.send(LOOK)
        deadline = time.monotonic() + _LOOK_S
        while any(
            worker in self._workers and not worker.gone and status.looks == before for worker, status, before in asked
        ):
            if time.monotonic() > deadline:
                break  # it still looks when it ends
            self._hear(_LOOK_STEP_S)
        self.verify_given()

    def _reported(self) -> str:
        return self.fault or next(filter(None, (worker.status.reported() for worker in self._workers)), "")

    def _hear(self, seconds: float) -> None:
        """Wait up to `seconds` for answers and ends of workers, handle them, and send waiting requests."""
        poll = select.poll()
        self._launcher.watch(poll)
        for worker in self._workers:
            if not worker.gone:
                worker.channel.watch(poll)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if not ready:
            return
        ended = ready.difference(worker.channel.fileno() for worker in self._workers)  # the launcher has news
        for worker in self._workers:
            if worker.channel.fileno() in ready and not self._take(worker):
                worker.gone = True  # it has closed its end of the channel: kill it, in case it still lives
                self._launcher.signal(worker.number, signal.SIGKILL)
        if ended:
            self._see_to_ended()
        self._assign()

    def _take(self, worker: WorkerHandle) -> bool:
        """Take the answers that a worker has sent; False if its end of the channel is closed."""
        try:
            worker.channel.flush()
            answers = worker.receive()
        except (EOFError, OSError):
            return False
        for ticket, found in answers:
            worker.since = time.monotonic()
            if isinstance(found, Failure) and ticket == STARTED and found.error is not None:
                raise found.error
            if ticket == STARTED:
                worker.pid = found
                del self._deaths_over["start"]  # only deaths in a row before a start count
                continue
            request = worker.requests.popleft()
            assert request.ticket == ticket
            if self._requests.pop(ticket, None) is None:  # of a pass that is over
                continue
            self._ready[ticket] = found
            lane = self._lanes[request.lane]
            lane.sent -= 1
            if request.want == "again":  # each has a lane of its own
                del self._lanes[request.lane]
            if isinstance(found, Delivery):
                lane.state, lane.rebuild_s = found.state, found.rebuild_s
                lane.avoid.clear()
                self._batch_s += (found.seconds - self._batch_s) / 8 if self._batch_s else found.seconds
        return True

    # Workers that die or hang.

    def _see_to_ended(self) -> None:
        not_started: set[int] = set()  # the exit codes of those that would end so again
        ended = [(self._by_number.pop(number, None), code) for number, code in self._launcher.ended()]
        for worker, code in ended:  # all are noted by now: whatever is raised here, `close` waits for none of them
            if worker is not None:
                while worker.channel.has_come() and self._take(worker):
                    pass  # take the answers it sent before it died
                if code > 0 and not worker.pid:
                    not_started.add(code)
                    continue
                how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                self._replace(worker, worker.hung or how)
        if not_started:
            raise WorkerError(UNGUARDED if UNGUARDED_CODE in not_started else NOT_IMPORTED)

    def _see_to_hanging(self, waiting_since: float) -> float:
        """Kill workers that exceed the timeout; return the seconds until the next one could.

        Time before `waiting_since` does not count. Raises `WorkerError` if a worker has not started in 300 s.
        """
        self._launcher.check()
        now = time.monotonic()
        soonest = min(self._timeout, EXIT_WAIT_S)
        for worker in list(self._workers):
            if worker.hung and now - worker.since > EXIT_WAIT_S:  # SIGKILL does not end it: it hangs in a system call
                del self._by_number[worker.number]
                self._replace(worker, worker.hung)
            if (worker.pid and not worker.requests) or worker.hung:
                continue
            limit = self._timeout if worker.pid else _START_S
            left = limit - (now - max(worker.since, waiting_since))
            if left > 0:
                soonest = min(soonest, left)
            elif worker.pid:
                self._ask_stack(worker)
                worker.hung = f"gave no batch in {limit:g} s and was killed"
                worker.since = now
                self._launcher.signal(worker.number, signal.SIGKILL)
            else:
                raise WorkerError(
                    f"a worker has not started in {limit:g} s: look for slow or blocking code that runs when the "
                    "pipeline's modules are imported"
                )
        return soonest

    def _ask_stack(self, worker: WorkerHandle) -> None:
        """Signal a hanging worker to write its stack to its status page, and wait up to a second for it."""
        self._launcher.signal(worker.number, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if "File" in (stack := worker.status.new_stack(answer_request.__name__)):
                worker.stack = stack
                return

    def _replace(self, worker: WorkerHandle, how: str) -> None:
        """Start another worker in place of one that ended, and send its requests again.

        Raises `WorkerError` if workers have been replaced too often.
        """
        status = worker.status.read()
        first = worker.requests[0] if worker.requests else None
        if first is not None and status.ticket == first.ticket:
            blamed: Any = status
            doing = f"while it made a batch of lane {first.lane}{where(self._last_stage, status)}"
        else:
            blamed = "start" if not worker.pid else None
            doing = "before it had started" if not worker.pid else "between two batches"
        message = f"worker {self._workers.index(worker)} (process {worker.pid}) {how}, {doing}"
        stack = worker.stack or worker.status.new_stack(answer_request.__name__)
        self.fault = self._reported()
        worker.close()
        self.restarts += 1
        self._deaths_over[blamed] += 1
        if blamed == "start" and self._deaths_over[blamed] > RESTARTS_OVER_ONE:
            raise WorkerError(
                f"{message}: worker number {self._deaths_over[blamed]} in a row to do so. The loader's state is whole: "
                f"save it or continue{_indented(stack)}"
            )
        if self.restarts > self._max_restarts:
            raise WorkerError(
                f"{message}: worker number {self.restarts} to end, of at most max_restarts={self._max_restarts}. The "
                f"loader's state is whole: save it or continue{_indented(stack)}"
            )
        log.warning("%s: replaced, restart %d of %d%s", message, self.restarts, self._max_restarts, _indented(stack))
        for lane in self._lanes.values():
            if lane.holder is worker:
                lane.holder, lane.sent = None, 0
        wanted = first is not None and first.ticket in self._requests
        if first is not None and wanted and blamed is status and self._deaths_over[status] > RESTARTS_OVER_ONE:
            self._give_up(first, status, f"{message}: death {self._deaths_over[status]} there{_indented(stack)}")
        again = [request for request in worker.requests if request.ticket in self._requests]
        self._waiting = sorted([*again, *self._waiting], key=lambda request: request.ticket)
        self._workers[self._workers.index(worker)] = self._new_worker()

    def _give_up(self, first: PendingRequest, status: WorkerStatus, message: str) -> None:
        """Leave out a sample that kills worker after worker, if `on_error` allows it; else fail the lane's requests."""
        lane = self._lanes[first.lane]
        error = WorkerError(message)
        if status.sample is not None and can_skip(self._last_stage, status, error):
            lane.avoid.append((status.sample, status.epoch))
            log.warning("%s: it is left out from now on", message)
            return
        failed = Failure(error, message)
        for request in [request for request in self._requests.values() if request.lane == first.lane]:
            self._ready[request.ticket] = failed
            del self._requests[request.ticket]
        self._waiting = [request for request in self._waiting if request.ticket in self._requests]

    def close(self) -> None:
        """End the workers, after a last look at their shards, and kill those that do not end.

        Safe to call twice; in a forked child it only closes the inherited descriptors.
        """
        for worker in self._workers:
            worker.channel.close()
        try:
            if os.getpid() == self._owner and self._by_number:
                looking = {worker.number for worker in self._workers if worker.pid and not worker.hung}
                wait_until_ended(self._launcher, set(self._by_number), looking)
        finally:
            if fault := self._reported():
                self.fault = fault
                tell(fault)
            for worker in self._workers:
                worker.close()
            self._workers, self._by_number = [], {}


def _indented(stack: str) -> str:
    return "\n" + textwrap.indent(stack.strip(), "    ") if stack.strip() else ""
