"""Ranks that Lightning starts itself, forked or spawned, killed with the trainer and resumed."""

from __future__ import annotations

import multiprocessing
import os
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

KILLED_AT = 6


class Module(LightningModule):
    """Writes down each batch of its rank, and its loss."""

    def __init__(self, log: Path, kill: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 3)
        self._log, self._kill = log, kill

    def training_step(self, batch: Any, index: int) -> Any:
        if self._kill and self.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.cross_entropy(self.layer(batch["x"]), batch["label"])
        with Path(f"{self._log}-{self.global_rank}").open("a") as file:
            file.write(f"{digest(batch)} {float(loss).hex()}\n")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def make_loader(shards: Path, kind: str) -> sp.SavableLoader:
    return sp.SavableLoader(ToyPipeline(str(shards), kind), seed=7, lanes=LANES, num_workers=1)


def fit(folder: Path, run: str, strategy: str, kind: str, kill: bool, resume: str | None) -> None:
    torch.set_num_threads(1)
    saver = ModelCheckpoint(folder / run, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    limits: dict[str, Any] = {"max_steps": 10, "devices": 2, "strategy": strategy, "accelerator": "cpu"}
    data = SavableDataModule(partial(make_loader, folder / "shards", kind))
    module = Module(folder / (run if resume is None else "resumed"), kill)
    Trainer(callbacks=[saver], **limits, **quiet).fit(module, datamodule=data, ckpt_path=resume)


def run_in_a_process(*arguments: Any) -> int | None:
    """Its exit code: a fresh interpreter, in which Lightning may fork."""
    process = multiprocessing.get_context("spawn").Process(target=fit, args=arguments)
    process.start()
    process.join(300)
    if process.is_alive():
        process.kill()
    return process.exitcode


def lines(folder: Path, run: str) -> list[list[str]]:
    return [(folder / f"{run}-{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.parametrize("kind", ["endless", "counted"])
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_ranks_that_lightning_starts_have_batches_of_their_own_and_go_on(
    tmp_path: Path, strategy: str, kind: str
) -> None:
    write_training_shards(tmp_path / "shards")
    assert run_in_a_process(tmp_path, "straight", strategy, kind, False, None) == 0
    assert run_in_a_process(tmp_path, "killed", strategy, kind, True, None) != 0
    assert run_in_a_process(tmp_path, "killed", strategy, kind, False, str(tmp_path / "killed/step=4.ckpt")) == 0
    straight, resumed = lines(tmp_path, "straight"), lines(tmp_path, "resumed")
    assert [len(rank) for rank in straight] == [10, 10] and not set(straight[0]) & set(straight[1])
    assert resumed == [rank[4:] for rank in straight]
