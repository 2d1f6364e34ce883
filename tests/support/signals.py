"""Ctrl-C before a chosen bytecode, delivered where Python next looks for signals, as it is when a user presses it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any


class PendingSignal:
    """A SIGINT that has come, which Python delivers where it next looks for one, as it does with a user's Ctrl-C.

    It is raised by an operator in place of a call: behind a call Python would deliver it here.
    """

    __neg__ = ctypes.pythonapi.PyErr_SetInterrupt
    __neg__.restype = None


class SignalAt:
    """Has a SIGINT come before the `at`-th bytecode of these modules that is run."""

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
                sys.settrace(None)  # the next call of this function would deliver it too
                self.sent = -self.signal
        return self


def got(batches: Iterable[Any], most: int, tracer: Any = None) -> int:
    """How many batches the body of a loop got, at most so many, until Ctrl-C."""
    count, before = 0, sys.gettrace()
    try:
        sys.settrace(tracer)
        for _ in batches:
            count += 1
            if count == most:
                break
        sys.settrace(before)  # at the latest here a signal is delivered
    except KeyboardInterrupt:
        sys.settrace(before)
    return count
