"""Train a small model on 1, 2 and 4 ranks, kill and resume it, and compare every bit of every loss.

    torchrun ─ W ranks ─ six trainings in turn, packed or not, with 0, 1 and 2 workers ─ SIGKILL ─ torchrun ─ …

`python tools/soak/losses.py SHARDS FOLDER STEPS PACE` runs one rank.
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
STEPS, SAVE_STEP = 12, 5  # each run saves after step 5, when every lane has open packs even on 4 ranks
PACE_S = 0.05  # the least time of a step of the run that is killed
_STUCK_S = 240.0  # timeout of a run


class Training:
    """Model, optimizer and loader of one training on one rank, and a log of its losses."""

    def __init__(self, shards: str, folder: Path, pack: bool, num_workers: int) -> None:
        self.name = f"{'packed' if pack else 'unpacked'}_{num_workers}"
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)
        self._model = torch.nn.Sequential(
            torch.nn.Linear(CROP * CROP, 16), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(16, 1)
        )
        torch.manual_seed(SEED + self._rank)  # dropout differs by rank
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
        """Train on the next batch, and log all bits of the loss."""
        batch = next(self._loader)
        torch.set_rng_state(self._rng)  # the trainings of a rank take turns
        images = torch.from_numpy(batch["images"]).reshape(-1, CROP * CROP).float() / 255
        targets = torch.linspace(0, 1, len(images))
        loss = (self._model(images).squeeze(1) - targets).square().mean()
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
        if self.step == SAVE_STEP:
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


def run_rank(shards: str, folder: Path, steps: int, pace_s: float) -> None:
    """Run all trainings of this rank, one step of each in turn. They resume from their checkpoints, if any."""
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


def losses(shards: Path, folder: Path) -> Iterator[Row]:
    """Compare an undisturbed run with one that is killed and resumed, for each number of ranks."""
    for world_size in WORLD_SIZES:
        undisturbed, killed = folder / f"{world_size}_calm", folder / f"{world_size}_killed"
        _finish(_start(shards, undisturbed, world_size, 0.0))
        kill_step = random.randrange(SAVE_STEP + 1, STEPS - 2)
        _kill(_start(shards, killed, world_size, PACE_S), killed, kill_step)
        log_before_kill = _read_logs(killed, world_size)
        _finish(_start(shards, killed, world_size, 0.0))
        for pack in (False, True):
            for workers in WORKERS:
                name = f"{'packed' if pack else 'unpacked'}_{workers}"
                yield _row(undisturbed, killed, log_before_kill, world_size, name)


def _start(shards: Path, folder: Path, world_size: int, pace_s: float) -> subprocess.Popen[bytes]:
    """Start all ranks of a run by torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    program = [__file__, str(shards), str(folder), str(STEPS), str(pace_s)]
    return subprocess.Popen(
        [*torchrun, *program], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=(folder / "errors").open("ab")
    )


def _finish(run: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a run. Raises `SystemExit` if it failed."""
    if run.wait(_STUCK_S):
        raise SystemExit(f"torchrun ended with {run.returncode}: see the file `errors` in the folder of the run")


def _kill(run: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Kill torchrun and all ranks, once rank 0 has passed a step of its last training."""
    log_of_last = folder / f"packed_{WORKERS[-1]}_rank0.log"
    deadline = time.monotonic() + _STUCK_S
    while not (log_of_last.exists() and len(log_of_last.read_text().splitlines()) > step):
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"torchrun ended with {run.returncode} before it could be killed: see {folder}/errors")
        time.sleep(0.002)
    time.sleep(random.uniform(0, PACE_S))
    ranks = descendants(run.pid)
    kill(run.pid, os.getpid())
    for pid in ranks:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, 9)
    run.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.01)


def _read_logs(folder: Path, world_size: int) -> dict[str, list[str]]:
    """Return the complete lines of each training of each rank, by the name of the log."""
    logs = {}
    for path in folder.glob("*_rank*.log"):
        lines = path.read_text().splitlines(keepends=True)
        logs[path.stem] = [line.strip() for line in lines if line.endswith("\n")]
    assert len(logs) == 2 * len(WORKERS) * world_size
    return logs


def _row(undisturbed: Path, killed: Path, log_before_kill: dict[str, list[str]], world_size: int, name: str) -> Row:
    """Compare the losses of one training on all ranks, before the kill and after the resume."""
    expected, found = _read_logs(undisturbed, world_size), _read_logs(killed, world_size)
    problem, compared, repeated = "", 0, 0
    kind, workers = name.split("_")  # such as "packed" and "2"
    without_workers = f"{kind}_{WORKERS[0]}"  # this training must have the same losses
    for number in range(world_size):
        training = f"{name}_rank{number}"
        lines = expected[training]
        resumed = found[training][len(log_before_kill[training]) :]
        repeated += len(log_before_kill[training]) - SAVE_STEP
        compared += len(lines)
        if len(lines) != STEPS or lines != expected[f"{without_workers}_rank{number}"]:
            problem = problem or f"rank {number}: not the losses of {without_workers}"
        if log_before_kill[training] != lines[: len(log_before_kill[training])] or resumed != lines[SAVE_STEP:]:
            problem = problem or f"rank {number}: other losses"
    items = sum(_open_items(killed / f"{name}_rank{number}.pt") for number in range(world_size))
    if kind == "packed" and not items:
        problem = problem or "no pack was open at the kill"
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    done = f"killed, {repeated} steps again" + (f", {items} items in open packs" if items else "")
    return Row("losses", f"{kind}, {ranks}, {workers} workers", done, f"{compared} losses", problem)


def _open_items(path: Path) -> int:
    """Count the items in open packs of a checkpoint."""
    state: dict[str, Any] = torch.load(path)["data"]
    lanes = [unpack_state(state[lane_name(lane)], LaneState, "") for lane in range(LANES) if lane_name(lane) in state]
    packs = [lane.stages["source"].get("packs", []) for lane in lanes if lane.stages is not None]
    return sum(len(pack) for open_packs in packs for pack in open_packs)


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
