"""Tracebacks that begin at the user's own code: our frames above it do not help to find the fault."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

_OURS = str(Path(__file__).parents[1]) + "/"
ErrorType = TypeVar("ErrorType", bound=BaseException)


def from_user_code(error: ErrorType) -> ErrorType:
    """Return the error without this package's frames at the start of its traceback; the deepest frame stays."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return error.with_traceback(trace)
