"""Lightning's checkpoints, of the ends of epochs and of any moment of a step. Run in a process that has imported it."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.tuner import Tuner

import savable_pipeline as sp
from savable_pipeline.errors import StateError
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.lightning import SavableDataModule
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.support.toy_training import LANES, Noisy, ToyPipeline, write_training_shards

EPOCH = 18  # batches


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that builds a loader: endless, or of 18 batches per epoch."""
    folder = tmp_path_factory.mktemp("data")
    write_training_shards(folder / "shards")

    def maker(kind: str = "counted", encoder: type[Noisy] = Noisy, **settings: Any) -> Callable[[], sp.SavableLoader]:
        pipeline = ToyPipeline(str(folder / "shards"), kind, encoder=encoder)
        return lambda: sp.SavableLoader(pipeline, seed=7, lanes=LANES, **settings)

    return maker


class Optimizer(torch.optim.SGD):
    """Optimizer that calls `during` while it steps."""

    def __init__(self, module: Module) -> None:
        super().__init__(module.layer.parameters(), lr=0.05)
        self.module = module

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.module.at("optimizer")
        super().step()
        self.module.stepped_on = len(self.module.seen)
        self.module.at("stepped")
        return loss


class Module(LightningModule):
    """Notes its batches, and how many of them the optimizer stepped on; something happens in the one numbered `n`."""

    def __init__(self, where: str = "", n: int = 0, what: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 3)
        self.seen: list[str] = []
        self.stepped_on = 0
        self.happens = (where, n, what)

    def at(self, where: str) -> None:
        wanted, n, what = self.happens
        if where == wanted and len(self.seen) == n:
            self.happens = ("", 0, what)
            what()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.at("fetched")
        return batch

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen.append(digest(batch))
        self.at("step")
        return torch.nn.functional.cross_entropy(self.layer(batch["x"]), batch["label"])

    def on_after_backward(self) -> None:
        self.at("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self.at("end")

    def validation_step(self, batch: Any, index: int) -> None:
        self.at("validation")
        self.log("score", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = Optimizer(self)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    @property
    def weights(self) -> str:
        return digest([part.detach() for part in self.layer.parameters()])


def trainer(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"limit_val_batches": 0, "enable_checkpointing": bool(callbacks), **quiet, **settings}
    return Trainer(accelerator="cpu", default_root_dir=folder, callbacks=[*callbacks], **settings)


def fit(made: Trainer, data: SavableDataModule, module: Module | None = None, resume: Path | None = None) -> Module:
    module = module or Module()
    made.fit(module, datamodule=data, ckpt_path=resume)
    return module


def newest(folder: Path) -> Path:
    return max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


# Checkpoints of the ends of epochs.

ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Path], list[Callback]]]] = {
    "default": ({}, {}, lambda folder: [ModelCheckpoint(folder)]),
    "no length": ({"kind": "packed"}, {}, lambda folder: [ModelCheckpoint(folder)]),
    "epoch_slots": ({"kind": "endless", "epoch_slots": 12}, {}, lambda folder: [ModelCheckpoint(folder)]),
    "limit": ({"kind": "endless"}, {"limit_train_batches": 10}, lambda folder: [ModelCheckpoint(folder)]),
    "save_last": ({}, {}, lambda folder: [ModelCheckpoint(folder, save_last=True)]),
    "monitor": ({}, {"limit_val_batches": 3}, lambda folder: [ModelCheckpoint(folder, monitor="score", save_top_k=-1)]),
    "monitor, no length": (
        {"kind": "packed"},
        {"limit_val_batches": 3},
        lambda folder: [ModelCheckpoint(folder, monitor="score", save_top_k=-1)],
    ),
    "accumulation": ({}, {"accumulate_grad_batches": 4}, lambda folder: [ModelCheckpoint(folder)]),
}


