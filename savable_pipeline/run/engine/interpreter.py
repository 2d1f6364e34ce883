"""Begins a fresh interpreter as multiprocessing's "spawn" does, but without the trainer's main module.

    trainer ── what spawn prepares, less the main module ── the process ──▶ interpreter, on its stdin

multiprocessing makes a child import the trainer's main module before any of our code runs there, so that we could not
report an error of that import: `SealedJob` imports it later.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Sequence
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any

from savable_pipeline.run.engine.sealed_job import MAIN


def begin_interpreter(process: SpawnProcess, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Run a process that was not started in a fresh interpreter, which inherits these descriptors."""
    content = io.BytesIO()
    data = spawn.get_preparation_data(process.name)
    anyone: Any = content
    set_spawning_popen(anyone)  # it allows what only a child may get, such as the key of this process's connections
    try:
        reduction.dump({name: value for name, value in data.items() if name not in MAIN}, content)
        reduction.dump(process, content)
    finally:
        set_spawning_popen(None)
    tracker: Any = resource_tracker.getfd()
    command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=0)
    child = subprocess.Popen(
        command, executable=spawn.get_executable(), pass_fds=[tracker, *descriptors], stdin=subprocess.PIPE
    )
    with contextlib.suppress(BrokenPipeError):  # it has ended, which its channel will show
        assert child.stdin is not None  # open until the child has ended: so it knows that this process lives
        child.stdin.write(content.getvalue())
        child.stdin.flush()
    return child
