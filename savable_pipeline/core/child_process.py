"""`ChildProcess`: a process that runs a function, connected to its parent.

    this process ── messages ──▶ child: function(connection, messages, *arguments)
                 ◀── answers ───

The child is started by exec, not by fork. So a trainer with threads or CUDA can start it, and the main module needs no
guard. It imports the package from where this process imported it, even if `sys.path` changed since. Ctrl-C does not
reach it. It ends when it is closed or when this process ends, which it checks by the parent's process ID: other
processes may have inherited this end of the connection, so end-of-file may never come.

Some processes are *replaced* when they are killed: a loader restarts its workers, but not the trainer. Reading past the
end of a memory-mapped file that was truncated kills the process (SIGBUS). So users' files are memory-mapped only in
processes that are replaced. Other processes read them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

_CHECK_S = 2.0  # interval at which a child checks that its parent is alive
_START_PROGRAM = """
import json, sys, types
package = types.ModuleType("savable_pipeline")
package.__path__ = [sys.argv[1]]
sys.modules["savable_pipeline"] = package
sys.path[:] = json.loads(sys.argv[2])
from savable_pipeline.core import child_process
child_process.run(*sys.argv[3:])
"""


class ChildProcess:
    """Process that runs `function` ("module:name") of this package.

    It calls `function(connection, messages, *arguments)`. `messages` yields the messages from this process. The
    function sends its answers over `connection`. The process is closed when this object is no longer used, and at exit.
    """

    def __init__(self, function: str, *arguments: str | float) -> None:
        self.owner = os.getpid()
        self.connection, child_end = Pipe()
        search_path = json.dumps([str(entry) for entry in sys.path])
        start = [str(Path(__file__).parents[1]), search_path, function, str(child_end.fileno()), str(self.owner)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START_PROGRAM, *start, json.dumps(arguments)],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_end.close()
        # This is a finalizer, not `__del__`. In a reference cycle, `__del__` of `connection` may run before ours, and
        # the descriptor number that it closed may then belong to another file.
        self._close_once = weakref.finalize(self, _close, self.connection, self.process, self.owner)

    def is_stopped(self) -> bool:
        """Return whether SIGSTOP or a debugger suspended the process; False without /proc."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return False
        return state in (b"T", b"t")

    def bound_waits(self, seconds: float) -> None:
        """Let a message that makes no progress for `seconds` raise BlockingIOError.

        The connection is unusable afterwards, because nothing can be sent after a partial message.
        """
        timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # seconds and microseconds
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, timeval)

    def kill(self) -> None:
        """Kill the process; `connection.recv` then raises EOFError."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Kill the process and close the connection.

        In a fork of the owner, only close the inherited connection.
        """
        self._close_once()


def _close(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the connection. Kill the process too, unless called in a fork of its owner."""
    connection.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def run(function: str, descriptor: str, parent: str, arguments: str) -> None:
    """Call `function` with the connection and the parent's messages, in the child.

    The child's standard output is redirected to standard error.
    """
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    connection = Connection(int(descriptor))
    target = getattr(importlib.import_module(module), name)
    target(connection, _messages(connection, int(parent)), *json.loads(arguments))


def _messages(connection: Connection, parent: int) -> Iterator[Any]:
    """Yield the parent's messages until the parent closes the connection or ends."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    with contextlib.suppress(EOFError, OSError):
        for ready in poll_while_parent_lives(poll, parent):
            if ready:
                yield connection.recv()


def poll_while_parent_lives(poll: select.poll, parent: int) -> Iterator[list[tuple[int, int]]]:
    """Yield ready descriptors and their events, or [] every 2 s, until `parent` ends."""
    while os.getppid() == parent:
        yield poll.poll(_CHECK_S * 1000)


_replaced = False


def become_replaced() -> None:
    """Declare that this process and its forks are restarted when they are killed."""
    global _replaced
    _replaced = True


def is_replaced() -> bool:
    """Return whether this process is restarted when it is killed."""
    return _replaced
