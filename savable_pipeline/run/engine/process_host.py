"""`ProcessHost` starts worker processes of this machine, by a zygote process.

    trainer ── starts, early ──▶ zygote ── forks ──▶ worker, worker, …     (worker_main.py)
            ◀────── a channel and a status page each, batches in shared memory ──────▶

The zygote starts when the loader is created, so a trainer that may have threads or CUDA is never forked. If the
zygote dies or is suspended, it is replaced, and all workers with it.

With the forkserver of the standard library and the same modules preloaded, a replaced worker takes 1.7 times as long to
its first batch, because each worker builds the pipeline again. It also rejects a pipeline that cannot be pickled.
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
import subprocess
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.wording import human_bytes
from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine import sealed_job
from savable_pipeline.run.engine.connection import END_WAIT_S, Host, WorkerAnswer, WorkerEnd
from savable_pipeline.run.engine.messages import LaneJob, Request, WorkerStatus
from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.engine.worker_main import CHECK, ORDER_DONE, answer_request, run_zygote
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.status_page import STACK_SIGNAL, StatusPage, read_status

log = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 20  # pickled pipelines above this size should be built in the workers
_CHECK_S = 5.0  # timeout for a last check of the shards, which takes milliseconds
_STACK_S = 1.0  # timeout for a hanging worker to write its stack
_SILENT_S = 10.0  # a zygote that does not answer an order for so long counts as suspended
_COUNTED_WAIT_S = 5.0  # most seconds that one `wait` adds to this silence: the trainer may have been suspended too


class ProcessConnection:
    """A worker process.

    It has a channel for requests and answers, a status page, and shared memory for large answers.
    """

    def __init__(self, number: int, end: socket.socket, pinned: PinnedShards, host: ProcessHost) -> None:
        self.number = number
        self.pid = 0  # 0 until its first message
        self.killed = self.ended = False
        self.descriptor = end.fileno()
        self.channel = Channel(end, blocking=False)
        self.is_closed = False  # whether either end of the channel is closed
        self._host = host
        self._status = StatusPage.create()
        self._answers = host.reader()
        self._checks_before = 0  # number of checks before the last `check_shards`
        self.channel.send(pickle.dumps(pinned), [self._status.descriptor])

    @property
    def name(self) -> str:
        """Return a name for messages."""
        return f"process {self.pid}"

    @property
    def viewed_batches(self) -> int:
        """Return the number of the worker's batches whose memory this process still views."""
        return self._answers.segments.viewed_batches

    def send(self, request: Request) -> None:
        """Send a request."""
        self._send(pickle.dumps(request, protocol=5))

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the worker is dead, which `receive` will notice
            self.channel.send(message)

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        """Return the answers that have arrived."""
        try:
            self.channel.flush()
            messages = self.channel.receive()
            # An ended worker may have sent more than one `receive` reads.
            while not messages and self.ended and self.channel.has_message():
                messages = self.channel.receive()
        except (EOFError, OSError) as error:
            self.is_closed = True
            raise EOFError from error
        answers = [self._answers.read(message, descriptors) for message, descriptors in messages]
        if answers and not self.pid and isinstance(process_id := answers[0][1], int):
            self.pid = process_id
        return answers

    def check_shards(self) -> None:
        """Ask the worker to look for changed shards."""
        self._checks_before = self._status.checks
        self._send(CHECK)

    def has_checked(self) -> bool:
        """Return whether the worker has done so since the last `check_shards`."""
        return self._status.checks != self._checks_before

    def shard_error(self) -> str:
        """Return the message about a changed shard that the worker reported, or ""."""
        return self._status.reported()

    def working_on(self) -> WorkerStatus:
        """Return the worker's status from its status page."""
        return WorkerStatus(*read_status(self._status.words))

    def stack(self) -> str:
        """Return the stack on the status page.

        A running worker is asked to write it first.
        """
        if not self.ended:
            self._host.signal(self.number, STACK_SIGNAL)
        deadline = time.monotonic() + (0.0 if self.ended else _STACK_S)
        while time.monotonic() < deadline and not self._status.has_stack(answer_request.__name__):
            time.sleep(0.02)
        return self._status.new_stack(answer_request.__name__)

    def kill(self) -> bool:
        """Send SIGKILL, which a process cannot prevent."""
        self.killed = True
        self._host.signal(self.number, signal.SIGKILL)
        return True

    def close(self) -> None:
        """Close the trainer's end of the channel and its view of the status page."""
        self._host.forget(self.number)
        self.channel.close()
        self._status.close()


