"""How worker processes are started and how their end is noticed, never by forking a trainer that has threads or CUDA.

    "fork", "forkserver"   trainer ──begins──▶ server ──forks──▶ worker, worker, …
    "spawn"                trainer ──spawns──▶ worker, worker, …

The server is begun when the loader is made: forked from the trainer then, or as a fresh interpreter. It builds the
pipeline once, so that its workers, replacements too, share what is opened and start in milliseconds; else it only
forks, and says how each worker ended. All that a worker is given is its end of a `Channel`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import time
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Protocol

from savable_pipeline.channel import Channel
from savable_pipeline.errors import WorkerError
from savable_pipeline.fork_server import serve
from savable_pipeline.host import Pipeline
from savable_pipeline.worker import Job, work

EXIT_WAIT_S = 5.0


class Launcher(Protocol):
    """Starts workers, which it knows by number, and tells how they ended."""

    def start(self, number: int, end: socket.socket) -> None:
        """Start a worker that talks through `end`, which is closed here."""

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal to a worker, unless it has ended."""

    def watch(self, poll: select.poll) -> None:
        """Have `poll` notice when a worker ends; then it is time to call `ended`."""

    def ended(self) -> list[tuple[int, int]]:
        """The workers that have ended since the last call, with their exit codes: below 0, a signal's number."""

    def close(self) -> None:
        """Kill all workers, and wait until nothing is left."""


class ForkServer:
    """The trainer's side of a server process."""

    def __init__(self, job: Job, context: BaseContext) -> None:
        method = "fork" if context.get_start_method() == "fork" else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        self._job = job
        self._begin()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, waits=False)
        self._running: set[int] = set()
        self._process: BaseProcess = self._context.Process(
            target=serve, args=(self._job, theirs, os.getpid()), daemon=True, name="savable_pipeline server"
        )
        self._process.start()
        theirs.close()

    def start(self, number: int, end: socket.socket) -> None:
        """Have the server fork a worker."""
        with end:
            self._running.add(number)
            with contextlib.suppress(OSError):  # of a dead server: `ended` tells
                self._channel.send(pickle.dumps(("start", number)), [end.fileno()])

    def signal(self, number: int, signal_number: int) -> None:
        """Have the server send a signal."""
        with contextlib.suppress(OSError):
            self._channel.send(pickle.dumps(("signal", number, signal_number)))

    def watch(self, poll: select.poll) -> None:
        """The server's channel."""
        self._channel.watch(poll)

    def ended(self) -> list[tuple[int, int]]:
        """What the server has said; if it is gone itself, its workers are too, and another is begun."""
        try:
            self._channel.flush()
            told: list[tuple[int, int]] = [pickle.loads(message) for message, _ in self._channel.receive()]
        except (EOFError, OSError):
            told = [(number, -signal.SIGKILL) for number in self._running]
            self._end_server()
            self._begin()
        self._running.difference_update(number for number, _ in told)
        return told

    def close(self) -> None:
        """End the server, which kills its workers first."""
        self._end_server()

    def _end_server(self) -> None:
        self._channel.close()
        _end(self._process)


class Spawner:
    """Workers that are fresh interpreters, each a child of the trainer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._processes: dict[int, BaseProcess] = {}

    def start(self, number: int, end: socket.socket) -> None:
        """Spawn a worker."""
        with end:
            process = multiprocessing.get_context("spawn").Process(
                target=work, args=(self._job, end, os.getpid()), daemon=True, name=f"savable_pipeline worker {number}"
            )
            process.start()
            self._processes[number] = process

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal."""
        process = self._processes.get(number)
        if process is not None and process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal_number)

    def watch(self, poll: select.poll) -> None:
        """The processes' sentinels."""
        for process in self._processes.values():
            poll.register(process.sentinel, select.POLLIN)

    def ended(self) -> list[tuple[int, int]]:
        """Those that have an exit code."""
        found = [(number, process.exitcode) for number, process in self._processes.items()]
        told = [(number, code) for number, code in found if code is not None]
        for number, _ in told:
            _end(self._processes.pop(number))
        return told

    def close(self) -> None:
        """Kill them all."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            _end(process)
        self._processes.clear()


def _end(process: BaseProcess) -> None:
    """See that a process is gone, by force if it takes long; another may have waited for it."""
    with contextlib.suppress(ValueError, OSError):
        process.join(EXIT_WAIT_S)
        if process.exitcode is None:
            process.kill()
            process.join(EXIT_WAIT_S)
        process.close()


def launcher(job: Job, context: BaseContext) -> Launcher:
    """The way of starting workers that belongs to a start method."""
    return Spawner(job) if context.get_start_method() == "spawn" else ForkServer(job, context)


_priority = 100


def close_with(owner: object, closed: Any) -> Any:
    """Have `closed.close()` called when `owner` is collected, or before Python waits for its children at exit."""
    global _priority
    _priority += 1  # what came later is closed first
    return Finalize(owner, closed.close, exitpriority=_priority)


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


def wait_until_ended(made: Launcher, numbers: set[int]) -> None:
    """Kill some workers and wait for their end. Raises `WorkerError` if one stays."""
    for number in numbers:
        made.signal(number, signal.SIGKILL)
    deadline = time.monotonic() + EXIT_WAIT_S
    left = set(numbers)
    while left:
        poll = select.poll()
        made.watch(poll)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise WorkerError(f"{len(left)} workers did not end in {EXIT_WAIT_S:g} s after they were killed")
        left.difference_update(number for number, _ in made.ended())
