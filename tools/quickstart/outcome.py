"""Comparison of the logs of runs, as a sentence and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import Log


@dataclass(frozen=True, slots=True)
class Trial:
    """Logs of an uninterrupted run, and of the same run killed and resumed."""

    name: str
    title: str
    steps: int
    uninterrupted: Log
    killed: Log
    resumed: Log

    @property
    def difference(self) -> str | None:
        """The first difference, also in steps that both the killed and the resumed run did; None if there is none."""
        return first_difference(self.uninterrupted, [self.killed, self.resumed], self.steps)

    def __str__(self) -> str:
        prefix = f"{self.name}: killed in step {max(self.killed) + 1}, resumed at step {min(self.resumed)}"
        return f"{prefix}: {verdict(self.difference, f'all {self.steps} batches and losses are the same')}"


def first_difference(expected: Log, found: Sequence[Log], steps: int) -> str | None:
    """Describe the first of `steps` steps that differs from `expected` in a log, or that no log has.

    Returns None if there is no such step.
    """
    for step in range(steps):
        entries = [log[step] for log in found if step in log]
        if step not in expected or not entries:
            return f"step {step} is missing"
        for field, value in expected[step].items():
            others = [entry.get(field) for entry in entries if entry.get(field) != value]
            if others:
                return f"step {step} has another {field}, {_readable(others[0])} instead of {_readable(value)}"
    return None


def verdict(difference: str | None, same: str) -> str:
    """Format the result in the markup of rich: `same` in green, or the difference in red."""
    return f"[green]{same}[/]" if difference is None else f"[bold red]FAILED: {difference}[/]"


def _readable(value: Any) -> str:
    """Format a logged loss (from `float.hex`) as a decimal number, and a hash unchanged."""
    return repr(float.fromhex(value)) if "0x" in str(value) else str(value)


def draw(trials: Sequence[Trial], path: Path) -> None:
    """Draw the loss curves, one panel per model: the uninterrupted run wide and pale, the other thin on top of it."""
    import matplotlib

    matplotlib.use("Agg")  # draws to a file without a screen
    from matplotlib import pyplot

    columns = min(len(trials), 3)
    rows = math.ceil(len(trials) / columns)
    size = (6.5 * columns, 4.2 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    figure.suptitle("A run that was never stopped, and the same run killed and resumed")
    for trial, axis in zip(trials, axes.flat, strict=False):
        _draw_trial(trial, axis)
    for axis in axes.flat[len(trials) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_trial(trial: Trial, axis: Any) -> None:
    """Draw the losses of a trial, and mark its kill and resume."""
    kill, resume = max(trial.killed), min(trial.resumed)
    axis.plot(*_curve(trial.uninterrupted), color="0.8", linewidth=6, label="never stopped")
    axis.plot(*_curve(trial.killed), color="tab:blue", linewidth=1.6, label=f"until SIGKILL in step {kill + 1}")
    axis.plot(*_curve(trial.resumed), color="tab:orange", linewidth=1.6, label=f"resumed at step {resume}")
    axis.axvline(kill, color="tab:red", linewidth=1, linestyle="--")
    axis.axvspan(resume, kill, color="tab:red", alpha=0.12, linewidth=0, label="steps done twice")
    axis.set(title=trial.title, xlabel="step", ylabel="training loss (nats)", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)


def _curve(log: Log) -> tuple[list[int], list[float]]:
    """Return the steps of a log, and their losses."""
    return list(log), [float.fromhex(entry["loss"]) for entry in log.values()]
