"""How far runs are: a bar for each on a terminal, a line for each in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from runs import Run

_LOOK_S = 0.01
_DRAW_S = 0.1


class Bars:
    """The bars of runs of so many steps, each beside how many of its entries are those of the first run.

    They are drawn by `follow`, not by a thread, since runs are forked meanwhile.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._runs: list[Run] = []
        self._steps = steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),  # all fits on 80 columns
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
        """Show a run."""
        self._runs.append(run)
        self._progress.add_task(title, total=self._steps, note="")
        if self._progress.disable:
            self._progress.console.print(title)

    def follow(self, until: Callable[[], bool]) -> None:
        """Read the logs and draw the bars until something is so."""
        drawn = 0.0
        while not until():
            time.sleep(_LOOK_S)
            for run in self._runs:
                run.read()
            if time.monotonic() > drawn + _DRAW_S:
                self._draw()
                drawn = time.monotonic()
        self._draw()

    def _draw(self) -> None:
        logs = [run.read() for run in self._runs]
        for task, log in zip(self._progress.task_ids, logs, strict=True):
            same = sum(logs[0].get(step) == entry for step, entry in log.items())
            note = f"{same} the same" if log is not logs[0] else ""
            self._progress.update(task, completed=max(log, default=-1) + 1, note=note)
        self._progress.refresh()
