"""Check that the test suite catches each deliberate break of `tests/breaks/breaks.py`.

    python tools/house/breaks.py [--only NAME …] [--jobs N] [--likely]

Each break is applied to a copy of the repository, in which the tests then run: first those that most likely catch the
break, then the whole suite unless `--likely` is passed. A break is caught if a test fails. Run this before and after
deleting tests: the number of breaks caught must not fall. A break takes about 20 s if a likely test catches it.
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
# these tests check the source text, so any edit would fail them
_TESTS_OF_SOURCE = ("tests/project/test_breaks.py", "tests/project/test_house.py")
_LIKELY_LIMIT_S, _SUITE_LIMIT_S = 600, 3600  # timeouts of the likely tests and of the whole suite
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """Result of a break: the id of the test that caught it ("" if none did), and the seconds that it took."""

    caught_by: str
    seconds: float


def all_breaks() -> list[Any]:
    """Read the deliberate errors that tests must catch, each a `Break`."""
    breaks: list[Any] = runpy.run_path(str(ROOT / "tests/breaks/breaks.py"), run_name="breaks")["BREAKS"]
    return breaks


def count_matches(mistake: Any) -> int:
    """Count how often the old text of a break is in its file. It must be there once."""
    path = ROOT / mistake.file
    return path.read_text().count(mistake.old) if path.exists() else 0


def try_break(mistake: Any, *, workers: int, likely_only: bool) -> Outcome:
    """Apply a break to a copy of the repository, and run the tests there.

    Args:
        mistake: The `Break`.
        workers: Processes of pytest.
        likely_only: Whether to run only the tests that most likely catch it.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="break-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_IGNORED), symlinks=True)
        path = copy / mistake.file
        path.write_text(path.read_text().replace(mistake.old, mistake.new))
        _check_copy_is_imported(copy)
        likely = [name for name in mistake.tests if (copy / name).exists()]
        caught_by = _run_tests(copy, likely, workers, _LIKELY_LIMIT_S)
        if not caught_by and not likely_only:
            caught_by = _run_tests(copy, ["tests"], workers, _SUITE_LIMIT_S)
    return Outcome(caught_by, time.monotonic() - start)


def _check_copy_is_imported(copy: Path) -> None:
    """Check that tests import the package of the copy, not the installed one."""
    program = "import importlib.util; print(importlib.util.find_spec('savable_pipeline').origin)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=_environment(copy), cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(copy), result.stdout


def _environment(copy: Path) -> dict[str, str]:
    """Return the environment in which Python imports the packages of the copy."""
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def _run_tests(copy: Path, tests: Sequence[str], workers: int, limit_s: float) -> str:
    """Run tests, and return the id of the first that fails, or "" if all pass or the time is over."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-n", str(workers)] if workers > 1 else []
    command += [f"--ignore={name}" for name in _TESTS_OF_SOURCE]
    if not tests:
        return ""
    try:
        result = subprocess.run(
            command, env=_environment(copy), cwd=copy, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        print(f"{' '.join(tests)}: not finished in {limit_s:g} s", file=sys.stderr)
        return ""
    if result.returncode == 0:
        return ""
    failed = _FAILED.search(result.stdout)
    output = (result.stdout + result.stderr)[-300:]
    return failed[1] if failed else f"(pytest ended with {result.returncode}: {output!r})"


def main() -> int:
    """Try breaks, and print which test catches each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these breaks; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="breaks tried at a time")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest for each")
    parser.add_argument("--likely", action="store_true", help="run only the tests that catch a break most likely")
    arguments = parser.parse_args()
    breaks = [each for each in all_breaks() if arguments.only is None or each.name in arguments.only]
    counts = {each: count_matches(each) for each in breaks}
    if wrong := [f"{each.name}: {count} times in {each.file}" for each, count in counts.items() if count != 1]:
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
