"""A small model on 1, 2 and 4 ranks, killed in the middle of packs and resumed: every loss of every rank, to the bit.

    torchrun ─ W ranks ─ six trainings in turn, packed or not, with 0, 1 and 2 workers ─ SIGKILL ─ torchrun ─ …

`python tools/soak/losses.py SHARDS FOLDER STEPS PACE` is one rank.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline import CROP, soak_pipeline
from report import Row, descendants, kill

import savable_pipeline as sp
from savable_pipeline.run.state.lane_state import LaneState, unpack_state
from savable_pipeline.run.state.state_dict import lane_name

SEED, LANES = 3, 12
WORLD_SIZES, WORKERS = (1, 2, 4), (0, 1, 2)
STEPS, SAVED = 12, 5  # saved after step 5, when every lane has open packs at 4 ranks
PACE_S = 0.05  # a step of the run that is killed takes this at least
_STUCK_S = 240.0


# One rank.


class Training:
    """A model, its optimizer and its loader, and a file with the loss of every step."""

    def __init__(self, shards: str, folder: Path, pack: bool, num_workers: int) -> None:
        self.name = f"{'packed' if pack else 'unpacked'}_{num_workers}"
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)
        self._model = torch.nn.Sequential(
            torch.nn.Linear(CROP * CROP, 16), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(16, 1)
        )
        torch.manual_seed(SEED + self._rank)  # of dropout
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self._loader = sp.SavableLoader(
            partial(soak_pipeline, shards, pack=pack, copies=1), seed=SEED, lanes=LANES, num_workers=num_workers
        )
        self._path = folder / f"{self.name}_rank{self._rank}.pt"
        self._rng = torch.get_rng_state()
        self.step = 0
        if self._path.exists():
            self._restore()
        self._log = (folder / f"{self.name}_rank{self._rank}.log").open("a")

    def take_step(self) -> None:
        """Train on the next batch, and write down the loss, all digits."""
        batch = next(self._loader)
        torch.set_rng_state(self._rng)
        images = torch.from_numpy(batch["images"]).reshape(-1, CROP * CROP).float() / 255
        wanted = torch.linspace(0, 1, len(images))
        loss = (self._model(images).squeeze(1) - wanted).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        for gradient in (parameter.grad for parameter in self._model.parameters()):
            assert gradient is not None
            dist.all_reduce(gradient)
            gradient /= self._ranks
        self._optimizer.step()
        self._rng = torch.get_rng_state()
        self._log.write(f"{self.step} {loss.item().hex()} {len(images)}\n")
        self._log.flush()
        self.step += 1
        if self.step == SAVED:
            self._save()

    def _save(self) -> None:
        saved = {
            "step": self.step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rng": self._rng,
            "data": self._loader.state_dict(),
        }
        torch.save(saved, self._path.with_suffix(".aside"))
        self._path.with_suffix(".aside").replace(self._path)

    def _restore(self) -> None:
        saved = torch.load(self._path)
        self.step, self._rng = saved["step"], saved["rng"]
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._loader.load_state_dict(saved["data"])

    def close(self) -> None:
        self._loader.close()
        self._log.close()


def rank(shards: str, folder: Path, steps: int, pace_s: float) -> None:
    """All trainings of this rank, a step of each in turn; from their checkpoints, where there are some."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trainings = [Training(shards, folder, pack, workers) for pack in (False, True) for workers in WORKERS]
    while trainings[0].step < steps:
        for training in trainings:
            training.take_step()
        time.sleep(pace_s)
    for training in trainings:
        training.close()
    dist.destroy_process_group()


# The experiment.


