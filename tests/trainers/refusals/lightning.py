"""Ranks that Lightning starts itself, forked or spawned, killed with the trainer and resumed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
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

STEPS = 10
SAVE_EVERY = 4


class Module(LightningModule):
    """Writes down each batch of its rank, and its loss."""

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


def fit(
    folder: Path, run: str, strategy: str, kind: str, kill_at: int | None = None, resume: str | None = None
) -> None:
    torch.set_num_threads(1)
    saver = ModelCheckpoint(folder / run, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    limits: dict[str, Any] = {"max_steps": STEPS, "devices": 2, "strategy": strategy, "accelerator": "cpu"}
    data = SavableDataModule(partial(make_loader, folder / "shards", kind))
    checkpoint = resume and str(folder / resume)
    Trainer(callbacks=[saver], **limits, **quiet).fit(
        Module(folder / run, kill_at), datamodule=data, ckpt_path=checkpoint
    )


def run_in_a_process(*arguments: Any) -> int | None:
    """Its exit code: a process forked from this one, so that only the ranks of `ddp_spawn` import all there is."""
    process = multiprocessing.get_context("fork").Process(target=fit, args=arguments)
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    return process.exitcode


def lines(folder: Path, run: str) -> list[list[str]]:
    return [(folder / f"{run}-{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.timeout(1000)  # four interpreters import Lightning for `ddp_spawn`
@pytest.mark.parametrize("kind", ["endless", "counted"])
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_ranks_that_lightning_starts_have_batches_of_their_own_and_go_on(
    tmp_path: Path, strategy: str, kind: str
) -> None:
    """However they were started, they do what forked ones do that were never killed."""
    write_training_shards(tmp_path / "shards")
    kill_at = random.randint(5, STEPS - 1)
    saved = kill_at // SAVE_EVERY * SAVE_EVERY
    assert run_in_a_process(tmp_path, "straight", "ddp_fork", kind) == 0
    assert run_in_a_process(tmp_path, "killed", strategy, kind, kill_at) == 1  # the parent says which rank was killed
    assert run_in_a_process(tmp_path, "resumed", strategy, kind, None, f"killed/step={saved}.ckpt") == 0
    straight, killed, resumed = [lines(tmp_path, run) for run in ("straight", "killed", "resumed")]
    assert [len(rank) for rank in straight] == [STEPS, STEPS] and not set(straight[0]) & set(straight[1])
    assert max(map(len, killed)) == kill_at
    assert killed == [rank[: len(seen)] for rank, seen in zip(straight, killed, strict=True)]
    assert resumed == [rank[saved:] for rank in straight]
