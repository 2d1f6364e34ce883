"""The server process: forks workers when it is told to, and says how they ended.

trainer ── ("start", number) and the worker's end of a channel, or ("signal", number, signal) ──▶ server
        ◀── (number, exit code) ──
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import traceback
from collections import deque
from typing import Any

from savable_pipeline.channel import Channel
from savable_pipeline.host import LaneHost
from savable_pipeline.worker import ORPHAN_CHECK_S, Job, be_one_thread, be_quiet, work


def serve(job: Job, end: socket.socket, trainer: int) -> None:
    """What the server process runs: forks workers when it is told to, and says how they ended."""
    be_quiet()
    be_one_thread()
    server = _Server(job, Channel(end, waits=True))
    try:
        while os.getppid() == trainer:
            server.step()
    except (EOFError, OSError):
        pass  # the trainer is gone, or has closed us
    finally:
        server.end()


class _Server:
    """Forks workers and waits for them. Its state is which process is which worker."""

    def __init__(self, job: Job, channel: Channel) -> None:
        self._job = job
        self._channel = channel
        self._pids: dict[int, int] = {}  # by number
        self._orders: deque[tuple[bytes, list[int]]] = deque()  # heard and not yet obeyed
        self._shared: dict[Any, Any] = {}
        self._woken, woken_by = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(woken_by, False)
        os.set_blocking(self._woken, False)
        self._woken_by = woken_by
        signal.set_wakeup_fd(woken_by, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes `poll`
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._build()

    def _build(self) -> None:
        """Open once what all workers share."""
        with contextlib.suppress(Exception):  # a worker will meet it again and tell it
            LaneHost(self._job.pipeline, seed=self._job.seed, lanes=self._job.lanes, shared=self._shared).build(0, 0)

    def step(self) -> None:
        """Wait for orders or ended workers, and see to them. Raises EOFError when the trainer has closed us."""
        for descriptor, _ in self._poll.poll(ORPHAN_CHECK_S * 1000):
            if descriptor == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            else:
                self._orders.extend(self._channel.receive())
                while self._orders:
                    message, descriptors = self._orders.popleft()
                    self._obey(pickle.loads(message), descriptors)
        self._reap()

    def _obey(self, order: tuple[Any, ...], descriptors: list[int]) -> None:
        if order[0] == "start":
            self._fork(order[1], socket.socket(fileno=descriptors[0]))
        elif order[1] in self._pids:
            os.kill(self._pids[order[1]], order[2])

    def _fork(self, number: int, end: socket.socket) -> None:
        server = os.getpid()
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
            work(self._job, end, server, self._shared)
        except SystemExit as left:  # an encoder's
            code = left.code if isinstance(left.code, int) else 1
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
        """Kill all workers, wait for them, and leave."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        os._exit(0)
