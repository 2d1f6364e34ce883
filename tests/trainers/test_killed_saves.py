"""A save that is killed at any change of a file leaves model and data of one step, or is refused; see `crashes.py`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.crashes import Trainer, try_kills

STRIDES = {
    "quickstart": 4,
    "hf": 24,
    "lightning": 4,
    "accelerate": 13,
    "torch": 13,
}  # of the small form: about four tries each


def outcomes(name: str, folder: Path, stride: int) -> Counter[str]:
    command = [sys.executable, "-m", "tests.trainers.crashes", name, str(folder), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * 3600)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return Counter(re.findall(rf"^{name} \d+: .*: (right|refused|apart)", done.stdout, re.MULTILINE))


@pytest.mark.landing
@pytest.mark.parametrize("name", STRIDES)
def test_kills_during_a_save_leave_model_and_data_that_match_or_are_rejected(name: str, tmp_path: Path) -> None:
    found = outcomes(name, tmp_path, STRIDES[name])
    assert found.total() > 0 and not found["apart"]


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", STRIDES)
def test_every_kill_during_a_save_leaves_model_and_data_that_match_or_are_rejected(name: str, tmp_path: Path) -> None:
    found = outcomes(name, tmp_path, 1)
    assert found["right"] > 0 and not found["apart"]


class Careless:
    """Trainer that overwrites its model, and then its data. `atomic`: both in one file, by a rename."""

    def __init__(self, folder: Path, *, atomic: bool) -> None:
        self.folder, self.atomic = folder, atomic

    def train(self, name: str) -> None:
        self._run(name, self.folder / f"{name} killed.jsonl", 0, 0)

    def resume(self, name: str) -> None:
        both = [self.folder / name / file for file in ("model", "data")]
        model, data = (json.loads(path.read_text()) if path.exists() else 0 for path in both)
        self._run(name, self.folder / f"{name}.jsonl", model, model if self.atomic else data)

    def _run(self, name: str, log: Path, model: int, data: int) -> None:
        with log.open("w") as file:
            while data < 12:
                model, data = model + 1, data + 1
                file.write(f"{json.dumps([data, model])}\n")
                if data % 4 == 0 and self.atomic:
                    (self.folder / name / "new").write_text(str(model))
                    (self.folder / name / "new").rename(self.folder / name / "model")
                elif data % 4 == 0:
                    (self.folder / name / "model").write_text(str(model))
                    (self.folder / name / "data").write_text(str(data))

    def log_of(self, name: str) -> list[Any]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("atomic", [True, False])
def test_mismatched_model_and_data_are_detected(tmp_path: Path, *, atomic: bool) -> None:
    careless = Careless(tmp_path, atomic=atomic)
    trainer = Trainer(careless.train, careless.resume, careless.log_of, tmp_path)
    found = Counter(result.split()[0].rstrip(":") for *_, result in try_kills(trainer, range(0, 13, 4), 1))
    assert found["right"] > 0 and bool(found["apart"]) is not atomic, found
