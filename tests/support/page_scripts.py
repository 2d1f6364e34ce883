"""Run the scripts of trainers' pages unchanged, twice each: `python -m tests.support.page_scripts FOLDER TRAINER …`.

The second run continues from what the first one saved. The scripts' imports are done once. Each script runs in a
process
forked from this one, in a folder of its own with `shards/`, and several scripts run in parallel.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.project.pages import write_captioned_shards
from tests.trainers.drive import child, ended, preload, script_of

STEPS = {'"30ba"': '"40ba"', '"max_steps": 30': '"max_steps": 40', '".", 30': '".", 40', ", 30, 10": ", 40, 10"}
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
BY_TORCHRUN = {"deepspeed", "torchtitan", "megatron"}


def longer(script: str) -> str:
    """Return the script with ten more steps."""
    for old, new in STEPS.items():
        if old in script:
            return script.replace(old, new)
    raise AssertionError("a script of a page trains for 30 steps")


def run(trainer: str, script: str, folder: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    if trainer in BY_TORCHRUN:
        os.environ |= ONE_RANK
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, f"train_{trainer}.py", "exec"), names)


def run_twice(trainer: str, folder: Path) -> None:
    """Raise SystemExit unless the script ends, saves, and continues from there for ten steps."""
    folder.mkdir(parents=True)
    write_captioned_shards(folder / "shards")
    script = script_of(trainer)
    for text in (script, longer(script)):
        if ended(child(partial(run, trainer, text, folder))):
            raise SystemExit(f"{trainer}: see above")
    saved = sorted(path.name for path in (folder / "run").iterdir())
    for step in ("10", "20", "30", "40"):
        if not any(step in name for name in saved):
            raise SystemExit(f"{trainer} saved {saved}")


def main(folder: Path, trainers: list[str]) -> None:
    for trainer in trainers:
        preload(trainer)
    children = {trainer: child(partial(run_twice, trainer, folder / trainer)) for trainer in trainers}
    if failed := [trainer for trainer, pid in children.items() if ended(pid)]:
        raise SystemExit(f"{', '.join(failed)}: see above")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
