"""Each trainer is killed and resumed by its own mechanism, on the code of its page: no batch and no loss differs.

What their files refuse, and checkpoints of any moment of a step, are tested in the same process (`_TESTS`), since it
takes long to import the trainers. `python tools/trials/trainers.py` tries the other cases.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.trainers.cases import drive, expect_resumed, logs, saved_before, three_runs

_TESTS = ("adapters.py", "adapters_hf.py", "lightning_state.py", "hf_state.py", "hf_images.py")

TRAINERS = ("torch", "accelerate", "hf", "lightning")


@pytest.mark.landing
def test_a_trainer_killed_with_two_workers_and_resumed_repeats_every_batch_and_loss(tmp_path: Path) -> None:
    kills = {trainer: random.randint(5, 8) for trainer in TRAINERS}
    cases = {}
    for trainer, kill_at in kills.items():
        (tmp_path / trainer).mkdir()
        cases[trainer] = three_runs(trainer, tmp_path / trainer, kill_at)
    tests = [str(Path(__file__).with_name(file)) for file in _TESTS]
    drive([case for found in cases.values() for case in found], *tests)
    for trainer, kill_at in kills.items():
        straight, killed, resumed = logs(cases[trainer])
        assert (len(straight), len(killed)) == (12, kill_at), trainer
        expect_resumed([straight, killed, resumed], saved_before(kill_at, 4))
