"""`PutOff`: delays handlers of signals that save a checkpoint until a step has ended.

A signal may arrive between any two instructions: while the optimizer is at work some of the weights have taken the step
and some have not, and no state of the data fits both.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class PutOff:
    """Calls a library's handlers of signals only outside of a step: at once, or in the next `run()`.

    Args:
        busy: Returns whether a step is in progress.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._waiting: list[Callable[[], Any]] = []

    def wrap(self, library: str) -> None:
        """Delay the handlers that a library has set, except the one of SIGTERM, which only notes the signal.

        Args:
            library: The first part of the names of the library's modules, such as "lightning".
        """
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
        """Call the waiting handlers. To be called when a step has ended."""
        while self._waiting:
            self._waiting.pop(0)()
