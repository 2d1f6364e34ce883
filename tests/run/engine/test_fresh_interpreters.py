"""Workers that are fresh interpreters import the trainer's script: where that fails, it is told once, and shortly."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support.toy_faults import number_pipeline

LONGEST = 30  # lines that a trainer and its workers may write before one reads what to do

UNGUARDED = """
import sys
from functools import partial
import savable_pipeline as sp
from tests.support.toy_faults import number_pipeline
pipeline = partial(number_pipeline, sys.argv[1])
print(next(sp.SavableLoader(pipeline, seed=1, lanes=6, num_workers=2, workers=sp.Workers(start_method=sys.argv[2]))))
"""

UNDER_THE_GUARD = """
import sys
import savable_pipeline as sp
from tests.support.toy_faults import number_pipeline
if __name__ == "__main__":
    def pipeline(lane):
        return number_pipeline(sys.argv[1], lane)
    print(next(sp.SavableLoader(pipeline, seed=1, lanes=6, workers=sp.Workers(2, start_method=sys.argv[2]))))
"""

FAILS_AGAIN = """
import os, sys
from functools import partial
import savable_pipeline as sp
from tests.support.toy_faults import number_pipeline
os.mkdir(sys.argv[1] + "/made once")
if __name__ == "__main__":
    pipeline = partial(number_pipeline, sys.argv[1])
    print(next(sp.SavableLoader(pipeline, seed=1, lanes=6, workers=sp.Workers(2, start_method=sys.argv[2]))))
"""

ENDS_ITSELF = FAILS_AGAIN.replace(
    'os.mkdir(sys.argv[1] + "/made once")',
    """
def main_folder():
    if __name__ != "__main__":
        raise SystemExit("no folder given")
main_folder()
""",
)


@pytest.mark.parametrize(
    ("script", "method", "told"),
    [
        (UNGUARDED, "spawn", "the main module creates a loader with workers"),
        pytest.param(UNGUARDED, "forkserver", "the main module creates a loader with workers", marks=pytest.mark.long),
        pytest.param(
            UNDER_THE_GUARD,
            "spawn",
            "cannot import the pipeline: AttributeError: Can't get attribute 'pipeline'",
            marks=pytest.mark.long,
        ),
        (UNDER_THE_GUARD, "forkserver", "cannot import the pipeline: AttributeError: Can't get attribute 'pipeline'"),
        (FAILS_AGAIN, "spawn", "FileExistsError: [Errno 17]"),
        pytest.param(FAILS_AGAIN, "forkserver", "FileExistsError: [Errno 17]", marks=pytest.mark.long),
        pytest.param(ENDS_ITSELF, "spawn", "SystemExit: no folder given", marks=pytest.mark.long),
    ],
    ids=[
        "unguarded",
        "unguarded-forkserver",
        "under-the-guard",
        "under-the-guard-forkserver",
        "fails-again",
        "fails-again-forkserver",
        "ends-itself",
    ],
)
def test_script_that_workers_cannot_import_is_reported_once_with_a_fix(
    make_shards: Any, tmp_path: Path, script: str, method: str, told: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(script)
    shards = make_shards([20])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    run = subprocess.run([sys.executable, file, shards, method], capture_output=True, text=True, env=env, timeout=240)
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.count("WorkerError") == run.stderr.count(told) == 1 and "__name__ == '__main__'" in run.stderr
    assert len(run.stderr.splitlines()) < LONGEST, run.stderr


class Looks:
    """A pipeline that is pickled while a process starts, and sees what another thread that starts one would use."""

    def __init__(self, pipeline: Any, seen: set[str]) -> None:
        self._pipeline, self._seen = pipeline, seen

    def __reduce__(self) -> Any:
        self._seen.add(spawn.get_preparation_data.__module__)
        return partial, (self._pipeline,)

    def __call__(self, lane: sp.Lane) -> custom.Stage:
        stage: custom.Stage = self._pipeline(lane)
        return stage


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing_is_unchanged_while_a_process_starts(make_shards: Any, method: str) -> None:
    seen: set[str] = set()
    pipeline = Looks(partial(number_pipeline, str(make_shards([20]))), seen)
    with sp.SavableLoader(pipeline, seed=1, lanes=6, num_workers=1, workers=sp.Workers(start_method=method)) as loader:
        next(loader)
    assert seen == {"multiprocessing.spawn"}
