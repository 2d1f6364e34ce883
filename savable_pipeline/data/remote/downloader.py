"""`Downloader`: starts the process that downloads into the cache, and sends it requests with their urgency."""

from __future__ import annotations

import importlib.util
import os
import select
import threading
from enum import IntEnum
from pathlib import Path
from typing import Any

from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.errors import RemoteError

_RETRY_S = 120.0
_LEAST_PATIENCE_S, _LOOK_S = 1.0, 0.5  # with a process that may have been stopped


class Urgency(IntEnum):
    """When a request is served: the lower numbers first."""

    NOW = 0  # somebody waits for it
    SOON = 1  # it was given to the next stage
    LATER = 2  # it was announced


class Downloader:
    """A downloading process of this process's own. It ends with `close`, or when this process ends.

    Requests name a method of `download_process.Downloads`. Raises `RemoteError` if obstore is not installed.
    """

    def __init__(self, cache: Path, limit: int) -> None:
        if importlib.util.find_spec("obstore") is None:  # finds it without importing it
            raise RemoteError("shards behind a URL need obstore: pip install 'savable_pipeline[cloud]'")
        self.ended = self._was_stopped = False
        self._ticket = 0
        self._answers: dict[int, Any] = {}
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._child = ChildProcess("savable_pipeline.data.remote.download_process:serve", str(cache), limit, retry_s())
        self._patience_s = max(retry_s(), _LEAST_PATIENCE_S)
        self._child.bound_waits(self._patience_s)
        self.owner, self.pid = self._child.owner, self._child.process.pid

    def prefetch(self, urgency: Urgency, kind: str, *arguments: Any) -> None:
        """Sends a request without waiting. Should it fail, the call that needs its result raises the error."""
        self._send(urgency, (0, kind, arguments))

    def call(self, kind: str, *arguments: Any) -> Any:
        """The result of an urgent request. Raises `ShardError` or `RemoteError`."""
        return self.result(self.submit(kind, *arguments))

    def submit(self, kind: str, *arguments: Any) -> int:
        """Sends an urgent request; returns its ticket, for `result`."""
        with self._sending:
            self._ticket += 1
            ticket = self._ticket
        self._send(Urgency.NOW, (ticket, kind, arguments))
        return ticket

    def result(self, ticket: int) -> Any:
        """Waits for the result of a submitted request. Raises `ShardError` or `RemoteError`."""
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
            self._wait_for_answer()
            return self._child.connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _wait_for_answer(self) -> None:
        """Returns once an answer comes; ends a process that somebody has stopped for as long as requests are tried."""
        poll, stopped_s = select.poll(), 0.0
        poll.register(self._child.connection.fileno(), select.POLLIN)
        while not poll.poll(_LOOK_S * 1000):
            stopped_s = stopped_s + _LOOK_S if self._child.is_stopped() else 0.0
            if stopped_s >= self._patience_s:
                self._was_stopped = True
                self._child.kill()

    def _send(self, urgency: Urgency, request: Any) -> None:
        with self._sending:
            try:
                self._child.connection.send((int(urgency), request))
            except OSError as error:
                raise self._death() from error

    def _death(self) -> RemoteError:
        self._was_stopped = self._was_stopped or self._child.is_stopped()
        self.ended = True
        self._child.kill()  # one that was stopped amid a message has not ended
        stopped = f", since it had been stopped for {self._patience_s:g} s" if self._was_stopped else ""
        return RemoteError(
            f"the process that downloads remote shards ended with code {self._child.process.wait()}{stopped}"
        )

    def close(self) -> None:
        """Ends the process; in a fork of its owner, only closes what was inherited."""
        if os.getpid() != self.owner:
            self._child.close()
            return
        self.ended = True
        self._child.kill()  # a thread that waits for an answer is told, before the descriptor is another's
        with self._receiving, self._sending:
            self._child.close()


def retry_s() -> float:
    """For how many seconds a failing request is repeated: `SAVABLE_RETRY_S`, or 120. Raises ValueError."""
    given = os.environ.get("SAVABLE_RETRY_S", "")
    try:
        seconds = float(given) if given else _RETRY_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"SAVABLE_RETRY_S must be a number of seconds, not {given!r}")
    return seconds
