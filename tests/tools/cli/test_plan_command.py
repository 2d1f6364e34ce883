"""`savable plan` on its command line: what it prints and writes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from savable_pipeline.tools.cli.main import app
from tests.conftest import MakeShards

_TRAIN = """
import savable_pipeline as sp

class Ids(sp.TaskEncoder):
    one_to_one = True
    global_rng = False
    def encode(self, sample, rng):
        return list(range(sample.json()["id"] % 9 + 1))
    def length(self, item):
        return len(item)
    def batch(self, items, rng):
        return items

def pipeline(lane):
    return sp.Batcher(sp.Encode(sp.TarShardReader({shards!r}, lane, epochs=1), Ids()), size=4)

chain = sp.read({shards!r}, epochs=1).encode(Ids()).batch(4)

def loader():
    return sp.SavableLoader(pipeline, seed=1, lanes=6)
"""


@pytest.fixture
def train(make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    file = tmp_path / "planned_train.py"
    file.write_text(_TRAIN.format(shards=str(make_shards([60, 47]))))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield str(file)
    sys.modules.pop("planned_train", None)


def plan(arguments: str) -> str:
    result = CliRunner().invoke(app, shlex.split(f"plan {arguments}"), catch_exceptions=False)
    return f"{result.exit_code}\n{result.output}"


def test_a_loader_is_planned_in_tables(train: str) -> None:
    printed = plan(f"{train}:loader --ranks 2")
    assert printed.startswith("0")
    assert re.search(r"steps per epoch +12 +counted", printed), printed  # 4 rounds of 6 batches
    assert printed.splitlines()[1] == f"{train}:loader runs on 2 ranks with 6 lanes: 12 steps per epoch"
    assert re.search(r"6 \(yours\) +1, 2, 3 +3 +12 ", printed) and "reads per epoch" in printed
    assert printed.count("known from") == 1 and "0 samples" not in printed


def test_json_has_the_same_numbers(train: str) -> None:
    result = CliRunner().invoke(app, ["plan", f"{train}:pipeline", "--ranks=3", "--lanes=3", "--json"])
    found = json.loads(result.stdout)
    assert found["steps"]["how"] == "counted" and found["steps"]["steps"] == 9 and found["planned_lanes"] == 3
    assert found["steps"]["unused_samples"] == 0  # 27 batches, the last of 3 samples


def test_pipeline_is_planned_with_a_loaders_default_lanes(train: str) -> None:
    assert "96 (default)" in plan(f"{train}:pipeline --ranks 2")
    assert "12 (yours)" in plan(f"{train}:pipeline --ranks 2 --lanes 12")


def test_chain_is_planned_with_the_lanes_of_its_data(train: str) -> None:
    """26 full batches, of one epoch."""
    assert "2 (default)" in (printed := plan(f"{train}:chain --ranks 2")) and "runs on 2 ranks with 2 lanes" in printed
    printed = plan(f"{train}:chain --ranks 3")
    assert "cannot start: 3 ranks do not divide its 2 lanes. This plan is for lanes=3." in printed


def test_wrong_plan_options_are_errors_of_one_line(train: str) -> None:
    printed = plan(f"{train}:loader --ranks 8 --nodes 3")
    assert printed.startswith("2\n") and "--nodes must divide --ranks" in printed
    assert "for a pipeline function" in plan(f"{train}:loader --lanes 4")


def test_plan_reports_the_nodes_needed_by_the_measurement(train: str) -> None:
    printed = plan(f"{train}:loader --ranks 2 --batch-s 0.9 --step-s 0.25 --node-workers 4")
    assert re.search(r"workers per rank +4 ", printed), printed  # 3.6 are busy
    assert re.search(r"CPU nodes for remote workers +2 +4 workers on each", printed), printed  # 7.2 of 4
    assert "CPU nodes" not in plan(f"{train}:loader --ranks 2")
    refused = CliRunner().invoke(app, shlex.split(f"plan {train}:loader --batch-s 0.9"))
    assert refused.exit_code == 2
