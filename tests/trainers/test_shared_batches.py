"""Processes of each trainer that share batches are killed, and resume with the same sharing, with other, or without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.cases import drive
from tests.trainers.table import CASES

TRAINERS = ("torch", "accelerate", "fabric", "hf", "lightning")
LANDING = ("shared by 2",)
MARKED = [
    pytest.param(name, marks=pytest.mark.landing if name in LANDING else pytest.mark.long)
    for name in CASES
    if "shared" in name
]


@pytest.mark.parametrize("case", MARKED)
def test_processes_that_share_batches_resume_with_every_batch(tmp_path: Path, case: str) -> None:
    trials = {trainer: CASES[case](trainer, tmp_path / trainer) for trainer in TRAINERS}
    drive([run for trial in trials.values() for run in trial.runs])
    for trial in trials.values():
        trial.check()
