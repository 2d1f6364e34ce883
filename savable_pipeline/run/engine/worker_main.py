"""Main functions of worker processes, and of the zygote, which forks them.

    trainer ── ("begin", number) and the worker's end of a channel, or ("signal", number, signal) ──▶ zygote
            ◀── (OBEYED, 0), for each order; (number, exit code) of each ended worker ──

    trainer ── the run's shards, and a status page; then Requests ──▶ worker
            ◀── (STARTED, its process id), or why it cannot start; then (number, Delivery or Failure), … ──

The zygote has no threads. It is a fork of the trainer ("fork") or a fresh interpreter. It builds the pipeline once, so
that workers share its open files and start in milliseconds. For "spawn" it imports nothing of the user's instead.

A worker answers requests in order. A request has the lane's state if the worker does not run the lane at its last
position. A thread receives requests all the time, and ends the process when the trainer has ended, after a last check
of the shards:

    trainer closes its end of the channel ──▶ worker: checks, reports on its status page, ends

So a batch of a shard that was overwritten in the last second of a run is still reported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import select
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from savable_pipeline.core import batch_memory
from savable_pipeline.core.child_process import become_replaced, poll_while_parent_lives
from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.named_object import imported
from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine.connection import STARTED
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, Failure, Request
from savable_pipeline.run.engine.sealed_job import SealedJob
from savable_pipeline.run.engine.shared_batches import AnswerSender
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.status_page import StatusPage, begin_request

T = TypeVar("T")
_IDLE_S = 1.0  # idle seconds after which a worker checks its shards
CHECK = b"check"  # sent to a worker instead of a request, to check its shards at once


@dataclass(frozen=True, slots=True)
class OpenedShards:
    """Files that a zygote has opened for its workers, and the shards that it found."""

    shared: dict[Any, Any] = field(default_factory=dict)
    pinned: PinnedShards = field(default_factory=dict)

    def usable(self, pinned: PinnedShards) -> dict[Any, Any]:
        """Return the shared values of lanes, or {} for other shards.

        The zygote opened the files before or after the trainer, and may have found other shards.
        """
        same = all(pinned.get(name, shards) == shards for name, shards in self.pinned.items())
        return self.shared if same else {}


def work(sealed: SealedJob, end: socket.socket, parent: int, opened: OpenedShards | None = None) -> NoReturn:
    """Run a worker process until its parent ends or the trainer closes the channel.

    `opened` are the inherited open files.
    """
    ignore_job_signals()
    become_replaced()
    channel = Channel(end, waits=True)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    shard_check: ShardCheck | None = None
    try:
        status, pinned = _first_message(channel, requests)
        shard_check = ShardCheck(status.report)
        threading.Thread(target=_listen, args=(channel, requests, parent, shard_check, status), daemon=True).start()
        answers = AnswerSender(channel)
        batch_memory.use(answers.segments)
        try:
            job = sealed.open()
        except WorkerError as error:
            answers.send(STARTED, Failure(error, ""))
            os._exit(1)
        ignore_job_signals()  # again, because the main module may have set its own handlers
        answers.send(STARTED, os.getpid())
        runner = shard_check.runner = LaneRunner(
            job, shared=opened.usable(pinned) if opened else {}, status=status.words, pinned=pinned
        )
        while True:
            request = shard_check.next_of(requests)
            begin_request(status.words, request.number)
            answers.segments.begin()
            use_one_thread()
            answers.send(request.number, answer_request(runner, request))
    except (EOFError, OSError):  # the trainer has closed its end
        if shard_check is not None:
            shard_check.end()
        os._exit(0)


class ShardCheck:
    """Checks the shards of a worker's lanes after their batches were delivered.

    It checks when the worker is idle, at the end of a finite epoch, on request, and before the worker ends. Any thread
    may call it, and one at a time checks. It reports what is wrong.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self.runner: LaneRunner | None = None  # None until the worker has one
        self._report = report
        self._lock = threading.Lock()

    def check_shards(self) -> None:
        """Check the shards of delivered batches, and report changed ones."""
        with self._lock:
            try:
                if self.runner is not None:
                    self.runner.verify_delivered()
            except Exception as error:
                self._report(str(error))

    def next_of(self, requests: queue.SimpleQueue[T]) -> T:
        """Return the next request, and check the shards if none arrives for a second."""
        try:
            return requests.get(timeout=_IDLE_S)
        except queue.Empty:
            self.check_shards()
            return requests.get()

    def end(self) -> NoReturn:
        """Check the shards, and end the process."""
        try:
            self.check_shards()
        finally:
            os._exit(0)


def answer_request(runner: LaneRunner, request: Request) -> Delivery | Failure:
    """Return the requested batch, or the error that its stages raised.

    `Connection.stack` looks for this name in stacks.
    """
    try:
        for lane in request.forget:
            runner.forget(lane)
        if request.facts is not None:
            runner.facts = request.facts
        assert request.state is None or runner.facts.version == request.version
        return runner.deliver(request.lane, request.state, request.want, request.avoid).sent
    except Exception as error:
        return Failure.of(error)