@pytest.mark.parametrize("case", ENDS)
def test_run_resumes_after_the_epoch_of_its_last_checkpoint(make: Any, tmp_path: Path, case: str) -> None:
    loader, settings, callbacks = ENDS[case]

    def run(epochs: int, name: str, resume: Path | None = None) -> Module:
        data = SavableDataModule(make(**loader), val=make(on_iter="restart"))
        made = trainer(tmp_path, *callbacks(tmp_path / name), max_epochs=epochs, **settings)
        return fit(made, data, resume=resume)

    straight, first = run(2, "straight"), run(1, "first")
    resumed = run(2, "resumed", newest(tmp_path / "first"))
    assert first.seen + resumed.seen == straight.seen and len(first.seen) == len(resumed.seen) > 0
    assert resumed.weights == straight.weights


@pytest.mark.parametrize(
    "kind,part", [("endless", 3), ("counted", 3), ("packed", 3), ("counted", 0.25), ("counted", 1.0)]
)
def test_overfitting_run_gets_the_same_batches_in_each_epoch_and_after_resumes(
    make: Any, tmp_path: Path, kind: str, part: float
) -> None:
    def run(name: str, resume: Path | None = None, epochs: int = 3) -> Module:
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        ends = ModelCheckpoint(tmp_path / name, filename="end", save_on_train_epoch_end=True)
        made = trainer(tmp_path, saver, ends, max_epochs=epochs, overfit_batches=part, limit_val_batches=2)
        return fit(made, SavableDataModule(make(kind), val=make(on_iter="restart")), resume=resume)

    of_epoch = part if part == 3 else int(EPOCH * part)
    straight = run("straight")
    assert straight.seen == straight.seen[:of_epoch] * 3
    for step in (of_epoch - 1, of_epoch, of_epoch + 1):
        resumed = run(f"{step}", tmp_path / f"straight/step={step}.ckpt")
        assert resumed.seen == straight.seen[step:], step
        assert resumed.weights == straight.weights
    run("one", epochs=1)
    assert run("two", tmp_path / "one/end.ckpt").seen == straight.seen[of_epoch:]


def test_early_stopped_run_resumes_after_its_last_epoch(make: Any, tmp_path: Path) -> None:
    def run(patience: int, resume: Path | None = None) -> Module:
        stop = EarlyStopping("score", patience=patience)
        saver = ModelCheckpoint(tmp_path / f"{patience}")
        data = SavableDataModule(make(), val=make(on_iter="restart"))
        return fit(trainer(tmp_path, stop, saver, max_epochs=3, limit_val_batches=1), data, resume=resume)

    straight, first = run(9), run(1)
    assert len(first.seen) == 2 * EPOCH
    assert first.seen + run(8, newest(tmp_path / "1")).seen == straight.seen


def test_a_trainer_that_has_trained_needs_the_state_of_the_loader(make: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, ModelCheckpoint(tmp_path / "saved"), max_epochs=1)
    fit(made, SavableDataModule(make()))
    made.fit_loop.max_epochs = 2
    with pytest.raises(StateError, match=r"trained on 18 batches in 1 whole epochs, but has no state of the loader"):
        fit(made, SavableDataModule(make()))
    saved = torch.load(newest(tmp_path / "saved"), weights_only=False)
    assert len(saved["loops"]["fit_loop"]["state_dict"].pop("combined_loader")) == 1
    torch.save(saved, tmp_path / "without.ckpt")
    with pytest.raises(StateError, match="from a checkpoint of a SavableDataModule"):
        fit(trainer(tmp_path, max_epochs=2), SavableDataModule(make()), resume=tmp_path / "without.ckpt")


def test_data_module_without_our_setup_is_an_error(make: Any, tmp_path: Path) -> None:
    class Own(SavableDataModule):
        def setup(self, stage: str) -> None:
            pass

    fit(trainer(tmp_path, ModelCheckpoint(tmp_path / "saved"), max_epochs=1), SavableDataModule(make()))
    with pytest.raises(StateError, match=r"calls super\(\).setup\(stage\)"):
        fit(trainer(tmp_path, max_epochs=2), Own(make()), resume=newest(tmp_path / "saved"))


def no_loader() -> sp.SavableLoader:
    raise AssertionError("a rank makes it")


