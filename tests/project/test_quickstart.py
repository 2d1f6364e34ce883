"""The quick start in small: a model trained, killed and resumed; and what is said when a run differs."""

from __future__ import annotations

import copy
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import first_minute
import pytest
import quickstart
import runs
import torch
import typer
from bars import Bars
from outcome import Trial, draw, first_difference
from rich.console import Console

import savable_pipeline as sp


def log(first: int, last: int) -> runs.Log:
    """The steps from `first` to `last`, batch `b3` and loss 3.0 at step 3."""
    return {n: {"step": n, "batch": f"b{n}", "loss": float(n).hex()} for n in range(first, last + 1)}


@pytest.fixture
def trial() -> Trial:
    return Trial("toy", "a toy", steps=10, uninterrupted=log(0, 9), killed=log(0, 6), resumed=log(4, 9))


@pytest.mark.long
def test_a_trainer_killed_in_the_middle_and_resumed_with_other_workers_repeats_every_bit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [quickstart]")
    folder = tmp_path / "python"
    recipe = quickstart.RECIPES["python"]
    quickstart.prepare(recipe, folder)
    assert quickstart.compare_ranks(recipe, folder, [2]) is None
    trial = quickstart.kill_and_resume(recipe, folder, steps=30)

    assert trial.difference is None
    assert list(trial.uninterrupted) == list(range(30))
    assert 12 <= max(trial.killed) < 29
    assert min(trial.resumed) in (10, 20)
    assert list(trial.resumed) == list(range(min(trial.resumed), 30))
    losses = [float.fromhex(entry["loss"]) for entry in trial.uninterrupted.values()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])

    draw([trial], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.parametrize(
    ("forgotten", "what"),
    [((sp.SavableLoader, "load_state_dict"), "batch"), ((torch, "set_rng_state"), "loss")],
)
def test_a_resume_that_forgets_something_fails_loudly(
    forgotten: tuple[Any, str],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="the extra [quickstart]")
    monkeypatch.setattr(*forgotten, lambda *_: None)
    monkeypatch.setattr(quickstart, "console", Console(file=sys.stdout, width=500))
    with pytest.raises(typer.Exit) as ended:
        quickstart.main(tmp_path, "python", [2], steps=30)
    assert ended.value.exit_code == 1
    assert f"FAILED: python: step 10 has another {what}, " in capsys.readouterr().out


def test_first_minute_prints_equal_batches(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first_minute.main(tmp_path)
    printed = capfd.readouterr().out
    assert "20 samples in 1 shard" in printed and f"{tmp_path / 'preview.html'}: " in printed
    assert "a batch: image (4, 3, 32, 32)" in printed
    steps = max(json.loads(line)["step"] for line in (tmp_path / "never_stopped.jsonl").read_text().splitlines()) + 1
    assert printed.endswith(f"\nthe same: {steps} batches, every byte\n")


@pytest.mark.long
def test_first_minute_fails_if_a_resume_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first_minute.main(tmp_path)
    assert "the same:" in capfd.readouterr().out
    monkeypatch.setattr(first_minute, "savable", lambda *_: None)  # the shards are there
    monkeypatch.setattr(sp.SavableLoader, "load_state_dict", lambda *_: None)
    with pytest.raises(SystemExit, match=r"FAILED: step \d+ has another batch"):
        first_minute.main(tmp_path)
    assert "the same:" not in capfd.readouterr().out


def count(path: Path, pause_s: float, fails_at: int | None = None) -> None:
    """Log the steps 0, 1, 2, … 9."""
    with path.open("w") as log:
        for step in range(10):
            if step == fails_at:
                sys.stderr.close()
                os._exit(3)
            print(json.dumps({"step": step}), file=log, flush=True)
            time.sleep(pause_s)


def test_a_run_is_killed_in_the_middle(tmp_path: Path) -> None:
    with runs.Run(tmp_path / "a.jsonl", count, 3600.0) as run:
        while not run.read():
            time.sleep(0.001)
        assert list(run.kill()) == [0]


@pytest.mark.parametrize(("fails_at", "message"), [(None, "ended before it could be killed"), (5, "exit code 3")])
def test_run_that_ended_early_is_not_a_result(fails_at: int | None, message: str, tmp_path: Path) -> None:
    with runs.Run(tmp_path / "a.jsonl", count, 0.0, fails_at) as run, pytest.raises(SystemExit, match=message):
        run.finish()
        run.kill()


def test_incomplete_last_line_is_read_once_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with runs.Run(path, count, 0.0) as run:
        assert list(run.finish()) == list(range(10))
        with path.open("a") as log:
            log.write('{"step": 10, "ba')
        assert list(run.read()) == list(range(10))
        with path.open("a") as log:
            log.write('tch": "b10"}\n')
        assert run.read()[10] == {"step": 10, "batch": "b10"}


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(on_a_terminal: bool, tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=on_a_terminal, width=100)
    paths = [tmp_path / "whole.jsonl", tmp_path / "again.jsonl"]
    with Bars(console, steps=10) as bars:
        for path in paths:
            with runs.Run(path, count, 0.0) as run:
                bars.add(path.stem, run)
                bars.follow(run.has_ended)
    assert ("10/10" in screen.getvalue() and "10 the same" in screen.getvalue()) == on_a_terminal
    assert (screen.getvalue() == "whole\nagain\n") != on_a_terminal


def test_equal_logs_do_not_differ(trial: Trial) -> None:
    assert trial.difference is None
    said = "toy: killed in step 7, resumed at step 4: [green]all 10 batches and losses are the same[/]"
    assert str(trial) == said


@pytest.mark.parametrize("run", ["killed", "resumed"])
@pytest.mark.parametrize("what", ["batch", "loss"])
def test_difference_is_named_in_either_run_of_a_repeated_step(trial: Trial, run: str, what: str) -> None:
    getattr(trial, run)[5][what] = "another"
    assert trial.difference == f"step 5 has another {what}, another instead of {'b5' if what == 'batch' else '5.0'}"
    assert "[bold red]FAILED" in str(trial)


@pytest.mark.parametrize("run", ["resumed", "uninterrupted"])
def test_missing_step_is_a_difference(trial: Trial, run: str) -> None:
    del getattr(trial, run)[9]
    assert trial.difference == "step 9 is missing"


def test_the_last_bit_of_a_loss_counts(trial: Trial) -> None:
    trial.resumed[8]["loss"] = (8.0 + 2**-49).hex()
    assert trial.difference == "step 8 has another loss, 8.000000000000002 instead of 8.0"


def test_difference_is_printed_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "console", Console(file=sys.stdout, width=500))
    quickstart.conclude({"toy": None}, Path("loss.png"))
    assert "Every batch and every loss" in capsys.readouterr().out

    with pytest.raises(typer.Exit) as ended:
        quickstart.conclude({"toy": None, "other": "step 9 is missing"}, Path("loss.png"))
    assert ended.value.exit_code == 1
    printed = capsys.readouterr().out
    assert "FAILED: other: step 9 is missing" in printed and "Every" not in printed


def test_the_slots_of_all_ranks_together_are_compared() -> None:
    ranks = [{slot: entry for slot, entry in log(0, 7).items() if slot % 2 == rank} for rank in range(2)]
    assert first_difference(log(0, 9), ranks, 8) is None

    swapped = copy.deepcopy(ranks)
    swapped[1][3]["batch"], swapped[1][5]["batch"] = "b5", "b3"
    assert first_difference(log(0, 9), swapped, 8) == "step 3 has another batch, b5 instead of b3"
