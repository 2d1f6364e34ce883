"""What imports cost, beside `import torch`: processor time of commands of their own, which take turns.

    python tools/bench/imports.py [--rounds 7] [--only worker]      only those with this in their name, and torch

Each round runs `python -c "import torch"` first, then the others; a ratio is to the torch of its round. A worker's time
is that of all processes below the trainer, from their start to the end after the first batch: lines of JSON, an encoder
of five lines that makes tensors, and a main module that imports torch, as a trainer's does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import savable_pipeline as sp
from savable_pipeline import custom

_TORCH = "import torch"
_ENCODERS = ("Captioning", "Chat", "Classification", "Contrastive", "Interleaved", "LanguageModeling")
_LINES = 400


class LengthEncoder(sp.TaskEncoder):
    """The length of a line, as a tensor."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> torch.Tensor:
        """One number."""
        return torch.tensor([len(sample["json"])])

    def batch(self, items: list[torch.Tensor], rng: sp.Rng) -> torch.Tensor:
        """A column of them."""
        return torch.stack(items)


def pipeline(folder: Path, encoder: LengthEncoder, lane: sp.Lane) -> sp.Batcher:
    """Lines in batches of four."""
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(custom.JsonlReader(folder, lane), size=16), encoder), size=4)


def print_worker_s(folder: Path, method: str) -> None:
    """The processor time of one worker, started by this method, and of the server that forks it if there is one."""
    made = partial(pipeline, folder, LengthEncoder())
    loader = sp.SavableLoader(made, seed=0, lanes=2, num_workers=1, workers=sp.Workers(prefetch=1, start_method=method))
    next(iter(loader))
    loader.close()
    print(_used(resource.RUSAGE_CHILDREN))


def _used(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def command_s(*command: str) -> float:
    """The processor time of a command, and of what it waits for."""
    before = _used(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    return _used(resource.RUSAGE_CHILDREN) - before


def worker_s(folder: Path, method: str) -> float:
    """What a trainer of its own prints of its worker."""
    command = [sys.executable, __file__, "worker", "--folder", os.fspath(folder), "--method", method]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def contenders(folder: Path) -> dict[str, Callable[[], float]]:
    """What is measured, by its name; torch is the first."""
    python, savable = sys.executable, os.fspath(Path(sys.executable).with_name("savable"))
    imports = [
        _TORCH,
        "import savable_pipeline",
        "import savable_pipeline as sp; sp.TarShardReader",
        "import savable_pipeline as sp; sp.SavableLoader",
        *(f"from task_encoders import {name}Encoder" for name in _ENCODERS),
    ]
    commands: dict[str, Callable[[], float]] = {text: partial(command_s, python, "-c", text) for text in imports}
    commands["savable --help"] = partial(command_s, savable, "--help")
    commands["savable info"] = partial(command_s, savable, "info", os.fspath(folder))
    workers = {f"a worker, {method}, to its first batch": method for method in ("spawn", "forkserver")}
    return commands | {name: partial(worker_s, folder, method) for name, method in workers.items()}


def main() -> None:
    """Print a table: the seconds of each, and its ratio to torch, lowest, median and highest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "worker"], default="all", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="measure those with this in their name, and torch")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "worker":
        print_worker_s(given.folder, given.method)
        return
    with tempfile.TemporaryDirectory() as place:
        lines: list[Any] = [{"id": number} for number in range(_LINES)]
        (Path(place) / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        every = contenders(Path(place))
        names = [name for name in every if name == _TORCH or given.only in name]
        rounds = [{name: every[name]() for name in names} for _ in range(given.rounds)]
    for name in names:
        found = [each[name] for each in rounds]
        ratios = [each[name] / each[_TORCH] for each in rounds]
        print(
            f"{name:<50} {statistics.median(found):6.2f} s   × torch {statistics.median(ratios):5.2f}"
            f"   ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
