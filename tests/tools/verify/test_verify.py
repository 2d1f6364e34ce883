"""`savable verify-resume` names what does not resume exactly: run as a user does, each leg in an interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.verify.comparison import VerifyPlan, verify

ROOT = Path(__file__).parents[3]
FAST = ["--lanes=2", "--workers=0", "--random-cuts=0", "--steps=3", "--cut=2"]


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app,
        ["verify-resume", *arguments, f"--pictures={folder}"],
        env={"SHARDS": str(folder / "shards"), "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def folder(make_shards: Any) -> Path:
    """Write 24 samples in two shards."""
    shards: Path = make_shards([12, 12])
    return shards.parent


def test_good_loader_passes_with_a_summary_of_comparisons(folder: Path) -> None:
    done = run(
        folder, "tests/support/toy_impure.py:make_loader", "--steps=10", "--cut=4", "--random-cuts=0", "--workers=0"
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout == (
        "OK: tests/support/toy_impure.py:make_loader resumes exactly. 10 batches and 1 end of an epoch are equal in "
        "every byte, interrupted after 4 of them.\n"
        "  num_workers: 1 uninterrupted, 0 and 0 in the 2 segments\n"
        "  Each segment was a new process with another PYTHONHASHSEED.\n"
    )
    assert done.stderr.splitlines()[0].startswith("each segment of tests/support/toy_impure.py:make_loader starts a ")
    assert [path.name for path in folder.iterdir()] == ["shards"], "nothing is written into the ledger of the run"


@pytest.mark.parametrize(
    "mistake",
    [
        "iterates_a_set",
        *(pytest.param(m, marks=pytest.mark.long) for m in ("reads_the_clock", "unseeded_numpy", "unseeded_python")),
    ],
)
def test_difference_between_processes_names_field_sample_and_encoder(folder: Path, mistake: str) -> None:
    done = run(folder, f"tests.support.toy_impure:{mistake}", *FAST)
    assert done.exit_code == 1, done.stderr
    first, field, sample, encoder, expected, found, hint, last = done.stdout.splitlines()
    assert first == (
        "FAILED: another batch at slot 0 of lane 0, in segment 1 (num_workers=0, PYTHONHASHSEED=2, not interrupted yet)"
    )
    assert field.split()[1].startswith("batch[0]['value']")
    assert sample.startswith("  sample    shard 000") and ", key s0000" in sample
    assert encoder.split() == ["encoder", "Toy"]
    assert expected.split()[0] == "expected" and found.split()[0] == "found"
    assert expected.split()[1] != found.split()[1]
    assert "clock" in hint and last.startswith("  0 batches of 3 before it are equal.")


@pytest.mark.long
def test_encoder_that_keeps_state_is_found_by_an_interruption(folder: Path) -> None:
    done = run(folder, "tests.support.toy_impure:keeps_state", *FAST)
    assert done.exit_code == 1, done.stderr
    first, field, _, _, expected, found, hint, _ = done.stdout.splitlines()
    assert first.startswith(
        "FAILED: another batch at slot 2 of lane 0, in segment 2 (num_workers=0, PYTHONHASHSEED=3, resumed"
    )
    assert field.split()[1] == "batch[0]['value']"
    assert (expected.split(), found.split()) == (["expected", "7"], ["found", "1"])
    assert "only after an interruption" in hint


@pytest.mark.long
def test_different_images_are_written_with_their_difference(folder: Path) -> None:
    done = run(folder, "tests.support.toy_impure:unseeded_torch", *FAST)
    assert done.exit_code == 1, done.stderr
    picture = folder / "verify-resume-step-00001.png"
    assert f"picture   {picture}" in done.stdout and "batch['image'] (of its rows 3 of 3 differ)" in done.stdout
    with Image.open(picture) as image:
        assert image.size == (8 + 4 + 8 + 4 + 8, 8)


def test_a_loader_that_cannot_run_is_an_error_of_one_line(folder: Path) -> None:
    (folder / "gone").mkdir()  # for pictures; there are no shards
    done = run(folder / "gone", "tests.support.toy_impure:good")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no such file or folder" in done.stderr.splitlines()[-1]


# Without interpreters.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 1}, "at least 2"),
        ({"random_cuts": 0}, "no interruption is chosen"),
        ({"random_cuts": -1}, "at least 0"),
        ({"workers": (-1,)}, "at least 0"),
    ],
)
def test_a_plan_that_compares_nothing_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifyPlan("a:b", **settings)


def test_interruptions_are_the_chosen_steps_and_random_ones() -> None:
    assert VerifyPlan("a:b", cuts=(4, 2), random_cuts=0).bounds(9) == [0, 2, 4, 9]
    assert len(VerifyPlan("a:b", cuts=(4,), random_cuts=8).bounds(9)) == 10, "each of 1 to 8, once"
    drawn = {tuple(VerifyPlan("a:b", random_cuts=2, cut_seed=seed).bounds(100)) for seed in range(5)}
    assert len(drawn) == 5 and all(bounds == tuple(sorted(set(bounds))) for bounds in drawn)
    with pytest.raises(ValueError, match=r"--cut 9: .*1 to 8"):
        VerifyPlan("a:b", cuts=(9,)).bounds(9)


def test_dead_interpreter_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(SavableError, match="exit code 3"):
        verify(VerifyPlan(f"{tmp_path}/dies.py:loader"), lambda done, total: None)
