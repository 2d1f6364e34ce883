"""Progress of runs: a bar per run on a terminal, one line per run in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from runs import Run

_POLL_S = 0.01  # between two reads of the logs
_DRAW_S = 0.1  # between two updates of the bars


class Bars:
    """Progress bars of runs with `steps` steps each, and how many entries equal those of the first run.

    `follow` draws them. There is no drawing thread, because runs are forked in the meantime.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._runs: list[Run] = []
        self._steps = steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),  # so that a line fits in 80 columns
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, title: str, run: Run) -> None:
        """Add the bar of a run."""
        self._runs.append(run)
        self._progress.add_task(title, total=self._steps, note="")
        if self._progress.disable:
            self._progress.console.print(title)

    def follow(self, until: Callable[[], bool]) -> None:
        """Read the logs and draw the bars until `until()` is true."""
        last_drawn = 0.0
        while not until():
            time.sleep(_POLL_S)
            for run in self._runs:
                run.read()
            if time.monotonic() > last_drawn + _DRAW_S:
                self._draw()
                last_drawn = time.monotonic()
        self._draw()

    def _draw(self) -> None:
        logs = [run.read() for run in self._runs]
        for task, log in zip(self._progress.task_ids, logs, strict=True):
            same = sum(logs[0].get(step) == entry for step, entry in log.items())
            note = f"{same} the same" if log is not logs[0] else ""
            self._progress.update(task, completed=max(log, default=-1) + 1, note=note)
        self._progress.refresh()
