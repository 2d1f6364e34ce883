"""`PutOff`: handlers of signals that save a checkpoint wait until a step has ended.

A signal comes between any two instructions: while the optimizer is at work some of the weights have taken the step and
some have not, and no state of the data fits to both.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class PutOff:
    """Calls a library's handlers of signals when `busy()` is over: at once, or in the next `run()`."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._waiting: list[Callable[[], Any]] = []

    def wrap(self, library: str) -> None:
        """Put off what the handlers do that `library` has set, all but SIGTERM's, which only notes it."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals() - {signal.SIGTERM}:
            handler = signal.getsignal(number)
            if callable(handler) and type(handler).__module__.startswith(f"{library}."):
                signal.signal(number, self._waits(handler))

    def _waits(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def put_off(number: int, frame: FrameType | None) -> None:
            self._waiting.append(lambda: handler(number, frame))
            if not self._busy():
                self.run()

        return put_off

    def run(self) -> None:
        """Call the handlers that wait. Call this where a step has ended."""
        while self._waiting:
            self._waiting.pop(0)()
