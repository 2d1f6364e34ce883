"""`Fetcher`: starts the process that fetches remote bytes, tells it what comes next, and waits for what it must."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from savable_pipeline.errors import RemoteError

WAITED, SOON, ANNOUNCED = 0, 1, 2  # how urgent a request is
PIECE = 8 << 20  # bytes asked a server for at once at most
RETRY_S = 120.0

# Finds this package's modules wherever it lies, without running its `__init__`: 0.2 s and 40 MB.
_START = """
import sys, types
package = types.ModuleType("savable_pipeline")
package.__path__ = [sys.argv[1]]
sys.modules["savable_pipeline"] = package
from savable_pipeline.fetcher_process import serve
serve(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
"""


class Fetcher:
    """A fetcher process of this process's own; it ends with `close`, or when this process does.

    Raises `RemoteError` if obstore is not installed.
    """

    def __init__(self, cache: Path, limit: int) -> None:
        if importlib.util.find_spec("obstore") is None:  # finds it without running it
            raise RemoteError("shards behind a URL need obstore: pip install 'savable_pipeline[cloud]'")
        self.owner = os.getpid()
        self.ended = False
        self._ticket = 0
        self._answers: dict[int, Any] = {}
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._connection, theirs = Pipe()
        fd = theirs.fileno()
        arguments = [str(Path(__file__).parent), str(fd), str(cache), str(limit), str(retry_s())]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *arguments], pass_fds=[fd], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def tell(self, urgency: int, kind: str, *arguments: Any) -> None:
        """Ask for something without waiting; if it fails, whoever needs it will ask again and hear why."""
        self._send(urgency, (0, kind, arguments))

    def ask(self, kind: str, *arguments: Any) -> Any:
        """Ask for something and wait. Raises `ShardError` or `RemoteError`."""
        return self.wait(self.begin(kind, *arguments))

    def begin(self, kind: str, *arguments: Any) -> int:
        """Ask for something that will be waited for; gives a ticket for `wait`."""
        with self._sending:
            self._ticket += 1
            ticket = self._ticket
        self._send(WAITED, (ticket, kind, arguments))
        return ticket

    def wait(self, ticket: int) -> Any:
        """The answer to what was asked with `ticket`. Raises `ShardError` or `RemoteError`."""
        with self._receiving:
            while ticket not in self._answers:
                number, answer = self._receive()
                self._answers[number] = answer
            answer = self._answers.pop(ticket)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _send(self, urgency: int, request: Any) -> None:
        with self._sending:
            try:
                self._connection.send((urgency, request))
            except OSError as error:
                raise self._ended() from error

    def _ended(self) -> RemoteError:
        self.ended = True
        code = self._process.wait()
        return RemoteError(
            f"the process that fetches remote shards ended with code {code}; the next call starts another"
        )

    def close(self) -> None:
        """End the process; in a forked child, only let go of what was inherited."""
        self._connection.close()
        if os.getpid() == self.owner:
            self._process.kill()
            self._process.wait()


def retry_s() -> float:
    """For how many seconds a failing request is tried again: `SAVABLE_RETRY_S`, or 120. Raises ValueError."""
    given = os.environ.get("SAVABLE_RETRY_S", "")
    try:
        seconds = float(given) if given else RETRY_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"SAVABLE_RETRY_S must be a number of seconds, not {given!r}")
    return seconds
