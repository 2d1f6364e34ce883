"""What the quick start found: logs compared entry by entry, as a table and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

Entry = dict[str, Any]  # step, loss, batch (its digest), seconds since the start
Log = dict[int, Entry]  # by step


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that was never stopped, and the same run killed and resumed."""

    name: str
    title: str
    resumed_with: str
    uninterrupted: Log
    killed: Log
    resumed: Log


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, and with it the verdict on one run."""

    run: str
    steps: int
    differs: str | None  # the first batch that differs
    loss_difference: float | None = None  # the largest; None where nothing was trained
    killed_at: str = "–"
    resumed_with: str = "–"
    first_batch_s: float | None = None

    @property
    def exact(self) -> bool:
        """Whether not one bit differed."""
        return self.differs is None and not self.loss_difference


def read_log(path: Path) -> Log:
    """The entries of a run, one JSON object a line; a last line that a kill cut short is left out."""
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    entries = map(json.loads, whole)
    return {entry["step"]: entry for entry in entries}


def trial_row(trial: Trial) -> Row:
    """Compares every step, and those that were done again after the resume both times."""
    found = [trial.killed, trial.resumed]
    step = first_difference(trial.uninterrupted, found)
    losses = [_loss_difference(trial.uninterrupted[step], entry) for log in found for step, entry in log.items()]
    return Row(
        trial.name,
        len(trial.uninterrupted),
        differs=None if step is None else f"step {step}",
        loss_difference=max(losses),
        killed_at=f"step {max(trial.killed)}",
        resumed_with=trial.resumed_with,
        first_batch_s=trial.resumed[min(trial.resumed)]["seconds"],
    )


def ranks_row(run: str, slots: int, streams: dict[str, tuple[Log, list[Log]]]) -> Row:
    """Compares what all ranks together were given with the first slots of one; on that, step n took slot n."""
    differs = None
    for name, (trained, ranks) in streams.items():
        slot = first_difference({slot: trained[slot] for slot in range(slots)}, ranks)
        differs = differs if slot is None else f"{name}, slot {slot}"
    return Row(run, slots, differs)


def first_difference(expected: Log, found: Sequence[Log]) -> int | None:
    """The first step whose batch is another than expected, or that no log has; None if there is none."""
    for step, entry in expected.items():
        if {log[step]["batch"] for log in found if step in log} != {entry["batch"]}:
            return step
    return None


def _loss_difference(expected: Entry, found: Entry) -> float:
    if expected["loss"] == found["loss"]:  # all digits: `float.hex` wrote them
        return 0.0
    difference = abs(_loss(expected) - _loss(found))
    return math.inf if math.isnan(difference) else difference


def _loss(entry: Entry) -> float:
    return float.fromhex(entry["loss"])


def make_table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal of 80 columns."""
    table = Table(title="Killed and resumed, against uninterrupted", box=box.SIMPLE_HEAD)
    for heading in ("run", "steps", "killed at", "resumed\nwith"):
        table.add_column(heading)
    for heading in ("first batch\nthat differs", "largest\ndifference\nin loss", "seconds to\nfirst batch"):
        table.add_column(heading, justify="right")
    for row in rows:
        colour = "green" if row.exact else "bold red"
        differs = f"[{colour}]{row.differs or 'none'}[/]"
        loss = "–" if row.loss_difference is None else f"[{colour}]{row.loss_difference:g}[/]"
        seconds = "–" if row.first_batch_s is None else f"{row.first_batch_s:.2f}"
        table.add_row(row.run, str(row.steps), row.killed_at, row.resumed_with, differs, loss, seconds)
    return table


def draw(trials: Sequence[Trial], path: Path) -> None:
    """The loss curves overlaid, a panel a model: the uninterrupted run wide and pale, the other thin upon it."""
    import matplotlib

    matplotlib.use("Agg")  # draws into a file: needs no screen
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
    kill, resume = max(trial.killed), min(trial.resumed)
    axis.plot(*_curve(trial.uninterrupted), color="0.8", linewidth=6, label="uninterrupted")
    axis.plot(*_curve(trial.killed), color="tab:blue", linewidth=1.6, label=f"until SIGKILL after step {kill}")
    axis.plot(*_curve(trial.resumed), color="tab:orange", linewidth=1.6, label=f"resumed at step {resume}")
    axis.axvline(kill, color="tab:red", linewidth=1, linestyle="--")
    axis.axvspan(resume, kill, color="tab:red", alpha=0.12, linewidth=0, label="steps done twice")
    axis.set(title=trial.title, xlabel="step", ylabel="training loss (nats)", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)


def _curve(log: Log) -> tuple[list[int], list[float]]:
    return list(log), [_loss(entry) for entry in log.values()]
