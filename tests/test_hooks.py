"""The project's own hooks find nothing: format, lint, types; and the wheel's list of packages is what it should be."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("command", ["ruff format --check .", "ruff check .", "mypy"])
def test_the_hook_passes(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_two_packages_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["savable_pipeline", "task_encoders"]}
    assert all((ROOT / package / "py.typed").exists() for package in wheel["packages"])
