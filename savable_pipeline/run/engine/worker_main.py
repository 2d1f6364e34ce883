"""Main functions of worker processes, and of the zygote, which forks them.

    trainer ── ("begin", number) and the worker's end of a channel, or ("signal", number, signal) ──▶ zygote
            ◀── (ORDER_DONE, 0) for each of these orders, and (number, exit code) of each ended worker ──

    trainer ── the run's shards, and a status page; then Requests ──▶ worker
            ◀── (STARTED, its process id), or why it cannot start; then (number, Delivery or Failure), … ──

The zygote has no threads. It is a fork of the trainer ("fork") or a fresh interpreter. It builds the pipeline once, so
that workers share its open files and start in milliseconds. For "spawn" it imports nothing of the user's instead.

A worker answers requests in order. A request has the lane's state unless the worker runs the lane already, at its last
position. A thread of the worker receives requests all the time. When the trainer has ended, this thread looks for
changed shards once more and ends the process:

    trainer closes its end of the channel ──▶ worker: checks, reports on its status page, ends

So a shard that was overwritten in the last second of a run is still reported.
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
from savable_pipeline.run.transport.status_page import StatusPage, start_request

T = TypeVar("T")
_IDLE_S = 1.0  # idle seconds after which a worker checks its shards
CHECK = b"check"  # sent to a worker instead of a request, to check its shards at once


@dataclass(frozen=True, slots=True)
class OpenedShards:
    """Files that a zygote has opened for its workers, and the shards in them."""

    shared: dict[Any, Any] = field(default_factory=dict)
    pinned: PinnedShards = field(default_factory=dict)

    def shared_for(self, pinned: PinnedShards) -> dict[Any, Any]:
        """Return the values that lanes share, or {} if the run has other shards.

        This may be, because the zygote opened the files earlier or later than the trainer.
        """
        same = all(pinned.get(name, shards) == shards for name, shards in self.pinned.items())
        return self.shared if same else {}


def run_worker(sealed: SealedJob, end: socket.socket, parent: int, opened: OpenedShards | None = None) -> NoReturn:
    """Run a worker process until its parent ends or the trainer closes the channel.

    `end` is the worker's end of the channel, and `opened` are the open files that it inherits.
    """
    ignore_job_signals()
    become_replaced()
    channel = Channel(end, blocking=True)
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
            job, shared=opened.shared_for(pinned) if opened else {}, status=status.words, pinned=pinned
        )
        while True:
            request = shard_check.next_request(requests)
            start_request(status.words, request.number)
            answers.segments.start_batch()
            use_one_thread()
            answers.send(request.number, answer_request(runner, request))
    except (EOFError, OSError):  # the trainer has closed its end
        if shard_check is not None:
            shard_check.end()
        os._exit(0)


class ShardCheck:
    """Looks for shards that changed after a worker read batches from them.

    It passes a message to `report`. It checks when the worker is idle, at the end of a finite epoch, on request, and
    before the worker ends. Any thread may call it. Only one thread at a time checks.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self.runner: LaneRunner | None = None  # None until the worker has created it
        self._report = report
        self._lock = threading.Lock()

    def check_shards(self) -> None:
        """Look for changed shards, and report the first one."""
        with self._lock:
            try:
                if self.runner is not None:
                    self.runner.verify_delivered()
            except Exception as error:
                self._report(str(error))

    def next_request(self, requests: queue.SimpleQueue[T]) -> T:
        """Return the next request.

        If none arrives for a second, look for changed shards in the meantime.
        """
        try:
            return requests.get(timeout=_IDLE_S)
        except queue.Empty:
            self.check_shards()
            return requests.get()

    def end(self) -> NoReturn:
        """Look for changed shards, and end the process."""
        try:
            self.check_shards()
        finally:
            os._exit(0)


def answer_request(runner: LaneRunner, request: Request) -> Delivery | Failure:
    """Return the requested batch, or the error that its stages raised.

    `Connection.stack` finds the thread of the batch by the name of this function.
    """
    try:
        for lane in request.forget:
            runner.forget(lane)
        if request.facts is not None:
            runner.facts = request.facts
        assert request.state is None or runner.facts.version == request.version
        return runner.deliver(request.lane, request.state, request.kind, request.avoid).with_encoded_ref
    except Exception as error:
        return Failure.of(error)


def ignore_job_signals() -> None:
    """Ignore signals that a scheduler sends to all processes of a job.

    The trainer decides what to do, such as to save, and then ends its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # an empty handler, because child programs would inherit SIG_IGN
        signal.signal(number, lambda *_: None)


def use_one_thread() -> None:
    """Let torch, if it is imported, use one thread.

    More threads per worker would be slower, and could change the bits of sums.
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
    """Put requests from the channel into the queue.

    End the process when the trainer closes its end of the channel or the `parent` process ends.
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


ORDER_DONE = 0  # the number in a zygote's answer to an order; numbers of workers start at 1


def run_zygote(job: SealedJob, end: int, trainer: int, *, builds: bool) -> None:
    """Run the zygote until the trainer ends or closes its end of the channel.

    `end` is the descriptor of the zygote's end, `trainer` a process ID, and `builds` whether the zygote builds the
    pipeline.
    """
    ignore_job_signals()
    use_one_thread()
    gc.freeze()  # a full collection writes to every object, which would copy all memory shared with the trainer
    zygote = _Zygote(job, Channel(socket.socket(fileno=end), blocking=True))
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
        # The end of a worker writes to this pipe, so that `poll` returns.
        pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        self._wake_reader, self._wake_writer = pipe
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, the signal would not write to the pipe
        self.poll = select.poll()
        self.poll.register(channel.fileno(), select.POLLIN)
        self.poll.register(self._wake_reader, select.POLLIN)

    def build(self) -> None:
        """Build lane 0, so that all workers inherit its open dataset."""
        with contextlib.suppress(Exception):  # a worker will raise the same error and report it
            job = self._job.open()
            ignore_job_signals()
            shared, pinned = self._opened.shared, self._opened.pinned
            LaneRunner(job, shared=shared, pinned=pinned).build(0, 0)
        gc.freeze()  # keeps the pages shared with workers

    def step(self, ready: list[tuple[int, int]]) -> None:
        """Execute orders that have arrived, and report ended workers.

        `ready` comes from `poll`. Raises EOFError when the trainer has closed its end of the channel.
        """
        for descriptor, _ in ready:
            if descriptor == self._wake_reader:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
            else:
                self._orders.extend(self._channel.receive())
                while self._orders:
                    message, descriptors = self._orders.popleft()
                    self._execute(pickle.loads(message), descriptors)
                    self._channel.send(pickle.dumps((ORDER_DONE, 0)))
        self._reap()

    def _execute(self, order: tuple[Any, ...], descriptors: list[int]) -> None:
        name, number, *signal_numbers = order
        if name == "begin":
            self._fork(number, socket.socket(fileno=descriptors[0]))
        elif number in self._pids:
            os.kill(self._pids[number], *signal_numbers)

    def _fork(self, number: int, end: socket.socket) -> None:
        """Fork a worker with this number, whose end of its channel is `end`."""
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
            for descriptor in (self._wake_reader, self._wake_writer, *(fd for _, fds in self._orders for fd in fds)):
                os.close(descriptor)
            run_worker(self._job, end, zygote, self._opened)
        except SystemExit as exit_:  # an encoder raised it
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Report the exit codes of workers that have ended."""
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