def test_data_module_of_plain_functions_can_be_pickled_to_spawned_ranks() -> None:
    pickle.loads(pickle.dumps(SavableDataModule(no_loader, val=no_loader)))


# Any moment of a step.


class Broken(Exception):
    pass


def broken() -> None:
    raise Broken


@pytest.mark.parametrize("kind,accumulate", [("endless", 1), ("endless", 3), ("counted", 3)])
@pytest.mark.parametrize("where", ["fetched", "step", "backward", "end"])
def test_error_at_any_moment_leaves_an_exact_checkpoint(
    make: Any, tmp_path: Path, where: str, kind: str, accumulate: int
) -> None:
    settings = {"max_steps": 30 // accumulate, "accumulate_grad_batches": accumulate}
    straight = fit(trainer(tmp_path, **settings), SavableDataModule(make(kind)))
    n = random.choice([1, 4, 5, 6, EPOCH - 1, EPOCH, EPOCH + 1])
    module = Module(where, n, broken)
    with pytest.raises(Broken):
        fit(trainer(tmp_path, OnExceptionCheckpoint(tmp_path), **settings), SavableDataModule(make(kind)), module)
    resumed = Module()
    fit(trainer(tmp_path, **settings), SavableDataModule(make(kind)), resumed, tmp_path / "on_exception.ckpt")
    assert module.seen[: module.stepped_on] + resumed.seen == straight.seen, n
    assert resumed.weights == straight.weights, n


def test_checkpoint_from_inside_the_optimizer_is_an_error(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = SavableDataModule(make("endless"))
    with pytest.raises(Broken), caplog.at_level("WARNING", logger="savable_pipeline"):
        fit(trainer(tmp_path, OnExceptionCheckpoint(tmp_path), max_steps=9), data, Module("optimizer", 5, broken))
    assert "during an optimizer step, after 4 steps" in caplog.text
    straight, resumed = Module(), Module()
    fit(trainer(tmp_path, max_steps=9), SavableDataModule(make("endless")), straight)
    fit(trainer(tmp_path, max_steps=9), SavableDataModule(make("endless")), resumed, tmp_path / "on_exception.ckpt")
    assert resumed.seen == straight.seen[4:]


@pytest.mark.parametrize("kind,accumulate", [("endless", 3), ("counted", 1)])
@pytest.mark.parametrize("where", ["fetched", "step", "optimizer", "stepped", "end", "validation", "encode"])
def test_signal_at_any_moment_saves_an_exact_checkpoint(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kind: str, accumulate: int
) -> None:
    """SLURM's, before it ends a job."""
    settings = {"max_steps": 24 // accumulate, "accumulate_grad_batches": accumulate, "limit_val_batches": 2}
    settings |= {"val_check_interval": 6, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    n = 12 if where == "validation" else random.choice([3, 4, 5, 6, 7, 8, 9, 19])
    n = n // accumulate * accumulate if where in ("optimizer", "stepped") else n  # where the optimizer is at work
    module = Module()

    class Signals(Noisy):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            module.at("encode")
            return super().encode(sample, rng)

    def run(folder: Path, resume: Path | None = None, **more: Any) -> Module:
        data = SavableDataModule(make(kind, Signals), val=make(on_iter="restart"))
        return fit(trainer(folder, **settings, **more), data, module, resume)

    straight = run(tmp_path)
    for name, value in {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    module = Module(where, n, partial(os.kill, os.getpid(), signal.SIGUSR1))
    run(tmp_path / "killed", plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)])
    assert module.seen == straight.seen and module.weights == straight.weights  # it was not ended
    monkeypatch.undo()
    module = Module()
    resumed = run(tmp_path, tmp_path / "killed/hpc_ckpt_1.ckpt")
    first = len(straight.seen) - len(resumed.seen)
    assert n - accumulate <= first <= n and first % accumulate == 0, (n, first)
    assert resumed.seen == straight.seen[first:]
    assert resumed.weights == straight.weights, n


@pytest.mark.parametrize("where,accumulate", [("fetched", 3), ("step", 1), ("step", 3), ("end", 3)])
def test_interrupted_fit_continues_in_the_next_one(make: Any, tmp_path: Path, where: str, accumulate: int) -> None:
    settings = {"max_steps": 12 // accumulate, "accumulate_grad_batches": accumulate}
    straight = fit(trainer(tmp_path, **settings), SavableDataModule(make("endless")))
    n = random.choice([1, 4, 5, 6])
    module, made, data = Module(where, n, broken), trainer(tmp_path, **settings), SavableDataModule(make("endless"))
    with pytest.raises(Broken):
        fit(made, data, module)
    done = module.seen[: module.stepped_on]
    module.seen = []
    assert done + fit(made, data, module).seen == straight.seen, n


def test_learning_rate_search_consumes_no_batch(make: Any, tmp_path: Path) -> None:
    class Rated(Module):
        lr = 0.1

    for kind in ("endless", "counted"):
        straight = fit(trainer(tmp_path, max_steps=5), SavableDataModule(make(kind)))
        made, data, module = trainer(tmp_path, max_steps=5), SavableDataModule(make(kind)), Rated()
        Tuner(made).lr_find(module, datamodule=data, num_training=7, update_attr=False)
        assert module.seen[:5] == straight.seen
        module.seen = []
        assert fit(made, data, module).seen == straight.seen, kind


class Skips(Callback):
    """Callback that takes a batch, once or in each step, without training on it."""

    def __init__(self, always: bool) -> None:
        self.left = 10 if always else 1

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.left:
            self.left -= 1
            next(trainer.fit_loop._data_fetcher.iterator)


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("kind", ["endless", "counted"])
def test_skipped_batch_is_detected_in_its_step(make: Any, tmp_path: Path, kind: str, always: bool) -> None:
    with pytest.raises(sp.SavableError, match="Turn off its own skipping"):
        fit(trainer(tmp_path, Skips(always), max_steps=4), SavableDataModule(make(kind)))


def test_accumulation_that_cannot_be_rolled_back_is_rejected_at_start(make: Any, tmp_path: Path) -> None:
    for kind, most in (("endless", 15), ("counted", 16)):
        fit(trainer(tmp_path, max_steps=1, accumulate_grad_batches=most), SavableDataModule(make(kind)))
        module = Module()
        told = f"accumulate_grad_batches={most + 1} with {16 - most} batches fetched ahead exceeds the limit of 16"
        with pytest.raises(ValueError, match=told):
            fit(trainer(tmp_path, max_steps=1, accumulate_grad_batches=most + 1), SavableDataModule(make(kind)), module)
        assert not module.seen


# Other objects around the loader.


@pytest.mark.parametrize("kind", ["endless", "counted"])
def test_second_trainer_continues_after_the_firsts_batches(make: Any, tmp_path: Path, kind: str) -> None:
    straight = fit(trainer(tmp_path, max_steps=12), SavableDataModule(make(kind)))
    data = SavableDataModule(make(kind))
    one, other = trainer(tmp_path, max_steps=4), trainer(tmp_path, ModelCheckpoint(tmp_path / "saved"), max_steps=4)
    seen = fit(one, data).seen + fit(other, data).seen
    other.save_checkpoint(tmp_path / "saved.ckpt")
    one.fit_loop.epoch_loop.max_steps = 8
    seen += fit(one, data).seen
    assert seen == straight.seen
    resumed = fit(trainer(tmp_path, max_steps=8), SavableDataModule(make(kind)), resume=tmp_path / "saved.ckpt")
    assert resumed.seen == straight.seen[8:12]


@pytest.mark.parametrize("counts", [True, False])
def test_global_loader_in_a_users_module_has_no_lightning_state(make: Any, tmp_path: Path, counts: bool) -> None:
    class Own(LightningDataModule):
        def train_dataloader(self) -> Any:
            return TrainerLoader(
                make("endless")(), trained=(lambda: self.trainer.global_step) if counts else None, most_ahead=1
            )

    with pytest.raises(sp.SavableError, match=r"a batch ahead.*SavableDataModule"):
        trainer(tmp_path, ModelCheckpoint(tmp_path), max_steps=2).fit(Module(), datamodule=Own())
