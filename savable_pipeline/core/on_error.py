"""The setting `on_error`, errors of users' code, and the file of skipped samples."""

from __future__ import annotations

import bdb
import errno
import functools
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from savable_pipeline.errors import SavableError, ShardError

log = logging.getLogger(__name__)

OnError: TypeAlias = "Literal['raise', 'skip'] | Callable[[SavableError], bool]"
ErrorType = TypeVar("ErrorType", bound=BaseException)
_OUR_FILES = (str(Path(__file__).parents[1]) + "/", functools.__file__)
_CUDA_ERROR = re.compile(r"NVIDIA (driver|GPU)|not compiled with CUDA|re-initialize CUDA|No CUDA GPUs")
_MAX_TEXT = 2000  # most characters of a text in a quarantine file


def check_on_error(stage: str, on_error: OnError) -> None:
    """Raise ValueError unless `on_error` is "raise", "skip" or a function."""
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ValueError(f"{stage}: on_error={on_error!r}. Pass 'raise', 'skip' or a function of the error")


def skips(on_error: OnError, error: SavableError) -> bool:
    """Return whether `on_error` says to skip the sample or shard of this error."""
    return bool(on_error(error)) if callable(on_error) else on_error == "skip"


def reason_of(error: Exception) -> str:
    """Return the reason under which an error is counted.

    It is the `reason` of a `ShardError`, or the name of the class of an encoder's error.
    """
    return error.reason if isinstance(error, ShardError) else type(error).__name__


def is_environment_error(error: Exception) -> bool:
    """Return whether an error comes from disk, network, time or memory, not from data.

    Such an error may not happen again. An OSError of the operating system has an `errno`. An OSError that a decoder
    raises for damaged data has none.
    """
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.errno is not None
    return isinstance(error, ShardError | TimeoutError | MemoryError)


class Quarantine:
    """File of JSON lines, one for each skipped sample or shard.

    Many processes may write to it. Each line is one appending write, so lines never mix, and a killed process writes no
    partial line. A full disk may truncate a line, and the next write ends that line first. If another process is just
    writing a line, this may add an empty line. A sample that is skipped again after a resume is listed again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def add(self, **entry: Any) -> None:
        """Append one line. A failure logs a warning, because it must not end the run."""
        line = json.dumps({name: _truncated(value) for name, value in entry.items()}).encode() + b"\n"
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                written = b"\n" + line if _is_torn(descriptor) else line
                if os.write(descriptor, written) < len(written):
                    raise OSError(errno.ENOSPC, "only a part of the line was written; is the disk full?")
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: cannot be written (%s): %s", self.path, error.strerror, line.decode().strip())


def _is_torn(descriptor: int) -> bool:
    """Return whether the last line of a file lacks its newline."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) not in (b"\n", b"")


def _truncated(value: Any) -> Any:
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def from_user_code(error: ErrorType) -> ErrorType:
    """Return the error without this package's frames at the start of its traceback.

    The innermost frame stays, even if it is one of this package.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FILES):
        trace = trace.tb_next
    return error.with_traceback(trace)


def shortened(error: ErrorType) -> ErrorType:
    """Return an error without this package's frames at the start of its traceback.

    A `SavableError` gets no traceback at all.
    """
    return error.with_traceback(None) if isinstance(error, SavableError) else from_user_code(error)


def described(error: BaseException) -> str:
    """Return the class and text of an error, with a hint for debuggers and CUDA."""
    hint = ""
    if isinstance(error, bdb.BdbQuit):
        hint = "a debugger was ended, which has no terminal in a worker process: use num_workers=0"
    elif isinstance(error, RuntimeError | AssertionError) and _CUDA_ERROR.search(str(error)):
        hint = ". An encoder has no GPU: remove .cuda(), and pass the loader to trainers.device.OnDevice"
    return f"{type(error).__name__}: {error}{hint}".removesuffix(".")
