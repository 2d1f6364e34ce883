"""How much the test suite catches: applies each deliberate break of `tests/breaks/breaks.py` to a copy, and tests that.

    python tools/house/breaks.py [--only NAME …] [--jobs N] [--likely]

A break is caught if a test fails: first among those that catch it most likely, then, unless `--likely`, in the whole
suite. Run it before and after tests are deleted: at least as many must be caught. (Some 20 s a break that is caught
early, the time of the whole suite for one that is not.)
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_IGNORED = ("[.]*", "__pycache__", "*.pyc", "build", "dist", "site", "*.egg-info")
_OF_THE_EDIT = (
    "tests/project/test_breaks.py",
    "tests/project/test_house.py",
)  # they look at the text, not at what it does
_LIKELY_S, _WHOLE_S = 600, 3600  # the longest that the tests may take
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """What became of a break: the id of the test that caught it, "" if none did, and the seconds that it took."""

    caught_by: str
    seconds: float


def all_breaks() -> list[Any]:
    """Return the deliberate faults that tests must notice, each a `Break`."""
    found: list[Any] = runpy.run_path(str(ROOT / "tests/breaks/breaks.py"), run_name="breaks")["BREAKS"]
    return found


def matches(each: Any) -> int:
    """How often the old text of a break is in its file, which must be once."""
    path = ROOT / each.file
    return path.read_text().count(each.old) if path.exists() else 0


def try_break(each: Any, *, workers: int, likely_only: bool) -> Outcome:
    """Apply a break to a copy of the tree, and run the tests there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="break-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_IGNORED), symlinks=True)
        path = copy / each.file
        path.write_text(path.read_text().replace(each.old, each.new))
        _check_is_imported(copy)
        caught_by = _run(copy, [name for name in each.tests if (copy / name).exists()], workers, _LIKELY_S)
        if not caught_by and not likely_only:
            caught_by = _run(copy, ["tests"], workers, _WHOLE_S)
    return Outcome(caught_by, time.monotonic() - began)


def _check_is_imported(copy: Path) -> None:
    """The copy's package must come before the one that is installed."""
    program = "import importlib.util; print(importlib.util.find_spec('savable_pipeline').origin)"
    found = subprocess.run(
        [sys.executable, "-c", program], env=_environment(copy), cwd=copy, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).is_relative_to(copy), found.stdout


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def _run(copy: Path, tests: Sequence[str], workers: int, limit_s: float) -> str:
    """The id of the first test that fails; "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-n", str(workers)] if workers > 1 else []
    command += [f"--ignore={name}" for name in _OF_THE_EDIT]
    if not tests:
        return ""
    try:
        ran = subprocess.run(command, env=_environment(copy), cwd=copy, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(tests)}: no end in {limit_s:g} s", file=sys.stderr)
        return ""
    if ran.returncode == 0:
        return ""
    failed = _FAILED.search(ran.stdout)
    return failed[1] if failed else f"(pytest ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-300:]!r})"


def main() -> int:
    """Try breaks, and print a table of what was caught by which test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these breaks; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="breaks tried at a time")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest for each")
    parser.add_argument("--likely", action="store_true", help="run only the tests that catch a break most likely")
    arguments = parser.parse_args()
    breaks = [each for each in all_breaks() if arguments.only is None or each.name in arguments.only]
    if wrong := [f"{each.name}: {matches(each)} times in {each.file}" for each in breaks if matches(each) != 1]:
        print("the old text of a break must be in its file once; adapt the edit:", *wrong, sep="\n  ")
        return 2
    caught = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tries = pool.map(lambda each: try_break(each, workers=arguments.workers, likely_only=arguments.likely), breaks)
        for each, outcome in zip(breaks, tries, strict=True):
            caught += bool(outcome.caught_by)
            now = f"caught  {outcome.caught_by}" if outcome.caught_by else "NOT CAUGHT"
            before = "" if outcome.caught_by or not each.caught_by else f", but before by {each.caught_by}"
            print(f"{each.name:42} {outcome.seconds:6.0f} s  {now}{before}", flush=True)
    print(f"{caught} of {len(breaks)} caught")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
