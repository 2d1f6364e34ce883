"""Ctrl-C before a chosen bytecode, delivered where Python next checks for signals, as for a user's Ctrl-C."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any


class PendingSignal:
    """A pending SIGINT, which Python delivers where it next checks for signals.

    An operator raises it instead of a call, because after a call Python would deliver it at once.
    """

    __neg__ = ctypes.pythonapi.PyErr_SetInterrupt
    __neg__.restype = None


class SignalAt:
    """A tracer that sends SIGINT before the `at`-th executed bytecode of some modules."""

    def __init__(self, at: int, modules: Sequence[ModuleType]) -> None:
        self.files = {module.__file__ for module in modules}
        self.left = at
        self.signal: Any = PendingSignal()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if not self.left:
                sys.settrace(None)  # the next call of this function would deliver the signal too
                self.sent = -self.signal
        return self


def count_until_interrupt(batches: Iterable[Any], most: int, tracer: Any = None) -> int:
    """Return how many batches, at most `most`, the body of a loop gets until Ctrl-C."""
    count, before = 0, sys.gettrace()
    try:
        sys.settrace(tracer)
        for _ in batches:
            count += 1
            if count == most:
                break
        sys.settrace(before)  # a pending signal is delivered here at the latest
    except KeyboardInterrupt:
        sys.settrace(before)
    return count