def ignore_job_signals() -> None:
    """Survive signals that are sent to all processes of a job.

    The trainer may want to save, and ends its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # an empty handler, because child programs would inherit SIG_IGN
        signal.signal(number, lambda *_: None)


def use_one_thread() -> None:
    """Set torch, if it is imported, to one thread.

    More per worker would be slower, and could change bits of sums.
    """
    torch = imported("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _first_message(channel: Channel, requests: queue.SimpleQueue[Request]) -> tuple[StatusPage, PinnedShards]:
    """Return the status page and the shards of the run from the trainer's first message.

    Requests that arrived with it go into the queue.
    """
    messages: list[tuple[bytes, list[int]]] = []
    while not messages:
        messages = channel.receive()
    status = StatusPage(messages[0][1][0])
    status.write_stacks()
    for message, _ in messages[1:]:
        requests.put(pickle.loads(message))
    return status, pickle.loads(messages[0][0])


def _listen(
    channel: Channel, requests: queue.SimpleQueue[Request], parent: int, shard_check: ShardCheck, status: StatusPage
) -> None:
    """Put requests into the queue.

    End the process when the trainer closes its end or the parent process ends.
    """
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        for ready in poll_while_parent_lives(poll, parent):
            if ready:
                for message, _ in channel.receive():
                    if message == CHECK:
                        shard_check.check_shards()
                        status.count_check()
                    else:
                        requests.put(pickle.loads(message))
    finally:
        shard_check.end()


OBEYED = 0  # takes the place of a worker's number, which is 1 or more


def run_zygote(job: SealedJob, end: int, trainer: int, *, builds: bool) -> None:
    """Run the zygote until the trainer ends or closes its end of the channel.

    `end` is the descriptor of the other end.
    """
    ignore_job_signals()
    use_one_thread()
    gc.freeze()  # a full collection writes to every object, which would copy all memory shared with the trainer
    zygote = _Zygote(job, Channel(socket.socket(fileno=end), waits=True))
    if builds:
        zygote.build()
    try:
        for ready in poll_while_parent_lives(zygote.poll, trainer):
            zygote.step(ready)
    except (EOFError, OSError):
        pass  # the trainer has ended, or has closed its end of the channel
    finally:
        zygote.end()


class _Zygote:
    """Forks workers and waits for them."""

    def __init__(self, job: SealedJob, channel: Channel) -> None:
        self._job = job
        self._channel = channel
        self._pids: dict[int, int] = {}  # process IDs by number of the worker
        self._orders: deque[tuple[bytes, list[int]]] = deque()  # orders that were not executed yet
        self._opened = OpenedShards()
        self._woken, woken_by = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(woken_by, False)
        os.set_blocking(self._woken, False)
        self._woken_by = woken_by
        signal.set_wakeup_fd(woken_by, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes `poll`
        self.poll = select.poll()
        self.poll.register(channel.fileno(), select.POLLIN)
        self.poll.register(self._woken, select.POLLIN)

    def build(self) -> None:
        """Build lane 0, so that all workers inherit its open dataset."""
        with contextlib.suppress(Exception):  # a worker will raise the same error and report it
            job = self._job.open()
            ignore_job_signals()
            shared, pinned = self._opened.shared, self._opened.pinned
            LaneRunner(job, shared=shared, pinned=pinned).build(0, 0)
        gc.freeze()  # keeps the pages shared with workers

    def step(self, ready: list[tuple[int, int]]) -> None:
        """Handle orders and ended workers.

        Raises EOFError when the trainer has closed its end.
        """
        for descriptor, _ in ready:
            if descriptor == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            else:
                self._orders.extend(self._channel.receive())
                while self._orders:
                    message, descriptors = self._orders.popleft()
                    self._obey(pickle.loads(message), descriptors)
                    self._channel.send(pickle.dumps((OBEYED, 0)))
        self._reap()

    def _obey(self, order: tuple[Any, ...], descriptors: list[int]) -> None:
        if order[0] == "begin":
            self._fork(order[1], socket.socket(fileno=descriptors[0]))
        elif order[1] in self._pids:
            os.kill(self._pids[order[1]], order[2])

    def _fork(self, number: int, end: socket.socket) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if pid:
            end.close()
            self._pids[number] = pid
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self._woken, self._woken_by, *(fd for _, fds in self._orders for fd in fds)):
                os.close(descriptor)
            work(self._job, end, zygote, self._opened)
        except SystemExit as exit_:  # an encoder raised it
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                self._channel.send(pickle.dumps((number, os.waitstatus_to_exitcode(status))))

    def end(self) -> None:
        """Kill all workers, wait for them, and exit."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        os._exit(0)
