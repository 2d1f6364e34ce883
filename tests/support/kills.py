"""Processes that are killed before a certain touch of a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TOUCHES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def run_until_killed(work: Callable[[], object], below: Path, event: int) -> bool:
    """Do `work` in a process that is killed before its `event`-th touch of a file in `below`; tells whether it was."""

    def child() -> None:
        touched = 0

        def hook(name: str, args: tuple[Any, ...]) -> None:
            nonlocal touched
            if name in _TOUCHES:
                touched += str(args[0]).startswith(str(below))
                if touched == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0
