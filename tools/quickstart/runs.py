"""A run: a process of its own that logs each of its steps and may be killed at any of them.

    run ──a JSON object a line──▶ log ──what is new──▶ the process that started it

It is forked, so that it has the imports, which take seconds. Start runs before anything starts threads.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

Entry = dict[str, Any]  # step, batch (its digest) and, of a trainer, loss
Log = dict[int, Entry]  # by step


class Run:
    """A call `target(path, …)` in another process, which logs to that file. At the end of a `with` it has ended."""

    def __init__(self, path: Path, target: Callable[..., None], *arguments: object) -> None:
        self.log: Log = {}
        self._path, self._read = path, 0  # bytes
        path.unlink(missing_ok=True)  # of an earlier run
        self._process = multiprocessing.get_context("fork").Process(target=_call, args=(target, path, arguments))
        self._process.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def read(self) -> Log:
        """The steps so far; a last line that is not whole is left for the next call."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole + end)
            self.log.update({entry["step"]: entry for entry in map(json.loads, whole.splitlines())})
        return self.log

    def has_ended(self) -> bool:
        """Whether it has done all its steps. Raises `SystemExit` if it failed."""
        if self._process.exitcode:
            raise SystemExit(f"FAILED: {self._path.stem} ended with exit code {self._process.exitcode}")
        return self._process.exitcode == 0

    def finish(self) -> Log:
        """Wait for its end, which should be a good one."""
        self._process.join()
        self.has_ended()
        return self.read()

    def kill(self) -> Log:
        """End it by SIGKILL, of which it hears nothing."""
        self._process.kill()
        self._process.join()
        if self._process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"FAILED: {self._path.stem} ended before it could be killed")
        return self.read()


def _call(target: Callable[..., None], path: Path, arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all at once: one of them says so
    target(path, *arguments)
