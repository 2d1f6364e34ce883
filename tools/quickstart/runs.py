"""Run: a process that logs each of its steps, and that may be killed at any time.

    run ── one JSON object per line ──▶ log ── new lines ──▶ the process that started it

A run is forked, so it needs no time to import modules. Start runs before anything starts threads.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

Entry = dict[str, Any]  # "step", "batch" (a hash) and, if it trains, "loss"
Log = dict[int, Entry]  # by step


class Run:
    """Process that calls `target(path, *arguments)`, which logs to that file. It is killed at the end of a `with`."""

    def __init__(self, path: Path, target: Callable[..., None], *arguments: object) -> None:
        self.log: Log = {}
        self._path, self._bytes_read = path, 0
        path.unlink(missing_ok=True)  # the log of an earlier run
        self._process = multiprocessing.get_context("fork").Process(target=_call, args=(target, path, arguments))
        self._process.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def read(self) -> Log:
        """Return the steps logged so far. An incomplete last line is read by a later call."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._bytes_read)
                lines, end, _ = file.read().rpartition(b"\n")
            self._bytes_read += len(lines + end)
            self.log.update({entry["step"]: entry for entry in map(json.loads, lines.splitlines())})
        return self.log

    def has_ended(self) -> bool:
        """Return whether the run has done all its steps. Raises `SystemExit` if it failed."""
        if self._process.exitcode:
            raise SystemExit(f"FAILED: {self._path.stem} ended with exit code {self._process.exitcode}")
        return self._process.exitcode == 0

    def finish(self) -> Log:
        """Wait until the run has done all its steps, and return its log.

        Raises `SystemExit` if it failed.
        """
        self._process.join()
        self.has_ended()  # raises if it failed
        return self.read()

    def kill(self) -> Log:
        """Kill the run with SIGKILL, and return its logged steps. Raises `SystemExit` if it had already ended."""
        self._process.kill()
        self._process.join()
        if self._process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"FAILED: {self._path.stem} ended before it could be killed")
        return self.read()


def _call(target: Callable[..., None], path: Path, arguments: tuple[object, ...]) -> None:
    """Call the function of a run in its process."""
    # Ctrl-C reaches all processes, and only the parent should print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    target(path, *arguments)
