"""`SealedJob`, a job as bytes, and `start_interpreter` for the process of it.

    trainer ── multiprocessing's preparation data, without the main module ── the process ──▶ stdin of the interpreter

multiprocessing lets a child import the trainer's main module before any of our code runs there, so we could not report
an error of that import. Here the child imports the main module when it opens the job, where it can report an error.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import subprocess
import textwrap
import traceback
from collections.abc import Sequence
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any

from savable_pipeline.core.wording import short_error
from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.stages.mapped_function import LAMBDA

PROCESS_NAME = "savable_pipeline"  # prefix of the names of our processes
UNGUARDED_CODE = 79  # exit code of a child that finds the main module unguarded, which the trainer then reports

UNGUARDED = (
    "the main module creates a loader with workers when workers started by spawn or forkserver import it. Put the code "
    "that creates and uses the loader under `if __name__ == '__main__':`, or use start_method='fork'."
)
_IMPORTED = "workers started by spawn or forkserver cannot import the trainer's main module"
_GUARD = "Put code that only the trainer runs under `if __name__ == '__main__':`, or use start_method='fork'."
NOT_IMPORTED = f"{_IMPORTED}, see the error on stderr. {_GUARD}"
_MOST_LINES = 10  # lines of a traceback in a message


class SealedJob:
    """Job that a child unpickles by `open`, so that it can report errors of that.

    A forked child gets the `job` itself. Other children get `raw`, the result of `pickled_job`, and `main`, the result
    of `main_module_data`.
    """

    def __init__(self, job: LaneJob | None, raw: bytes = b"", main: dict[str, Any] | None = None) -> None:
        self._job, self._raw, self._main = job, raw, main or {}
        self._error: WorkerError | None = None

    def open(self) -> LaneJob:
        """Return the job.

        Raises `WorkerError` if the main module or the pipeline cannot be imported here.
        """
        if self._error is not None:  # in a fork of a process where opening has failed
            raise self._error
        if self._job is None:
            try:
                _import_main(self._main)
                self._job = _unpickled(self._raw)
            except WorkerError as error:
                self._error = error
                raise
        return self._job


def pickled_job(job: LaneJob, receiver: str, instead: str = "") -> bytes:
    """Pickle a job.

    Raises ValueError if it cannot be pickled. The message names the `receiver`, such as "other machines", and ends with
    the advice `instead`.
    """
    try:
        return pickle.dumps(job, protocol=5)
    except Exception as error:
        named = getattr(job.pipeline, "__qualname__", f"\n{job.pipeline!r}\n")
        raise ValueError(
            f"the pipeline {named} cannot be sent to {receiver}: {error}. {_pickling_fix(str(error))}{instead}."
        ) from error


def _pickling_fix(error: str) -> str:
    """Return what to do about an error of pickling."""
    if "not the same object" in error:
        return "It was redefined, as by a notebook cell. Create the pipeline again with the new definition"
    # the error is about an object that cannot be pickled, and not about a name that cannot be found
    if "cannot pickle" in error or "cannot be pickled" in error:
        return "Create objects that cannot be pickled, such as a tokenizer, in the worker by a function: .encode(make)"
    kind = "a function with def" if LAMBDA in error else "it"
    return f"Define {kind} at the top of a module and bind its arguments with functools.partial"


def _unpickled(raw: bytes) -> LaneJob:
    try:
        job: LaneJob = pickle.loads(raw)
    except Exception as error:
        raise WorkerError(
            f"a worker cannot import the pipeline: {short_error(error)}. Define it in a module (not in a notebook "
            "or under `if __name__ == '__main__':`), or use start_method='fork'."
        ) from error
    return job


def _import_main(main: dict[str, Any]) -> None:
    """Import the trainer's main module as multiprocessing does. Raises `WorkerError` with its traceback."""
    process = vars(multiprocessing.current_process())
    process["_inheriting"] = True  # multiprocessing sets this during the import, so that no process is started
    try:
        spawn.prepare(main)
    except BaseException as error:  # including SystemExit, because a script may end itself
        shown = textwrap.indent("\n".join(_last_lines(error)), "    ")
        raise WorkerError(f"{_IMPORTED}:\n{shown}\n{_GUARD}") from error
    finally:
        process.pop("_inheriting", None)


def _last_lines(error: BaseException) -> list[str]:
    """Return the last lines of an error's traceback, without the frames that imported the main module."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _imports_main(frame.filename)]
    lines = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).splitlines()
    return lines if len(lines) <= _MOST_LINES else ["…", *lines[1 - _MOST_LINES :]]


def _imports_main(file: str) -> bool:
    """Return whether the code in this file imports the main module."""
    return file in (__file__, spawn.__file__) or file.endswith(("runpy.py", "<frozen runpy>"))


def check_main_is_guarded() -> None:
    """End a child whose import of the main module creates a loader with workers.

    This ends the process only if it is our own child. In a child of another library, raise `WorkerError`.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(PROCESS_NAME):
        os._exit(UNGUARDED_CODE)
    raise WorkerError(UNGUARDED)


# keys under which multiprocessing passes the main module to a child
MAIN_MODULE_KEYS = ("init_main_from_name", "init_main_from_path")


def main_module_data() -> dict[str, Any]:
    """Return the data by which multiprocessing imports the main module in a child."""
    data = spawn.get_preparation_data("")
    return {name: data[name] for name in MAIN_MODULE_KEYS if name in data}


def start_interpreter(process: SpawnProcess, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process in a fresh interpreter, which inherits these descriptors."""
    content: Any = io.BytesIO()
    data = spawn.get_preparation_data(process.name)
    # allows pickling objects that only a child may get, such as the key of this process's connections
    set_spawning_popen(content)
    try:
        reduction.dump({name: value for name, value in data.items() if name not in MAIN_MODULE_KEYS}, content)
        reduction.dump(process, content)
    finally:
        set_spawning_popen(None)
    tracker: Any = resource_tracker.getfd()
    command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=0)
    child = subprocess.Popen(
        command, executable=spawn.get_executable(), pass_fds=[tracker, *descriptors], stdin=subprocess.PIPE
    )
    with contextlib.suppress(BrokenPipeError):  # the child has ended, which its channel will show
        # The pipe stays open until the child ends, so that the child detects the end of this process.
        assert child.stdin is not None
        child.stdin.write(content.getvalue())
        child.stdin.flush()
    return child
