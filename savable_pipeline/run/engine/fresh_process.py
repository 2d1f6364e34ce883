"""`FreshProcess`: a fresh interpreter, started as by multiprocessing's "spawn", but without the main module.

    trainer ── what spawn prepares, less the main module ── the process ──▶ interpreter    a pipe, of pickles
            ◀── nothing: it is closed when the interpreter ends ──────────                 a pipe, the sentinel

multiprocessing makes a child import the trainer's main module before any of our code runs there, so that we could not
report an error of that import. The module is part of a function's result, which only the method that starts the process
uses: that method is written here again, without the module. multiprocessing itself stays unchanged for other threads.
"""

from __future__ import annotations

import io
import os
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from typing import Any

_MAIN = ("init_main_from_name", "init_main_from_path")  # what multiprocessing passes to a child about the main module


def main_module() -> dict[str, Any]:
    """What multiprocessing passes to a child about this process's main module."""
    data = spawn.get_preparation_data("")
    return {name: data[name] for name in _MAIN if name in data}


class _Popen(Popen):
    _fds: list[int]  # added by what is pickled

    def _launch(self, process_obj: Any) -> None:
        """As that of multiprocessing, but for the main module."""
        tracker: Any = resource_tracker.getfd()
        content = self._pickled(process_obj)
        child_reads, we_write = os.pipe()
        self.sentinel, child_holds = os.pipe()
        self.finalizer = util.Finalize(self, _close, (self.sentinel, we_write))
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_reads)
            passed = [*self._fds, tracker, child_reads, child_holds]
            self.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, passed)
        finally:
            os.close(child_reads)
            os.close(child_holds)
        with open(we_write, "wb", closefd=False) as pipe:
            pipe.write(content)

    def _pickled(self, process_obj: Any) -> memoryview:
        data = spawn.get_preparation_data(process_obj.name)
        content = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump({name: value for name, value in data.items() if name not in _MAIN}, content)
            reduction.dump(process_obj, content)
        finally:
            set_spawning_popen(None)
        return content.getbuffer()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class FreshProcess(SpawnProcess):
    """A process of multiprocessing, with its arguments."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # multiprocessing's own name for it
        return _Popen(process_obj)