def losses(shards: Path, folder: Path) -> Iterator[Row]:
    """For each number of ranks: a run that is not disturbed, and one that is killed and resumed."""
    for world_size in WORLD_SIZES:
        calm, killed = folder / f"{world_size}_calm", folder / f"{world_size}_killed"
        for target in (calm, killed):
            target.mkdir(parents=True)
        _finish(_start(shards, calm, world_size, 0.0))
        last = random.randrange(SAVED + 1, STEPS - 2)
        _kill(_start(shards, killed, world_size, PACE_S), killed, last)
        cut = _read(killed, world_size)
        _finish(_start(shards, killed, world_size, 0.0))
        for pack in (False, True):
            for workers in WORKERS:
                yield _row(calm, killed, cut, world_size, f"{'packed' if pack else 'unpacked'}_{workers}")


def _start(shards: Path, folder: Path, world_size: int, pace_s: float) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    rank_of_it = [__file__, str(shards), str(folder), str(STEPS), str(pace_s)]
    return subprocess.Popen(
        [*torchrun, *rank_of_it], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=(folder / "errors").open("ab")
    )


def _finish(run: subprocess.Popen[bytes]) -> None:
    if run.wait(_STUCK_S):
        raise SystemExit(f"torchrun ended with {run.returncode}: see the file `errors` in the folder of the run")


def _kill(run: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Kill torchrun and all ranks, from outside, when a rank has come to a step of its last training."""
    last = folder / f"packed_{WORKERS[-1]}_rank0.log"
    deadline = time.monotonic() + _STUCK_S
    while not (last.exists() and len(last.read_text().splitlines()) > step):
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"torchrun ended with {run.returncode} before it could be killed: see {folder}/errors")
        time.sleep(0.002)
    time.sleep(random.uniform(0, PACE_S))
    ranks = descendants(run.pid)
    kill(run.pid, os.getpid())
    for pid in ranks:
        _kill_wherever(pid)
    run.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.01)


def _kill_wherever(pid: int) -> None:
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, 9)


def _read(folder: Path, world_size: int) -> dict[str, list[str]]:
    """The whole lines that each training of each rank has written."""
    found = {}
    for path in folder.glob("*_rank*.log"):
        lines = path.read_text().splitlines(keepends=True)
        found[path.stem] = [line.strip() for line in lines if line.endswith("\n")]
    assert len(found) == 2 * len(WORKERS) * world_size
    return found


def _row(calm: Path, killed: Path, cut: dict[str, list[str]], world_size: int, name: str) -> Row:
    expected, found = _read(calm, world_size), _read(killed, world_size)
    wrong, compared, again = "", 0, 0
    alone = f"{name.split('_')[0]}_{WORKERS[0]}"  # with no workers: the same losses
    for number in range(world_size):
        training = f"{name}_rank{number}"
        lines = expected[training]
        resumed = found[training][len(cut[training]) :]
        again += len(cut[training]) - SAVED
        compared += len(lines)
        if len(lines) != STEPS or lines != expected[f"{alone}_rank{number}"]:
            wrong = wrong or f"rank {number}: not the losses of {alone}"
        if cut[training] != lines[: len(cut[training])] or resumed != lines[SAVED:]:
            wrong = wrong or f"rank {number}: other losses"
    items = sum(_open_items(killed / f"{name}_rank{number}.pt") for number in range(world_size))
    if name.startswith("packed") and not items:
        wrong = wrong or "no pack was open where it was cut"
    ranks, workers = f"{world_size} rank{'s' * (world_size > 1)}", name.split("_")[1]
    done = f"killed, {again} steps again" + (f", {items} items in open packs" if items else "")
    return Row("losses", f"{name.split('_')[0]}, {ranks}, {workers} workers", done, f"{compared} losses", wrong)


def _open_items(path: Path) -> int:
    """How many items lie in the open packs of a checkpoint."""
    state: dict[str, Any] = torch.load(path)["data"]
    lanes = [unpack_state(state[lane_name(lane)], LaneState, "") for lane in range(LANES) if lane_name(lane) in state]
    packs = [lane.stages["source"].get("packs", []) for lane in lanes if lane.stages is not None]
    return sum(len(pack) for open_packs in packs for pack in open_packs)


if __name__ == "__main__":
    rank(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
