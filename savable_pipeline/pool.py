"""The trainer's side of its workers: starts them, asks them for batches, and replaces those that die."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle
from typing import Any

from savable_pipeline import wire
from savable_pipeline.errors import WorkerError
from savable_pipeline.host import Delivery, Pipeline
from savable_pipeline.segments import SegmentReader
from savable_pipeline.worker import STARTED, Failure, Job, work

log = logging.getLogger(__name__)

_EXIT_WAIT_S = 2.0
_START_S = 300.0  # for a worker's imports, which do not count as the time that a batch takes
_DEATHS_OVER_ONE, _DEATHS = 3, 100  # so many deaths of workers over one request, and in all, end the run


class _Worker:
    """One worker process, seen from the trainer."""

    def __init__(self, job: Job, context: BaseContext, inherited: dict[Any, Any] | None) -> None:
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=work, args=(job, theirs, inherited, os.getpid()), daemon=True, name="savable_pipeline worker"
        )
        self.process.start()
        theirs.close()
        self.started = False
        self.tickets: list[int] = []  # asked and not answered, in order
        self._segments = SegmentReader()

    def receive(self) -> tuple[int, Any] | None:
        """The next answer and its ticket; None if the worker ended."""
        try:
            ticket, inline, written = pickle.loads(self.connection.recv_bytes())
            fd = recv_handle(self.connection) if written is not None and written[1] else None
        except (EOFError, OSError):  # the second: in the middle of an answer
            return None
        if written is None:
            return ticket, wire.loads(*inline)
        segment, _, dropped, places = written
        if dropped is not None:
            self._segments.drop(dropped)
        if fd is not None:
            self._segments.add(segment, fd)
        *buffers, pickled = self._segments.read(segment, places)
        return ticket, wire.loads(pickled, buffers)

    def end(self, deadline: float) -> None:
        """See that the process is gone, by force after the deadline; whoever else may have waited for it."""
        with contextlib.suppress(ValueError, OSError):  # closed already, or reaped by another
            self.process.join(max(0.0, deadline - time.monotonic()))
            if self.process.exitcode is None:
                self.process.kill()
                self.process.join(_EXIT_WAIT_S)
            self.process.close()

    def how_it_ended(self) -> str:
        """In words."""
        self.process.join(_EXIT_WAIT_S)
        code = self.process.exitcode
        return f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"


class Pool:
    """Some worker processes and what they have been asked for.

    A worker that ends is replaced: its lanes are put to the states that came with their last batches, and what it was
    asked for is asked again. After 3 deaths over one request, or 100 in all, that is an error.
    """

    def __init__(
        self, job: Job, *, num_workers: int, context: BaseContext, timeout: float, shared: dict[Any, Any]
    ) -> None:
        self._job = job
        self._context = context
        self._inherited = shared if context.get_start_method() == "fork" else None
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._where: dict[int, int] = {}  # lane → the worker that holds it
        self._states: dict[int, bytes] = {}  # lane → after its batch that was received last
        self._asked: dict[int, _Request] = {}  # by ticket
        self._ready: dict[int, Delivery | Failure] = {}
        self._deaths = 0
        self._deaths_over: Counter[int] = Counter()  # by ticket; over none: by worker, below 0, since it last started
        self._ticket = STARTED
        self._owner = os.getpid()
        try:
            for _ in range(num_workers):
                self._workers.append(_Worker(job, context, self._inherited))
        except BaseException:
            self.close()
            raise

    def ask(self, lane: int, state: bytes, *, probe: bool = False) -> int:
        """Ask for the next batch of a lane that stands at `state`; gives a ticket for `answer`.

        A lane that is asked for again goes on from where it is, and `state` is not looked at.
        """
        if os.getpid() != self._owner:
            raise WorkerError("this loader's workers belong to the process that forked this one: make a loader here")
        new = lane not in self._where
        if new:
            self._where[lane] = len(self._where) % len(self._workers)
            self._states.setdefault(lane, state)  # of a replaced worker's lane we may know a later one
        self._ticket += 1
        self._asked[self._ticket] = _Request(lane, probe)
        self._send(self._ticket, with_state=new)
        return self._ticket

    def _send(self, ticket: int, *, with_state: bool) -> None:
        request = self._asked[ticket]
        worker = self._workers[self._where[request.lane]]
        worker.tickets.append(ticket)
        state = self._states[request.lane] if with_state else None
        with contextlib.suppress(OSError):  # a dead worker is noticed when its answer is waited for
            worker.connection.send((ticket, request.lane, state, request.probe))

    def answer(self, ticket: int) -> Delivery:
        """Wait for what was asked with `ticket`. Raises the worker's error, or `WorkerError`."""
        if ticket in self._asked:
            self._await(ticket)
        found = self._ready.pop(ticket)
        if isinstance(found, Failure):
            if found.error is not None:
                raise found.error from WorkerError(f"in a worker:\n{found.text}")
            raise WorkerError(f"in a worker:\n{found.text}")
        return found

    def _await(self, ticket: int) -> None:
        """Wait for an answer; the time that a worker takes to start does not count. Raises `WorkerError`."""
        lane = self._asked[ticket].lane
        while ticket not in self._ready:
            number = self._where[lane]
            worker = self._workers[number]
            started = worker.started
            if self._wait(self._timeout if started else _START_S, partial(self._news, ticket, number, worker, started)):
                continue
            what = f"worker {number} (process {worker.process.pid})"
            if not started:
                raise WorkerError(
                    f"{what} has not started in {_START_S:.0f} s; what do the modules of the pipeline do when they are "
                    "imported?"
                )
            raise WorkerError(
                f"{what} gave no batch of lane {lane} in {self._timeout:g} s; if batches may take so long, give a "
                "larger timeout="
            )

    def _news(self, ticket: int, number: int, worker: _Worker, started: bool) -> bool:
        """Whether the answer is there, or the worker has started, or has been replaced."""
        return ticket in self._ready or self._workers[number] is not worker or worker.started != started

    def _wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Receive until `done()` or the time is over. Raises `WorkerError` if a worker ended too often."""
        deadline = time.monotonic() + seconds
        while not done():
            connections = [worker.connection for worker in self._workers]
            ready = wait(connections, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for connection in ready:
                self._receive(connections.index(connection))  # type: ignore[arg-type]
        return True

    def _receive(self, number: int) -> None:
        worker = self._workers[number]
        answer = worker.receive()
        if answer is None:
            self._replace(number)
            return
        ticket, found = answer
        if ticket == STARTED:
            worker.started = True
            del self._deaths_over[-1 - number]
            return
        worker.tickets.remove(ticket)
        lane = self._asked.pop(ticket).lane
        self._ready[ticket] = found
        if isinstance(found, Delivery):
            self._states[lane] = found.state

    def _replace(self, number: int) -> None:
        """Start another worker in place of one that ended, and ask it for the same. Raises `WorkerError`."""
        old = self._workers[number]
        over = old.tickets[0] if old.started and old.tickets else -1 - number
        self._deaths += 1
        self._deaths_over[over] += 1
        what = f"while it made a batch of lane {self._asked[over].lane}" if over > 0 else "before or after its work"
        told = f"worker {number} (process {old.process.pid}) ended {old.how_it_ended()}, {what}"
        if self._deaths_over[over] >= _DEATHS_OVER_ONE or self._deaths >= _DEATHS:
            raise WorkerError(
                f"{told}: death {self._deaths_over[over]} there, {self._deaths} in all. The loader's state is whole: "
                "save it or go on"
            )
        log.warning("%s: replaced", told)
        self._workers[number] = _Worker(self._job, self._context, self._inherited)
        old.connection.close()
        old.end(time.monotonic())
        moved: set[int] = set()
        for again in old.tickets:
            lane = self._asked[again].lane
            self._send(again, with_state=lane not in moved)
            moved.add(lane)
        for lane in [lane for lane, where in self._where.items() if where == number and lane not in moved]:
            del self._where[lane]  # asked for again, it brings its state

    def close(self) -> None:
        """End the workers; safe to call again, and in a forked child, where it only closes what was inherited."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                if os.getpid() == self._owner:
                    worker.connection.send(None)  # closing is not enough: workers forked later hold a copy of our end
                worker.connection.close()
        if os.getpid() == self._owner:
            deadline = time.monotonic() + _EXIT_WAIT_S
            for worker in self._workers:
                worker.end(deadline)
        self._workers = []


@dataclass(frozen=True, slots=True)
class _Request:
    lane: int
    probe: bool


def check_picklable(pipeline: Pipeline, context: BaseContext) -> None:
    """Raise ValueError at once if workers could not be given this pipeline."""
    method = context.get_start_method()
    if method == "fork":
        return
    try:
        pickle.dumps(pipeline)
    except Exception as error:
        raise ValueError(
            f"the pipeline {getattr(pipeline, '__qualname__', pipeline)!r} cannot be sent to workers started by "
            f"{method}: {error}. Define it at the top of a module and bind its arguments with functools.partial, or "
            "use multiprocessing_context='fork'"
        ) from error


def get_context(method: str | BaseContext | None) -> BaseContext:
    """A start method's context; None is fork where there is one."""
    if isinstance(method, BaseContext):
        return method
    methods = multiprocessing.get_all_start_methods()
    if method is not None and method not in methods:
        raise ValueError(f"multiprocessing_context={method!r}: this platform has {', '.join(methods)}")
    return multiprocessing.get_context(method or ("fork" if "fork" in methods else "spawn"))
