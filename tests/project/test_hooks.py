"""The project's own hooks find nothing (format, lint, types, floors), and its folders and wheel are as planned."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import savable_pipeline

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.landing
@pytest.mark.parametrize("command", ["ruff format --check .", "ruff check .", "mypy"])
def test_pre_commit_hooks_pass(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Tolerate a raised proxy limit in tests", ""),
        ("Pass the address as written", ""),
        ("Merge branch 'x'", ""),
        ("A proxy of the tests bears that its limit is lifted", "starts with 'A'"),
        ("Adds a test", "starts with 'Adds'"),
        ("Fixed the reader", "starts with 'Fixed'"),
        ("Fix the reader.", "full stop"),
        ("Fix " + 69 * "x", "73 characters"),
    ],
)
def test_commit_subjects_are_short_imperatives(subject: str, problem: str) -> None:
    found = " ".join(runpy.run_path(str(ROOT / "tools/check_commit_message.py"))["problems"](subject))
    assert problem in found and bool(problem) == bool(found)


@pytest.mark.landing
def test_a_folder_imports_only_folders_below_it() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")  # it has no `python -m` form
    done = subprocess.run([lint_imports], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_mirror_the_folders_of_the_package() -> None:
    tested = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    folders = {path.parent.name for path in (ROOT / "savable_pipeline").glob("*/__init__.py")}
    assert tested - folders == {"support", "system", "project", "energon", "task_encoders", "breaks"}
    assert folders <= tested


def test_wheel_has_only_the_two_packages() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["savable_pipeline", "task_encoders"]}
    assert all((ROOT / package / "py.typed").exists() for package in wheel["packages"])


def test_the_version_is_written_once() -> None:
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "savable_pipeline/__init__.py"
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert f"## {savable_pipeline.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_license_is_in_the_wheel_and_in_the_source_distribution() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "savable_pipeline contributors" in text
    assert (PROJECT["project"]["license"], PROJECT["project"]["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "LICENSE" in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
