"""`savable state`: what it shows of a checkpoint, and of two."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import errors
from savable_pipeline.run.state.state_dict import JSON_FILE, to_json
from savable_pipeline.run.state.summary import differences, read_checkpoint, summarize
from savable_pipeline.tools.cli.main import app
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def checkpoints(make_shards: Any, tmp_path: Path) -> list[Path]:
    """Written after 4 and after 5 steps: the fifth was lane 4's first."""
    paths = []
    with sp.SavableLoader(partial(toy_pipeline, str(make_shards([40, 60]))), seed=3, lanes=12) as loader:
        for step, _ in enumerate(loader, start=1):
            if step >= 4:
                paths.append(tmp_path / f"step{step}.pt")
                torch.save({"model": {"w": torch.zeros(2)}, "more": [{"data": loader.state_dict()}]}, paths[-1])
            if step == 5:
                break
    return paths


def test_summary_finds_the_state_in_a_checkpoint_and_each_lanes_position(checkpoints: list[Path]) -> None:
    summary = summarize(read_checkpoint(checkpoints[0]))
    assert summary.numbers == {"epoch": 0, "slot": 4, "lanes": 12}
    assert summary.settings["ShuffleBuffer.size"] == 10
    assert [lane for lane, row in summary.lanes.items() if row] == [0, 1, 2, 3]
    row = summary.lanes[2]
    assert list(row) == [
        "batches", "TarShardReader.epoch", "TarShardReader.position", "TarShardReader.lane", "ShuffleBuffer.refs",
        "ShuffleBuffer.draws", "ShuffleBuffer.most", "Encode.refs", "Encode.part", "Encode.samples",
        "Encode.errors", "Encode.avoided", "OnlinePacker.packs", "OnlinePacker.count",
        "OnlinePacker.taken", "OnlinePacker.ahead", "Batcher.held", "Batcher.count",
    ]  # fmt: skip
    assert (row["batches"], row["Batcher.count"], len(row["ShuffleBuffer.refs"])) == (1, 1, 9 * 12)


def test_two_states_differ_in_the_slot_and_in_the_lane_that_ran_between(checkpoints: list[Path]) -> None:
    first, second = (summarize(read_checkpoint(path)) for path in checkpoints)
    assert differences(first, first) == []
    assert differences(first, second) == [("slot", "4", "5"), ("lane 4", "not begun", "begun")]


def test_the_command_prints_the_run_and_its_lanes(checkpoints: list[Path]) -> None:
    result = CliRunner().invoke(app, ["state", str(checkpoints[0])], env={"COLUMNS": "140"})
    assert result.exit_code == 0
    assert "slot 4; 12 of 12 lanes, 4 have started" in result.output  # of an endless run, whose lanes are at epoch 1
    assert "2 shards, 100 samples" in result.output
    assert "refs 9" in result.output and "draws" in result.output


def test_the_command_compares_two_files_and_says_so_by_its_exit_code(checkpoints: list[Path]) -> None:
    paths = [str(path) for path in checkpoints]
    differing = CliRunner().invoke(app, ["state", *paths])
    assert differing.exit_code == 1
    assert differing.output.splitlines() == [
        "the same run at different positions",
        "  slot 4 against 5",
        "lane 4:",
        "  state not begun against begun",
    ]
    same = CliRunner().invoke(app, ["state", paths[0], paths[0]])
    assert same.exit_code == 0 and "both resume with the same batches" in same.output


def test_command_reports_only_stages_of_different_pipelines(
    checkpoints: list[Path], make_shards: Any, tmp_path: Path
) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 60])), buffer=None)
    with sp.SavableLoader(pipeline, seed=3, lanes=12) as loader:
        torch.save(loader.state_dict(), tmp_path / "other.pt")
    result = CliRunner().invoke(app, ["state", str(checkpoints[0]), str(tmp_path / "other.pt")])
    lines = result.output.splitlines()
    assert (result.exit_code, lines[0]) == (1, "different pipelines: 5 stages against 4")
    assert "TarShardReader > ShuffleBuffer > Encode > OnlinePacker > Batcher" in result.output
    assert "lane 0" not in result.output and "ShuffleBuffer.size 10 against missing" in " ".join(result.output.split())


def test_first_different_ref_is_reported() -> None:
    row = {"ShuffleBuffer.refs": (5).to_bytes(8, "little") + (0).to_bytes(4, "little")}
    other = {"ShuffleBuffer.refs": (7).to_bytes(8, "little") + (1).to_bytes(4, "little")}
    from savable_pipeline.run.state.summary import StateSummary

    left, right = (StateSummary({}, {}, {}, {3: lane}, {3: 12}) for lane in (row, other))
    assert differences(left, right) == [
        ("lane 3 ShuffleBuffer.refs", "1 refs, [0] = index 5 epoch 0", "1 refs, [0] = index 7 epoch 1")
    ]


def test_a_state_in_json_is_read_as_such_and_in_a_folder_of_a_trainer(checkpoints: list[Path], tmp_path: Path) -> None:
    state = read_checkpoint(checkpoints[0])
    for name in ("mine.json", JSON_FILE):
        (tmp_path / name).write_text(json.dumps(to_json(state)))
        assert read_checkpoint(tmp_path / name) == state
    assert read_checkpoint(tmp_path) == state
    for raw, said in (("[1]", "it has no state of a SavableLoader"), ("{", "no JSON"), ("[" * 100_000, "no JSON")):
        (tmp_path / "mine.json").write_text(raw)
        with pytest.raises(errors.StateError, match=said):
            read_checkpoint(tmp_path / "mine.json")


def test_setting_missing_in_one_state_is_shown_as_missing(checkpoints: list[Path]) -> None:
    one, other = (summarize(read_checkpoint(path)) for path in (checkpoints[0], checkpoints[0]))
    other.settings.pop("Encode.mean", None)
    for value, said in (([0.5, None], "[0.5, None]"), (None, "None"), ("missing", "missing")):
        one.settings["Encode.mean"] = value
        assert differences(one, other) == [("Encode.mean", said, "missing")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": 1}, "it has no state of a SavableLoader"),
        (None, "cannot read it"),
        ("damaged", "checksum does not match"),
    ],
)
def test_file_without_a_state_is_one_clear_line(
    checkpoints: list[Path], tmp_path: Path, content: Any, said: str
) -> None:
    path = tmp_path / "other.pt"
    if content is None:
        path.write_bytes(b"no checkpoint")
    elif content == "damaged":
        state = read_checkpoint(checkpoints[0])
        lane = state["lane_00001"]
        state["lane_00001"] = lane[:-1] + bytes([lane[-1] ^ 1])
        torch.save(state, path)
    else:
        torch.save(content, path)
    result = CliRunner().invoke(app, ["state", str(path)])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_a_blend_is_shown_with_each_of_its_sources(make_shards: Any, tmp_path: Path) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40])), blend="nested", buffer=None)
    with sp.SavableLoader(pipeline, seed=3, lanes=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
        torch.save(state, tmp_path / "state.pt")
    row = summarize(state).lanes[0]
    places = [name for name in row if name.endswith(".position")]
    assert places == [f"{branch}/TarShardReader.position" for branch in ("c", "x/a", "x/b")]
    assert row["x/Blend.turns"]["names"] == ["a", "b"]
    result = CliRunner().invoke(app, ["state", str(tmp_path / "state.pt")], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
