"""Start worker processes, and notice their end; a trainer that may have threads or CUDA is never forked.

    "fork", "forkserver"   trainer ──starts──▶ server ──forks──▶ worker, worker, …
    "spawn"                trainer ──spawns──▶ worker, worker, …

The server starts when the loader is made: forked from the trainer ("fork"), or as a fresh interpreter. It builds the
pipeline once, so that workers, replacements too, share its open files and start in milliseconds. After that it only
forks, and reports how each worker ended. A worker gets only its end of a `Channel`.
"""

from __future__ import annotations

import contextlib
import logging
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

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine.fork_server import OBEYED, serve
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.engine.sealed_job import PROCESS_NAME, FreshProcess, SealedJob, check_main_is_guarded
from savable_pipeline.run.engine.worker_main import work
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.stages.mapped_function import LAMBDA
from savable_pipeline.stages.pipeline import PipelineFunction

log = logging.getLogger(__name__)

EXIT_WAIT_S = 5.0
_LARGE_BYTES = 64 << 20  # of a pipeline, from which on it is better made where it is used
_LOOK_WAIT_S = 5.0  # for a last look at the shards, which takes milliseconds
_SILENT_S = 10.0  # after which a server that leaves an order unanswered has been stopped
_GLANCE_S = 5.0  # that count of the time between two looks: the trainer may have been stopped too


class Launcher(Protocol):
    """Starts workers, which have numbers, and reports how they ended."""

    def start(self, number: int, end: socket.socket) -> None:
        """Start a worker that sends and receives through `end`, and close `end` in this process."""

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal to a worker, unless it has ended."""

    def force_end(self) -> None:
        """Force the end of workers that survived a kill, by ending the process that controls them."""

    def check(self) -> None:
        """Force the end of that process if it no longer answers; called every few seconds of a wait."""

    def watch(self, poll: select.poll) -> None:
        """Register with `poll`, so that it wakes up when a worker has ended; then call `ended`."""

    def ended(self) -> list[tuple[int, int]]:
        """Number and exit code of each worker that ended since the last call; a negative code is a signal's number."""

    def close(self) -> None:
        """Kill all workers and wait for them."""


class ForkServer:
    """The trainer's side of a server process."""

    def __init__(self, job: LaneJob, context: BaseContext) -> None:
        forked = context.get_start_method() == "fork"
        self._kind: type[BaseProcess] = multiprocessing.get_context("fork").Process if forked else FreshProcess
        self._job = SealedJob(job)
        self._begin()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, waits=False)
        self._running: set[int] = set()
        self._unanswered = 0  # orders
        self._has_answered = False  # before that it may import for minutes
        self._silent_s, self._looked_at = 0.0, 0.0  # while orders are unanswered
        self._process = self._kind(
            target=serve, args=(self._job, theirs, os.getpid()), daemon=True, name=f"{PROCESS_NAME} server"
        )
        self._process.start()
        theirs.close()

    def start(self, number: int, end: socket.socket) -> None:
        """Tell the server to fork a worker."""
        with end:
            self._running.add(number)
            self._order(("start", number), [end.fileno()])

    def signal(self, number: int, signal_number: int) -> None:
        """Tell the server to send a signal."""
        self._order(("signal", number, signal_number), [])

    def _order(self, order: tuple[Any, ...], descriptors: list[int]) -> None:
        if not self._unanswered:
            self._silent_s, self._looked_at = 0.0, time.monotonic()
        self._unanswered += 1
        with contextlib.suppress(OSError):  # raised if the server is dead, which `ended` will notice
            self._channel.send(pickle.dumps(order), descriptors)

    def check(self) -> None:
        """Kill a server that has left an order unanswered for 10 s; `ended` then starts another."""
        now = time.monotonic()
        since, self._looked_at = now - self._looked_at, now
        if not self._unanswered or not self._has_answered:
            return
        self._silent_s += min(since, _GLANCE_S)
        if self._silent_s > _SILENT_S:
            self._silent_s = 0.0
            self.force_end()

    def watch(self, poll: select.poll) -> None:
        """Watch the server's channel."""
        self._channel.watch(poll)

    def ended(self) -> list[tuple[int, int]]:
        """The ends that the server reported; if the server itself died, all its workers, and start another server."""
        try:
            self._channel.flush()
            reports: list[tuple[int, int]] = [pickle.loads(message) for message, _ in self._channel.receive()]
            ended = [(number, code) for number, code in reports if number != OBEYED]
            self._count_answers(len(reports) - len(ended))
        except (EOFError, OSError):
            code = self._end_server()
            ended = [(number, code if code > 0 else -signal.SIGKILL) for number in self._running]
            self._begin()
        self._running.difference_update(number for number, _ in ended)
        return ended

    def _count_answers(self, answers: int) -> None:
        """Note that the server has answered this many orders."""
        if answers:
            self._unanswered -= answers
            self._has_answered = True
            self._silent_s, self._looked_at = 0.0, time.monotonic()

    def close(self) -> None:
        """End the server, which kills its workers."""
        self._end_server()

    def force_end(self) -> None:
        """Kill the server, and so its workers: one that somebody stopped (SIGSTOP) obeys no more."""
        log.warning("the process that starts workers does not answer; it is replaced")
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)

    def _end_server(self) -> int:
        """End the server. Returns its exit code."""
        self._channel.close()
        return _end(self._process)


