"""The trainer's side of its workers: which one makes what, and what happens when one dies or hangs.

A worker has at most `depth` requests at a time, so that it never waits for the next; the others wait here, in order.
A request goes to the worker that would begin it first. If that is not the one that holds the lane, the lane moves, by
its state: so a lane is never waited for while a worker is free, whatever the numbers of lanes and workers.

    lane 4 asked for:   worker 0 holds it, busy for 80 ms more      worker 1 idle; lane 4 moves: +2 ms, +10 ms to make
                                                                    the items of its open packs again
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
from collections.abc import Callable
from typing import Any

from savable_pipeline.errors import WorkerError
from savable_pipeline.host import Delivery, Want
from savable_pipeline.launch import EXIT_WAIT_S, Launcher, wait_until_ended
from savable_pipeline.note import STACK_SIGNAL, Work
from savable_pipeline.pool_worker import Asked, LaneWork, Worker
from savable_pipeline.worker import STARTED, Failure, Request

log = logging.getLogger(__name__)

RESTARTS_OVER_ONE = 3  # workers that die over one sample are replaced so often
_START_S = 300.0  # for a worker's imports, which do not count as the time that a batch takes
_STACK_S = 1.0  # for a worker that hangs to write its stack
_MOVE_S = 0.002  # what it costs to build and restore a lane


class Pool:
    """Some worker processes and what they have been asked for.

    A worker that dies, or takes longer than `timeout` over a batch, is replaced: its lanes are put to the states that
    came with their last batches, and what it was asked for is asked again. Over one sample that happens 3 times, and
    `max_restarts` times in all; then it is an error. `describe` says in words what a worker's note means, `may_avoid`
    whether the sample in it may be left out instead.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        num_workers: int,
        depth: int,
        timeout: float,
        max_restarts: int,
        restarts: int,
        describe: Callable[[Work], str],
        may_avoid: Callable[[Work, WorkerError], bool],
    ) -> None:
        self._launcher = launcher
        self._depth = depth
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._describe = describe
        self._may_avoid = may_avoid
        self._lanes: dict[int, LaneWork] = {}
        self._asked: dict[int, Asked] = {}  # by ticket
        self._waiting: list[Asked] = []
        self._ready: dict[int, Delivery | Failure] = {}
        self._deaths_over: Counter[Any] = Counter()
        self._ticket = STARTED
        self._owner = os.getpid()
        self._batch_s = 0.0  # what a batch takes to make, on average
        self.restarts = restarts  # of the run so far, those of pools before this one too
        self.moves = 0
        self._workers: list[Worker] = []
        self._by_number: dict[int, Worker] = {}
        self._started = 0
        try:
            for _ in range(num_workers):
                self._workers.append(self._new_worker())
        except BaseException:
            self.close()
            raise

    def _new_worker(self) -> Worker:
        self._started += 1
        worker = Worker(self._started, self._launcher)
        self._by_number[worker.number] = worker
        return worker

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that have started."""
        return [worker.pid for worker in self._workers if worker.pid]

    @property
    def ready(self) -> int:
        """How many batches have come and were not asked after."""
        return len(self._ready)

    @property
    def viewed(self) -> int:
        """How many batches in shared memory are viewed here, by the trainer or ready for it."""
        return sum(worker.segments.viewed for worker in self._workers)

    # What is asked.

    def ask(self, lane: int, state: bytes, want: Want = "batch") -> int:
        """Ask for the next batch of a lane that stands at `state`; gives a ticket for `answer`.

        A lane that is asked for again goes on from where it is, and `state` is not looked at.
        """
        self._check_process()
        self._lanes.setdefault(lane, LaneWork(state))
        self._ticket += 1
        asked = Asked(self._ticket, lane, want)
        self._asked[asked.ticket] = asked
        self._waiting.append(asked)
        self._assign()
        return asked.ticket

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise WorkerError("this loader's workers belong to the process that forked this one: make a loader here")

    def _assign(self) -> None:
        """Send what waits, in order, as far as workers have room for it."""
        left = []
        for asked in self._waiting:
            worker = self._choose(self._lanes[asked.lane])
            if worker is None:
                left.append(asked)
            else:
                self._send(asked, worker)
        self._waiting = left

    def _choose(self, lane: LaneWork) -> Worker | None:
        """The worker that would begin a batch of this lane first; None if it must wait for one that has no room."""
        if lane.sent:  # only its holder can go on with it
            assert lane.holder is not None
            return lane.holder if len(lane.holder.asked) < self._depth else None

        def begins(worker: Worker) -> tuple[float, bool, int]:
            busy = len(worker.asked) * self._batch_s
            if worker.asked:
                busy -= min(time.monotonic() - worker.since, self._batch_s)
            comes = lane.holder is not None and worker is not lane.holder
            return busy + (_MOVE_S + lane.remake_s if comes else 0.0), comes, len(worker.asked)

        first = min(self._workers, key=begins)
        return first if len(first.asked) < self._depth else None

    def _send(self, asked: Asked, worker: Worker) -> None:
        lane = self._lanes[asked.lane]
        state = None
        if worker is not lane.holder:
            state = lane.state
            if lane.holder is not None:
                lane.holder.forget.append(asked.lane)
                self.moves += 1
            lane.holder = worker
        if not worker.asked:
            worker.since = time.monotonic()
        lane.sent += 1
        worker.asked.append(asked)
        forget = tuple(other for other in worker.forget if self._lanes[other].holder is not worker)
        worker.forget.clear()
        request = Request(asked.ticket, asked.lane, state, asked.want, forget, tuple(lane.avoid))
        with contextlib.suppress(OSError):  # it is dead, which `_hear` is told
            worker.channel.send(pickle.dumps(request, protocol=5))

    # What is answered.

    def answer(self, ticket: int) -> Delivery:
        """Wait for what was asked with `ticket`. Raises the worker's error, or `WorkerError`."""
        self._check_process()
        self._hear(0.0)
        came = time.monotonic()
        while ticket not in self._ready:
            self._hear(self._see_to_hanging(came))
        found = self._ready.pop(ticket)
        if isinstance(found, Failure):
            if found.error is not None:
                raise found.error from WorkerError(f"in a worker:\n{found.text}")
            raise WorkerError(f"in a worker:\n{found.text}")
        return found

    def _hear(self, seconds: float) -> None:
        """Wait so long at most for answers or ends of workers, take them, and hand out what waits."""
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
                worker.gone = True  # if it is not dead, it should be: it has let go of us
                self._launcher.signal(worker.number, signal.SIGKILL)
        if ended:
            self._see_to_ended()
        self._assign()

    def _take(self, worker: Worker) -> bool:
        """Take what a worker has answered; False if it is gone."""
        try:
            worker.channel.flush()
            answers = worker.receive()
        except (EOFError, OSError):
            return False
        for ticket, found in answers:
            worker.since = time.monotonic()
            if ticket == STARTED:
                worker.pid = found
                del self._deaths_over["start"]  # workers do start: only deaths in a row say otherwise
                continue
            asked = worker.asked.popleft()
            assert asked.ticket == ticket
            del self._asked[ticket]
            self._ready[ticket] = found
            lane = self._lanes[asked.lane]
            lane.sent -= 1
            if isinstance(found, Delivery):
                lane.state, lane.remake_s = found.state, found.remake_s
                lane.avoid.clear()
                self._batch_s += (found.seconds - self._batch_s) / 8 if self._batch_s else found.seconds
        return True

    # Workers that die or hang.

    def _see_to_ended(self) -> None:
        for number, code in self._launcher.ended():
            worker = self._by_number.pop(number, None)
            if worker is not None:
                while select.select([worker.channel], [], [], 0)[0] and self._take(worker):
                    pass  # what it had answered before
                how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                self._replace(worker, worker.hung or how)

    def _see_to_hanging(self, came: float) -> float:
        """Kill workers that take too long; gives the seconds until the next would. Raises `WorkerError`.

        Time before `came`, while no one waited, does not count.
        """
        now = time.monotonic()
        soonest = min(self._timeout, EXIT_WAIT_S)
        for worker in list(self._workers):
            if worker.hung and now - worker.since > EXIT_WAIT_S:  # not even a kill ends it: it hangs in the system
                del self._by_number[worker.number]
                self._replace(worker, worker.hung)
            if (worker.pid and not worker.asked) or worker.hung:
                continue
            limit = self._timeout if worker.pid else _START_S
            left = limit - (now - max(worker.since, came))
            if left > 0:
                soonest = min(soonest, left)
            elif worker.pid:
                self._ask_stack(worker)
                worker.hung = f"gave no batch in {limit:g} s and was killed"
                worker.since = now
                self._launcher.signal(worker.number, signal.SIGKILL)
            else:
                raise WorkerError(
                    f"a worker has not started in {limit:g} s; what do the modules of the pipeline do when they are "
                    "imported?"
                )
        return soonest

    def _ask_stack(self, worker: Worker) -> None:
        """Have a worker that hangs write its stack into its note, and wait a moment for it."""
        self._launcher.signal(worker.number, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if "File" in (stack := worker.note.new_stack()):
                worker.stack = stack
                return

    def _replace(self, worker: Worker, how: str) -> None:
        """Start another worker in place of one that ended, and ask for the same. Raises `WorkerError`."""
        work = worker.note.work()
        first = worker.asked[0] if worker.asked else None
        if first is not None and work.ticket == first.ticket:
            blamed: Any = work
            doing = f"while it made a batch of lane {first.lane}{self._describe(work)}"
        else:
            blamed = "start" if not worker.pid else None
            doing = "before it had started" if not worker.pid else "between two batches"
        told = f"worker {self._workers.index(worker)} (process {worker.pid}) {how}, {doing}"
        stack = worker.stack or worker.note.new_stack()
        worker.close()
        self.restarts += 1
        self._deaths_over[blamed] += 1
        if blamed == "start" and self._deaths_over[blamed] > RESTARTS_OVER_ONE:
            raise WorkerError(
                f"{told}: worker number {self._deaths_over[blamed]} in a row to do so. The loader's state is whole: "
                f"save it or go on{_indented(stack)}"
            )
        if self.restarts > self._max_restarts:
            raise WorkerError(
                f"{told}: worker number {self.restarts} to end, of at most max_restarts={self._max_restarts}. The "
                f"loader's state is whole: save it or go on{_indented(stack)}"
            )
        log.warning("%s: replaced, restart %d of %d%s", told, self.restarts, self._max_restarts, _indented(stack))
        for lane in self._lanes.values():
            if lane.holder is worker:
                lane.holder, lane.sent = None, 0
        if first is not None and blamed is work and self._deaths_over[work] > RESTARTS_OVER_ONE:
            self._give_up(first, work, f"{told}: death {self._deaths_over[work]} there{_indented(stack)}")
        again = [asked for asked in worker.asked if asked.ticket in self._asked]
        self._waiting = sorted([*again, *self._waiting], key=lambda asked: asked.ticket)
        self._workers[self._workers.index(worker)] = self._new_worker()

    def _give_up(self, first: Asked, work: Work, told: str) -> None:
        """A sample kills again and again: leave it out if the policy allows that, else fail what was asked."""
        lane = self._lanes[first.lane]
        error = WorkerError(told)
        if work.sample is not None and self._may_avoid(work, error):
            lane.avoid.append((work.sample, work.epoch))
            log.warning("%s: it is left out from now on", told)
            return
        failed = Failure(error, told)
        for asked in [asked for asked in self._asked.values() if asked.lane == first.lane]:
            self._ready[asked.ticket] = failed
            del self._asked[asked.ticket]
        self._waiting = [asked for asked in self._waiting if asked.ticket in self._asked]

    def close(self) -> None:
        """End the workers; safe to call again, and in a forked child, where it only closes what was inherited."""
        for worker in self._workers:
            worker.close()
        if os.getpid() == self._owner and self._by_number:
            wait_until_ended(self._launcher, set(self._by_number))
        self._workers, self._by_number = [], {}


def _indented(stack: str) -> str:
    return "\n" + textwrap.indent(stack.strip(), "    ") if stack.strip() else ""
