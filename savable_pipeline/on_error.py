"""What is to be done about a fault: raise, skip, or ask; and the file in which what was skipped is written down."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from savable_pipeline.errors import SavableError, ShardError

log = logging.getLogger(__name__)

OnError: TypeAlias = "Literal['raise', 'skip'] | Callable[[SavableError], bool]"
_LONGEST = 2000  # characters of an error's text that are written down


def check_on_error(stage: str, on_error: OnError) -> None:
    """Raise ValueError unless this is "raise", "skip", or a function of an error that says whether to skip."""
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ValueError(
            f"{stage}: on_error must be 'raise', 'skip', or a function of the error that gives True to skip: "
            f"{on_error!r}"
        )


def skips(on_error: OnError, error: SavableError) -> bool:
    """Whether to go on without what this error is about."""
    return bool(on_error(error)) if callable(on_error) else on_error == "skip"


def reason_of(error: Exception) -> str:
    """In few words, to be counted by: what is wrong with a shard, or the kind of an encoder's error."""
    return error.reason if isinstance(error, ShardError) else type(error).__name__


def is_of_environment(error: Exception) -> bool:
    """Whether an error may be gone the next time: a disk, a network, a clock, the memory; not the data.

    The operating system's errors have a number; decoders raise OSError without one about damaged data.
    """
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.errno is not None
    return isinstance(error, ShardError | TimeoutError | MemoryError)


class Quarantine:
    """A file of JSON lines, one for each thing that was skipped.

    Any number of processes write to it, each line by one appending write, so that no line is torn and a process that
    is killed leaves none half written. What is skipped again after a resume is written again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def add(self, **entry: Any) -> None:
        """Append one line. A file that cannot be written is a warning: it must not end the run."""
        line = json.dumps({name: _short(value) for name, value in entry.items()}).encode() + b"\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: cannot be written (%s): %s", self.path, error.strerror, line.decode().strip())


def _short(value: Any) -> Any:
    return value[:_LONGEST] if isinstance(value, str) else value
