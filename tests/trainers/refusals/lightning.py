"""Ranks that Lightning starts itself, forked or spawned, killed with the trainer and resumed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.lightning import SavableDataModule
from tests.support.toy_training import LANES, ToyPipeline, write_training_shards
from tests.trainers.cases import check_slots, loader_batches

SAVE_EVERY = 4
BY_OTHERS = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # set in a process by trainers


class Module(LightningModule):
    """Module that writes each batch of its rank, and its loss, to a file."""

    def __init__(self, log: Path, kill_at: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 3)
        self._log, self._kill_at = log, kill_at

    def training_step(self, batch: Any, index: int) -> Any:
        if self.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.cross_entropy(self.layer(batch["x"]), batch["label"])
        with Path(f"{self._log}-{self.global_rank}").open("a") as file:
            file.write(f"{digest(batch)} {float(loss.detach()).hex()}\n")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def make_loader(shards: Path, kind: str) -> sp.SavableLoader:
    return sp.SavableLoader(ToyPipeline(str(shards), kind), seed=7, lanes=LANES, num_workers=1)


@dataclass(frozen=True)
class Run:
    """One run of the trainer: its name, and the number of ranks that Lightning starts."""

    name: str
    strategy: str
    ranks: int
    steps: int
    kill_at: int | None = None
    resume: str | None = None


def fit(folder: Path, kind: str, run: Run) -> None:
    for name in BY_OTHERS:
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    saver = ModelCheckpoint(folder / run.name, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    ranks: dict[str, Any] = {"devices": run.ranks, "strategy": run.strategy, "accelerator": "cpu"}
    data = SavableDataModule(partial(make_loader, folder / "shards", kind))
    Trainer(callbacks=[saver], max_steps=run.steps, **ranks, **quiet).fit(
        Module(folder / run.name, run.kill_at), datamodule=data, ckpt_path=run.resume and folder / run.resume
    )


def run_in_a_process(*arguments: Any) -> int | None:
    """Its exit code: a process forked from one that has only imported this file.

    So only the ranks of `ddp_spawn` import all there is. A fork of this process would have the process group, the
    threads and the environment of the other trainers whose tests ran before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=fit, args=arguments)
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    return process.exitcode


def killed_and_resumed(folder: Path, kind: str, strategy: str, before: int, after: int, steps: int) -> tuple[int, Any]:
    """Kill a run, and resume it for `steps` steps. Return the step of the checkpoint, and the lines of both runs."""
    kill_at = random.choice([5, 6, 7, 9])
    saved = kill_at // SAVE_EVERY * SAVE_EVERY
    killed = Run("killed", strategy, before, 10, kill_at)
    assert run_in_a_process(folder, kind, killed) == 1  # the parent says which rank was killed
    resumed = Run("resumed", strategy, after, saved + steps, resume=f"killed/step={saved}.ckpt")
    assert run_in_a_process(folder, kind, resumed) == 0
    found = lines(folder, killed), lines(folder, resumed)
    assert [*map(len, found[0])] == [kill_at] * before and [*map(len, found[1])] == [steps] * after
    return saved, found


def lines(folder: Path, run: Run) -> list[list[str]]:
    """Return "BATCH LOSS" of each step, by rank."""
    return [(folder / f"{run.name}-{rank}").read_text().splitlines() for rank in range(run.ranks)]


def batches(seen: list[str]) -> list[str]:
    return [line.split()[0] for line in seen]


ranks_of_lightning = pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
with_and_without_length = pytest.mark.parametrize("kind", ["endless", "counted"])


@pytest.mark.timeout(1000)  # four interpreters import Lightning for `ddp_spawn`
@with_and_without_length
@ranks_of_lightning
def test_ranks_started_by_lightning_have_their_own_batches_and_resume(tmp_path: Path, strategy: str, kind: str) -> None:
    """However they were started, they do what forked ones do that were never killed."""
    write_training_shards(tmp_path / "shards")
    never_killed = Run("straight", "ddp_fork", 2, 14)
    assert run_in_a_process(tmp_path, kind, never_killed) == 0
    straight = lines(tmp_path, never_killed)
    saved, (killed, resumed) = killed_and_resumed(tmp_path, kind, strategy, 2, 2, 6)
    assert not set(straight[0]) & set(straight[1])
    assert killed == [rank[: len(killed[0])] for rank in straight]
    assert resumed == [rank[saved : saved + 6] for rank in straight]


@pytest.mark.timeout(1000)
@with_and_without_length
@ranks_of_lightning
@pytest.mark.parametrize("before,after", [(2, 1), (1, 2)])
def test_another_number_of_ranks_resumes_at_the_same_slot(
    tmp_path: Path, strategy: str, kind: str, before: int, after: int
) -> None:
    """Through the end of an epoch where it has one, and with the weights that were saved."""
    write_training_shards(tmp_path / "shards")
    slots = loader_batches("lightning", tmp_path, kind, 60)
    saved, (killed, resumed) = killed_and_resumed(tmp_path, kind, strategy, before, after, 14)
    for rank in range(before):
        check_slots(batches(killed[rank]), slots, rank, before, 0)
    for rank in range(after):
        check_slots(batches(resumed[rank]), slots, rank, after, saved * before)
    scored = {rank[saved] for rank in killed}
    assert len(scored & {rank[0] for rank in resumed}) == 1  # one batch both trained on, with the same loss