class ProcessHost(Host):
    """Host whose zygote starts workers.

    Create it before this process has more threads or uses a GPU. `reader` creates the reader of a worker's answers.
    `wait` returns early when a descriptor in `wake_descriptors` can be read. Raises ValueError for a pipeline that
    cannot be sent to workers.
    """

    def __init__(
        self, job: LaneJob | sealed_job.SealedJob, method: str, reader: Callable[[], AnswerReader] = AnswerReader
    ) -> None:
        sealed_job.check_main_is_guarded()
        self._method = method
        self._job = _seal(job, method) if isinstance(job, LaneJob) else job
        self.reader = reader
        self.wake_descriptors: list[int] = []
        self._workers: dict[int, ProcessConnection] = {}  # running workers, by number
        self._started_count = 0
        self._start_zygote()

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, blocking=False)
        self._unanswered = 0  # number of orders without an answer
        self._has_answered = False  # before its first answer, it may import modules for minutes
        self._silent_s = 0.0  # seconds that the trainer has waited for an answer to an order
        uses_fork = self._method == "fork"
        kind: type[BaseProcess] = multiprocessing.get_context("fork").Process if uses_fork else SpawnProcess
        process = kind(
            target=partial(run_zygote, builds=self._method != "spawn"),
            args=(self._job, theirs.fileno(), os.getpid()),
            daemon=True,
            name=f"{sealed_job.PROCESS_NAME} zygote",
        )
        self._process: BaseProcess | subprocess.Popen[bytes] = process
        with theirs:
            if isinstance(process, SpawnProcess):
                self._process = sealed_job.start_interpreter(process, [theirs.fileno()])
            else:
                process.start()

    @property
    def pid(self) -> int:
        """Return the zygote's process ID."""
        assert self._process.pid is not None
        return self._process.pid

    def start_worker(self, pinned: PinnedShards) -> ProcessConnection:
        """Let the zygote fork a worker, and send it the worker's end of a channel."""
        self._started_count += 1
        number = self._started_count
        ours, theirs = socket.socketpair()
        with theirs:
            worker = self._workers[number] = ProcessConnection(number, ours, pinned, self)
            self._send_order(("begin", number), [theirs.fileno()])
        return worker

    def signal(self, number: int, signal_number: int) -> None:
        """Let the zygote send a signal to a worker, unless the worker has ended."""
        self._send_order(("signal", number, signal_number), [])

    def forget(self, number: int) -> None:
        """Stop waiting for a worker's end."""
        self._workers.pop(number, None)

    def _send_order(self, order: tuple[Any, ...], descriptors: list[int]) -> None:
        """Send an order to the zygote, as drawn in worker_main.py."""
        self._unanswered += 1
        with contextlib.suppress(OSError):  # the zygote is dead, which `pop_ended` will notice
            self._channel.send(pickle.dumps(order), descriptors)

    def wait(self, seconds: float) -> tuple[list[ProcessConnection], list[WorkerEnd]]:
        """Wait until a worker sends a message or ends.

        Return those with messages, and the ends.
        """
        poll, start = select.poll(), time.monotonic()
        self._channel.watch(poll)
        for descriptor in self.wake_descriptors:
            poll.register(descriptor, select.POLLIN)
        watched = [worker for worker in self._workers.values() if not worker.is_closed]
        for worker in watched:
            worker.channel.watch(poll)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if self._unanswered and self._has_answered:
            self._silent_s += min(time.monotonic() - start, _COUNTED_WAIT_S)
            if self._silent_s > _SILENT_S:
                self._silent_s = 0.0
                self._kill_zygote()
        with_messages = [worker for worker in watched if worker.descriptor in ready]
        return with_messages, self.pop_ended() if len(with_messages) < len(ready) else []

    def pop_ended(self) -> list[WorkerEnd]:
        """Return the ends of workers that the zygote has reported since the last call.

        If the zygote itself has ended, all workers have ended too, and a new zygote is started.
        """
        try:
            self._channel.flush()
            reports: list[tuple[int, int]] = [pickle.loads(message) for message, _ in self._channel.receive()]
            exit_codes = [(number, code) for number, code in reports if number != ORDER_DONE]
            if answers := len(reports) - len(exit_codes):
                self._unanswered -= answers
                self._has_answered, self._silent_s = True, 0.0
        except (EOFError, OSError):
            code = self._end_zygote()
            exit_codes = [(number, code if code > 0 else -signal.SIGKILL) for number in self._workers]
            self._start_zygote()
        ended = [(self._workers.pop(number, None), code) for number, code in exit_codes]
        return [_end_of(worker, code) for worker, code in ended if worker is not None]

    def _kill_zygote(self) -> None:
        """Kill the zygote and with it its workers, even if it was suspended by SIGSTOP."""
        log.warning("the process that starts workers does not answer. It was replaced.")
        os.kill(self.pid, signal.SIGKILL)

    def end_workers(self) -> None:
        """End started workers after a last check of their shards, and kill all others.

        Workers that remain after 5 s are killed. If some still remain 5 s later, the zygote is killed, and with it its
        workers. Raises `WorkerError` if they survive that too.
        """
        for worker in self._workers.values():
            worker.channel.close()
            worker.is_closed = True
            if worker.killed or not worker.pid:
                worker.kill()
        checking = [worker for worker in self._workers.values() if not worker.killed]
        if checking and not self._have_ended(_CHECK_S):
            log.warning("%d workers did not end within %g s and are killed", len(checking), _CHECK_S)
            for worker in checking:
                worker.kill()
        if not self._have_ended(END_WAIT_S):
            self._kill_zygote()
        if not self._have_ended(END_WAIT_S):
            raise WorkerError(
                f"{len(self._workers)} workers did not end within {END_WAIT_S:g} s of SIGKILL. Look for a hanging disk."
            )

    def _have_ended(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether all workers have ended."""
        deadline = time.monotonic() + seconds
        while self._workers and (remaining_s := deadline - time.monotonic()) > 0:
            self.wait(remaining_s)
        return not self._workers

    def close(self) -> None:
        """End the zygote, which kills its workers."""
        self._end_zygote()

    def _end_zygote(self) -> int:
        """End the zygote and return its exit code."""
        self._channel.close()
        return end_process(self._process)


def _end_of(worker: ProcessConnection, code: int) -> WorkerEnd:
    """Mark a worker as ended, and return its end. A negative `code` is the number of the signal that ended it."""
    worker.ended = True
    if code < 0:
        return WorkerEnd(worker, f"ended by signal {signal.Signals(-code).name}")
    start_error = (
        WorkerError(sealed_job.UNGUARDED if code == sealed_job.UNGUARDED_CODE else sealed_job.NOT_IMPORTED)
        if code and not worker.pid
        else None
    )
    return WorkerEnd(worker, f"ended with exit code {code}", start_error)


def end_process(process: BaseProcess | subprocess.Popen[bytes]) -> int:
    """End a process, release it, and return its exit code.

    It has 5 s to end by itself, before it is killed. The code is 0 if it is unknown, because another process has waited
    for this one.
    """
    code = None
    with contextlib.suppress(ValueError, OSError):
        code = _exit_code(process)
        if code is None:
            process.kill()
            code = _exit_code(process)
        if isinstance(process, BaseProcess):
            process.close()
        elif process.stdin is not None:
            process.stdin.close()
    return code or 0


def _exit_code(process: BaseProcess | subprocess.Popen[bytes]) -> int | None:
    """Wait up to 5 s for a process, and return its exit code, or None if it has not ended."""
    if isinstance(process, BaseProcess):
        process.join(END_WAIT_S)
        return process.exitcode
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(END_WAIT_S)
    return None


def _seal(job: LaneJob, method: str) -> sealed_job.SealedJob:
    """Seal a job for a start method. Raises ValueError if it must be pickled and cannot be."""
    if method == "fork":
        return sealed_job.SealedJob(job)
    raw = sealed_job.pickled_job(job, f"workers started by {method}", ", or use start_method='fork'")
    if len(raw) > _LARGE_BYTES:
        log.warning(
            "the pickled pipeline has %s, and each worker started by %s gets a copy. Pass a function that creates "
            "the encoder: .encode(make).",
            *(human_bytes(len(raw)), method),
        )
    return sealed_job.SealedJob(None, raw, sealed_job.main_module_data())
