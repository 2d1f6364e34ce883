"""Child processes of tests, forked from a process that has already imported what they import.

    pytest ── descriptors, arguments ──▶ this server ── forks twice ──▶ child, whose parent is pytest
           ◀── pid ───

The tests start some 1,500 children, and each import takes 0.3 s. Processes that tests fork, and the fixture
`own_interpreters`, start theirs as users do.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from savable_pipeline.core import child_process

_MODULE = "savable_pipeline.data.remote.download_process"
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
_SET_CHILD_SUBREAPER = 36  # option of prctl: orphans below this process become its children


class ForkedProcess:
    """The methods of `subprocess.Popen` that are needed, for a child that another process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._lock = threading.Lock()

    returncode: int | None

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int | None:
        return self._waited(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _waited(self, how: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, how)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkedChildren:
    """A server, started at the first use, and a `Popen` that forks a child by it."""

    def __init__(self) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._server: child_process.ChildProcess | None = None
        self._on = sys.platform == "linux"

    def _begin(self) -> socket.socket:
        with self.off():
            self._server = child_process.ChildProcess("tests.support.forked_children:serve")
        return socket.socket(fileno=os.dup(self._server.connection.fileno()))

    def popen(self, command: list[str], *, pass_fds: list[int], **settings: Any) -> Any:
        if not self._on or os.getpid() != self._owner:
            return subprocess.Popen(command, pass_fds=pass_fds, **settings)
        *_, path, function, _, parent, arguments = command
        limits = [resource.getrlimit(limit) for limit in _LIMITS]
        request = [json.loads(path), function, parent, arguments, dict(os.environ), str(Path.cwd()), limits]
        raw = json.dumps(request).encode()
        with self._lock:
            if self._server is None:
                self._socket = self._begin()
            with _adopting():
                socket.send_fds(self._socket, [len(raw).to_bytes(8, "little")], [*pass_fds, 2])
                self._socket.sendall(raw)
                return ForkedProcess(int.from_bytes(self._socket.recv(8, socket.MSG_WAITALL), "little"))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Start children as separate interpreters in this context."""
        before, self._on = self._on, False
        yield
        self._on = before


@contextmanager
def forked_children() -> Iterator[ForkedChildren]:
    """Fork the children of this process in this context."""
    children = ForkedChildren()
    child_process.subprocess = SimpleNamespace(Popen=children.popen, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    yield children
    child_process.subprocess = subprocess  # type: ignore[attr-defined]


@contextmanager
def _adopting() -> Iterator[None]:
    """Make orphans below this process its children in this context."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(connection: Connection, messages: Iterator[Any]) -> None:
    """Run the server: fork children until pytest has ended."""
    importlib.import_module(_MODULE)
    requests = socket.socket(fileno=connection.fileno())
    while True:
        head, fds, _, _ = socket.recv_fds(requests, 8, 2)
        if not head:
            os._exit(0)
        raw = requests.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        requests.sendall(_fork(requests, json.loads(raw), *fds).to_bytes(8, "little"))
        for fd in fds:
            os.close(fd)


def _fork(requests: socket.socket, request: list[Any], connection: int, errors: int) -> int:
    """Fork a child, and return its pid. The child starts when its parent is pytest, after the process between ended."""
    (begin, go), (told, tell) = os.pipe(), os.pipe()
    between = os.fork()
    if not between:
        child = os.fork()
        if child:
            os.write(tell, child.to_bytes(8, "little"))
            os._exit(0)
        os.read(begin, 1)
        for fd in (begin, go, told, tell, requests.fileno()):
            os.close(fd)
        _be_child(*request, connection, errors)
    os.waitpid(between, 0)
    os.write(go, b"!")
    pid = int.from_bytes(os.read(told, 8), "little")
    for fd in (begin, go, told, tell):
        os.close(fd)
    return pid


def _be_child(
    path: list[str],
    function: str,
    parent: str,
    arguments: str,
    environ: dict[str, str],
    folder: str,
    limits: list[tuple[int, int]],
    connection: int,
    errors: int,
) -> None:
    """Run a function as a new interpreter would, and exit."""
    status = 1
    try:
        os.setsid()
        os.dup2(errors, 2)
        os.close(errors)
        os.chdir(folder)
        os.environ.clear()
        os.environ |= environ
        for limit, values in zip(_LIMITS, limits, strict=True):
            resource.setrlimit(limit, values)
        sys.path[:] = path
        child_process.run(function, str(connection), parent, arguments)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)
