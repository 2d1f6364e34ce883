"""Worker processes: each hosts lanes and makes the batches it is asked for, in the order it is asked.

    trainer ── (ticket, lane, state or None, probe) ──▶ worker
            ◀── (ticket, Delivery) or (ticket, Failure) ──     the first, ticket 0, says that the worker has started

A request says which lane runs next; if the worker does not hold that lane, the request brings its state. A large answer
lies in shared memory (`segments`), and the message only says where. A worker thread reads requests all the time, so
that neither side can wait for the other to read, and ends the process when the trainer is gone.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch

from savable_pipeline import errors, wire
from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.host import Delivery, LaneHost, Pipeline
from savable_pipeline.segments import SegmentReader, SegmentWriter

_ORPHAN_CHECK_S = 2.0
_EXIT_WAIT_S = 2.0
_START_S = 300.0  # for a worker's imports, which do not count as the time that a batch takes
_STARTED = 0
_DEATHS_OVER_ONE, _DEATHS = 3, 100  # so many deaths of workers over one request, and in all, end the run
_INLINE = 1 << 16  # answers of so many bytes go through the pipe itself

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What workers build their lanes with."""

    pipeline: Pipeline
    seed: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a worker's stages raised, as text: its own class may not exist or pickle in the trainer."""

    error: SavableError | None
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """With the library's own error that it is or is derived from, if it is one."""
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
        return cls(kinds[0](str(error)) if kinds else None, traceback.format_exc())


class _Worker:
    """One worker process, seen from the trainer."""

    def __init__(self, job: Job, context: BaseContext, inherited: dict[Any, Any] | None) -> None:
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_work, args=(job, theirs, inherited), daemon=True, name="savable_pipeline worker"
        )
        self.process.start()
        theirs.close()
        self.started = False
        self.tickets: list[int] = []  # asked and not answered, in order
        self._segments = SegmentReader()

    def receive(self) -> tuple[int, Any]:
        """The next answer and its ticket. Raises OSError or EOFError if the worker ended."""
        ticket, inline, written = pickle.loads(self.connection.recv_bytes())
        if written is None:
            return ticket, wire.loads(*inline)
        segment, new, dropped, places = written
        if dropped is not None:
            self._segments.drop(dropped)
        if new:
            self._segments.add(segment, recv_handle(self.connection))
        *buffers, pickled = self._segments.read(segment, places)
        return ticket, wire.loads(pickled, buffers)

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
        self._deaths_over: Counter[int] = Counter()  # by ticket; over none: since a worker last started
        self._ticket = _STARTED
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
        try:
            ticket, found = worker.receive()
        except (EOFError, OSError):  # the second: in the middle of an answer
            self._replace(number)
            return
        if ticket == _STARTED:
            worker.started = True
            del self._deaths_over[_STARTED]
            return
        worker.tickets.remove(ticket)
        lane = self._asked.pop(ticket).lane
        self._ready[ticket] = found
        if isinstance(found, Delivery):
            self._states[lane] = found.state

    def _replace(self, number: int) -> None:
        """Start another worker in place of one that ended, and ask it for the same. Raises `WorkerError`."""
        old = self._workers[number]
        over = old.tickets[0] if old.started and old.tickets else _STARTED
        self._deaths += 1
        self._deaths_over[over] += 1
        what = f"while it made a batch of lane {self._asked[over].lane}" if over else "before or after its work"
        told = f"worker {number} (process {old.process.pid}) ended {old.how_it_ended()}, {what}"
        if self._deaths_over[over] >= _DEATHS_OVER_ONE or self._deaths >= _DEATHS:
            raise WorkerError(
                f"{told}: death {self._deaths_over[over]} there, {self._deaths} in all. The loader's state is whole: "
                "save it or go on"
            )
        log.warning("%s: replaced", told)
        old.connection.close()
        old.process.close()
        self._workers[number] = _Worker(self._job, self._context, self._inherited)
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
                worker.process.join(max(0.0, deadline - time.monotonic()))
                if worker.process.exitcode is None:
                    worker.process.kill()
                    worker.process.join()
                worker.process.close()
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


def _work(job: Job, connection: Connection, shared: dict[Any, Any] | None) -> None:
    """What a worker process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer hears Ctrl-C and closes us
    torch.set_num_threads(1)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests), daemon=True).start()
    host = LaneHost(job.pipeline, seed=job.seed, lanes=job.lanes, shared={} if shared is None else shared)
    answers = _Answers(connection)
    answers.send(_STARTED, None)
    while True:
        ticket, lane, state, probe = requests.get()
        try:
            answers.send(ticket, host.deliver(lane, state, probe=probe))
        except Exception as error:
            answers.send(ticket, Failure.of(error))


class _Answers:
    """Sends answers to the trainer: small ones through the pipe, large ones through shared memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._segments = SegmentWriter()

    def send(self, ticket: int, answer: Delivery | Failure | None) -> None:
        """Send an answer; ends the process if the trainer is gone or has closed us."""
        pickled, buffers = wire.dumps(answer)
        if len(pickled) + sum(map(len, buffers)) <= _INLINE or not hasattr(os, "memfd_create"):
            self._post((ticket, (bytes(pickled), [bytearray(buffer) for buffer in buffers]), None))
            return
        segment, fd, dropped, places = self._segments.write([*buffers, pickled])
        self._post((ticket, None, (segment, fd is not None, dropped, places)))
        if fd is not None:
            with _gone_if_closed():
                send_handle(self._connection, fd, 0)
            os.close(fd)

    def _post(self, message: Any) -> None:
        raw = pickle.dumps(message, protocol=5)
        with _gone_if_closed():
            self._connection.send_bytes(raw)


@contextlib.contextmanager
def _gone_if_closed() -> Iterator[None]:
    try:
        yield
    except OSError:
        os._exit(0)


def _listen(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Pass requests on; end the process when the trainer closed the connection or is gone."""
    parent = os.getppid()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(_ORPHAN_CHECK_S):
                request = connection.recv()
                if request is None:
                    break
                requests.put(request)
    os._exit(0)
