"""Errors of the user's own code: our frames above it do not help to find the fault."""

from __future__ import annotations

import bdb
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


def described(error: BaseException) -> str:
    """The class and the text of such an error, and what to do where a debugger has no terminal."""
    hint = ""
    if isinstance(error, bdb.BdbQuit):
        hint = "a debugger was ended, which has no terminal in a worker process: use num_workers=0"
    return f"{type(error).__name__}: {error}{hint}"
