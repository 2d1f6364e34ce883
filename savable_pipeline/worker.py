"""Worker processes: each hosts lanes and makes the batches it is asked for, in the order it is asked.

    trainer ── (ticket, lane, state or None, probe) ──▶ worker
            ◀── (ticket, Delivery) or (ticket, Failure) ──     the first, ticket 0, says that the worker has started

A request says which lane runs next; if the worker does not hold that lane, the request brings its state. A worker
thread reads requests all the time, so that neither side can wait for the other to read, and ends the process when
the trainer is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from savable_pipeline import errors, wire
from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.host import Delivery, LaneHost, Pipeline

_ORPHAN_CHECK_S = 2.0
_EXIT_WAIT_S = 2.0
_START_S = 300.0  # for a worker's imports, which do not count as the time that a batch takes
_STARTED = 0


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


class Pool:
    """Some worker processes and what they have been asked for."""

    def __init__(
        self, job: Job, *, num_workers: int, context: BaseContext, timeout: float, shared: dict[Any, Any]
    ) -> None:
        self._timeout = timeout
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._where: dict[int, int] = {}  # lane → the worker that holds it
        self._asked: dict[int, tuple[int, int]] = {}  # ticket → worker, lane
        self._ready: dict[int, Delivery | Failure] = {}
        self._starting = set(range(num_workers))
        self._ticket = _STARTED
        self._owner = os.getpid()
        inherited = shared if context.get_start_method() == "fork" else None
        try:
            for _ in range(num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(  # type: ignore[attr-defined]
                    target=_work,
                    args=(job, theirs, inherited),
                    daemon=True,
                    name="savable_pipeline worker",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        except BaseException:
            self.close()
            raise

    def ask(self, lane: int, state: bytes, *, probe: bool = False) -> int:
        """Ask for the next batch of a lane that stands at `state`; gives a ticket for `answer`.

        A lane that is asked for again goes on from where it is, and `state` is not looked at.
        """
        worker = self._where.get(lane)
        sent = state if worker is None else None
        if worker is None:
            worker = len(self._where) % len(self._processes)
            self._where[lane] = worker
        self._ticket += 1
        self._asked[self._ticket] = (worker, lane)
        with contextlib.suppress(OSError):  # a dead worker is an error when its answer is waited for, not before
            self._connections[worker].send((self._ticket, lane, sent, probe))
        return self._ticket

    def answer(self, ticket: int) -> Delivery:
        """Wait for what was asked with `ticket`. Raises the worker's error, or `WorkerError`."""
        if ticket in self._asked:
            worker, lane = self._asked[ticket]
            if not self._wait(_START_S, lambda: worker not in self._starting):
                raise WorkerError(
                    f"worker {worker} (process {self._processes[worker].pid}) has not started in {_START_S:.0f} s; "
                    "what do the modules of the pipeline do when they are imported?"
                )
            if not self._wait(self._timeout, lambda: ticket in self._ready):
                raise WorkerError(
                    f"worker {worker} gave no batch of lane {lane} in {self._timeout:g} s (process "
                    f"{self._processes[worker].pid}); if batches may take so long, give a larger timeout="
                )
        found = self._ready.pop(ticket)
        if isinstance(found, Failure):
            if found.error is not None:
                raise found.error from WorkerError(f"in a worker:\n{found.text}")
            raise WorkerError(f"in a worker:\n{found.text}")
        return found

    def _wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Receive until `done()` or the time is over. Raises `WorkerError` if a worker ended."""
        deadline = time.monotonic() + seconds
        while not done():
            ready = wait(self._connections, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for connection in ready:
                self._receive(self._connections.index(connection))  # type: ignore[arg-type]
        return True

    def _receive(self, worker: int) -> None:
        try:
            raw = self._connections[worker].recv_bytes()
        except (EOFError, OSError):  # the second: in the middle of an answer
            raise self._died(worker) from None
        ticket, found = wire.loads(raw)
        if ticket == _STARTED:
            self._starting.discard(worker)
        else:
            self._asked.pop(ticket)
            self._ready[ticket] = found

    def _died(self, worker: int) -> WorkerError:
        process = self._processes[worker]
        process.join(_EXIT_WAIT_S)
        code = process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return WorkerError(
            f"worker {worker} (process {process.pid}) ended {how}; the loader's state is whole: save it or go on"
        )

    def close(self) -> None:
        """End the workers; safe to call again, and in a forked child, where it only closes what was inherited."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                if os.getpid() == self._owner:
                    connection.send(None)  # closing is not enough: workers forked later hold a copy of our end
                connection.close()
        if os.getpid() == self._owner:
            deadline = time.monotonic() + _EXIT_WAIT_S
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode is None:
                    process.kill()
                    process.join()
                process.close()
        self._connections, self._processes = [], []


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
    raw = wire.dumps((_STARTED, None))
    while True:
        try:
            connection.send_bytes(raw)
        except OSError:
            os._exit(0)  # the trainer is gone or has closed us
        ticket, lane, state, probe = requests.get()
        try:
            raw = wire.dumps((ticket, host.deliver(lane, state, probe=probe)))
        except Exception as error:
            raw = wire.dumps((ticket, Failure.of(error)))


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
