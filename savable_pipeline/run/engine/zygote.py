"""The zygote: a process without threads that forks workers and reports how they ended.

trainer ── ("begin", number) and the worker's end of a channel, or ("signal", number, signal) ──▶ zygote
        ◀── (OBEYED, 0), for each order ──
        ◀── (number, exit code) ──

It is a fork of the trainer ("fork") or a fresh interpreter. It builds the pipeline once, so that workers share its open
files and begin in milliseconds; but for "spawn", whose workers are forks of an interpreter that has imported nothing of
the user's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import traceback
from collections import deque
from typing import Any

from savable_pipeline.core.child_process import poll_while_parent_lives
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.sealed_job import SealedJob
from savable_pipeline.run.engine.worker_main import OpenedShards, be_one_thread, be_quiet, work
from savable_pipeline.run.transport.channel import Channel

OBEYED = 0  # in the place of a worker's number, which is 1 or more


def serve(job: SealedJob, end: int, trainer: int, *, builds: bool) -> None:
    """Run the zygote, to which a channel's end was passed, until the trainer closes the other one or ends."""
    be_quiet()
    be_one_thread()
    gc.freeze()  # a full collection writes to every object, which would copy all that is shared with the trainer
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
        self._pids: dict[int, int] = {}  # process ids by number of the worker
        self._orders: deque[tuple[bytes, list[int]]] = deque()  # received but not yet executed
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
            be_quiet()
            shared, pinned = self._opened.shared, self._opened.pinned
            LaneRunner(job, shared=shared, pinned=pinned).build(0, 0)
        gc.freeze()  # what workers share with this process

    def step(self, ready: list[tuple[int, int]]) -> None:
        """Handle orders and ended workers. Raises EOFError when the trainer has closed its end."""
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
        except SystemExit as exit_:  # raised by an encoder
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
