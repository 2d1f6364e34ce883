"""The quick start in small: a model trained, killed and resumed; and what its report says when a run differs."""

from __future__ import annotations

import copy
from pathlib import Path

import outcome as report
import pytest
import quickstart


def log(first: int, last: int) -> report.Log:
    """The steps from `first` to `last`, batch `b3` and loss 3.0 at step 3."""
    return {n: {"step": n, "batch": f"b{n}", "loss": float(n).hex(), "seconds": 0.5} for n in range(first, last + 1)}


@pytest.fixture
def trial() -> report.Trial:
    return report.Trial("toy", "a toy", "1 worker", uninterrupted=log(0, 9), killed=log(0, 6), resumed=log(4, 9))


@pytest.mark.long
def test_a_trainer_killed_in_the_middle_and_resumed_with_other_workers_repeats_every_bit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [quickstart]")
    folder = tmp_path / "python"
    recipe = quickstart.RECIPES["python"]
    quickstart.prepare(recipe, folder)
    trial = quickstart.killed_and_resumed(recipe, folder, steps=30)

    row = report.trial_row(trial)
    assert row.exact, row
    assert list(trial.uninterrupted) == list(range(30))
    assert 12 <= max(trial.killed) < 29
    assert min(trial.resumed) in (10, 20)
    assert list(trial.resumed) == list(range(min(trial.resumed), 30))
    losses = [float.fromhex(entry["loss"]) for entry in trial.uninterrupted.values()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])

    report.draw([trial], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_equal_logs_are_exact(trial: report.Trial) -> None:
    row = report.trial_row(trial)
    assert row.exact
    assert (row.killed_at, row.differs, row.loss_difference, row.first_batch_s) == ("step 6", None, 0.0, 0.5)


@pytest.mark.parametrize("run", ["killed", "resumed"])
def test_another_batch_is_named_in_either_run_of_a_step_done_twice(trial: report.Trial, run: str) -> None:
    getattr(trial, run)[5]["batch"] = "another"
    assert report.trial_row(trial).differs == "step 5"
    assert not report.trial_row(trial).exact


def test_a_step_that_was_never_done_differs(trial: report.Trial) -> None:
    del trial.resumed[9]
    assert report.trial_row(trial).differs == "step 9"


@pytest.mark.parametrize(("loss", "difference"), [((8.0).hex(), 0.0), ((8.25).hex(), 0.25), ("nan", float("inf"))])
def test_the_largest_difference_in_loss_is_told(trial: report.Trial, loss: str, difference: float) -> None:
    trial.resumed[8]["loss"] = loss
    row = report.trial_row(trial)
    assert row.loss_difference == difference
    assert row.exact == (difference == 0)


def test_the_slots_of_all_ranks_together_are_compared() -> None:
    ranks = [{slot: entry for slot, entry in log(0, 7).items() if slot % 2 == rank} for rank in range(2)]
    assert report.ranks_row("2 ranks", 8, {"toy": (log(0, 9), ranks)}).exact

    swapped = copy.deepcopy(ranks)
    swapped[1][3]["batch"], swapped[1][5]["batch"] = "b5", "b3"
    assert report.ranks_row("2 ranks", 8, {"toy": (log(0, 9), swapped)}).differs == "toy, slot 3"


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "killed.jsonl").write_text('{"step": 0, "batch": "b0"}\n{"step": 1, "ba')
    assert list(report.read_log(tmp_path / "killed.jsonl")) == [0]