class Spawner:
    """Starts workers as fresh interpreters, each a child of the trainer."""

    def force_end(self) -> None:
        """There is no process between the trainer and its workers."""

    check = force_end

    def __init__(self, job: LaneJob) -> None:
        self._job = SealedJob(job)
        self._processes: dict[int, BaseProcess] = {}

    def start(self, number: int, end: socket.socket) -> None:
        """Spawn a worker."""
        with end:
            process = FreshProcess(
                target=work, args=(self._job, end, os.getpid()), daemon=True, name=f"{PROCESS_NAME} worker {number}"
            )
            process.start()
            self._processes[number] = process

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal."""
        process = self._processes.get(number)
        if process is not None and process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal_number)

    def watch(self, poll: select.poll) -> None:
        """Watch the sentinel of each process."""
        for process in self._processes.values():
            poll.register(process.sentinel, select.POLLIN)

    def ended(self) -> list[tuple[int, int]]:
        """The processes that have an exit code."""
        found = [(number, process.exitcode) for number, process in self._processes.items()]
        ended = [(number, code) for number, code in found if code is not None]
        for number, _ in ended:
            _end(self._processes.pop(number))
        return ended

    def close(self) -> None:
        """Kill all workers and wait for them."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            _end(process)
        self._processes.clear()


def _end(process: BaseProcess) -> int:
    """Wait for a process, kill it if it takes longer than 5 s, and release it. Returns its exit code.

    0 if another process has waited for it.
    """
    code = None
    with contextlib.suppress(ValueError, OSError):
        process.join(EXIT_WAIT_S)
        if process.exitcode is None:
            process.kill()
            process.join(EXIT_WAIT_S)
        code = process.exitcode
        process.close()
    return code or 0


def launcher(job: LaneJob, context: BaseContext) -> Launcher:
    """The launcher for a start method of multiprocessing. Raises `WorkerError` in an unguarded main module."""
    check_main_is_guarded()
    return Spawner(job) if context.get_start_method() == "spawn" else ForkServer(job, context)


_priority = 100


def close_with(owner: object, closed: Any) -> Any:
    """Arrange for `closed.close()` when `owner` is garbage-collected, or at exit before Python joins its children."""
    global _priority
    _priority += 1  # at exit, the newest is closed first
    return Finalize(owner, closed.close, exitpriority=_priority)


def check_picklable(pipeline: PipelineFunction, context: BaseContext) -> None:
    """Raise ValueError if the start method pickles the pipeline and it cannot be pickled."""
    method = context.get_start_method()
    if method == "fork":
        return
    try:
        size = len(pickle.dumps(pipeline))
    except Exception as error:
        named = getattr(pipeline, "__qualname__", f"\n{pipeline!r}\n")
        lambdas = " (of a lambda: give it a name with def)" if LAMBDA in str(error) else ""
        cure = f"Define it{lambdas} at the top of a module and bind its arguments with functools.partial"
        raise ValueError(
            f"the pipeline {named} cannot be sent to workers started by {method}: {error}. {cure}, or use "
            "start_method='fork'"
        ) from error
    if size > _LARGE_BYTES:
        log.warning(
            "the pipeline takes %s, which each worker started by %s receives and keeps: make its encoder there, by "
            "a function, .encode(make)",
            human_bytes(size),
            method,
        )


def wait_until_ended(made: Launcher, numbers: set[int], by_themselves: set[int]) -> None:
    """Wait for the end of some workers; those that do not end `by_themselves` within 5 s, and all others, are killed.

    Raises `WorkerError` if one is still there 5 s later.
    """
    left, ending = set(numbers), numbers & by_themselves
    _kill(made, left - ending)
    deadline = time.monotonic() + (_LOOK_WAIT_S if ending else EXIT_WAIT_S)
    forced = False
    while left:
        poll = select.poll()
        made.watch(poll)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if ending:
                log.warning(
                    "%d workers did not end in %g s; they are killed before a last look", len(ending), _LOOK_WAIT_S
                )
                _kill(made, ending)
                ending, deadline = set(), time.monotonic() + EXIT_WAIT_S
                continue
            if not forced:
                made.force_end()
                forced, deadline = True, time.monotonic() + EXIT_WAIT_S
                continue
            raise WorkerError(f"{len(left)} workers did not end in {EXIT_WAIT_S:g} s after they were killed")
        gone = {number for number, _ in made.ended()}
        left -= gone
        ending -= gone


def _kill(made: Launcher, numbers: set[int]) -> None:
    for number in numbers:
        made.signal(number, signal.SIGKILL)
