"""What each trainer's file refuses, and its example. Run in a process that has imported the trainers (`drive.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments

import savable_pipeline as sp
from savable_pipeline.errors import StateError
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers import accelerate as with_accelerate
from savable_pipeline.trainers import fabric as with_fabric
from savable_pipeline.trainers import hf, lightning
from savable_pipeline.trainers.device import OnDevice
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.project.test_docstrings import examples, run_example
from tests.support.example_shards import write_example_shards
from tests.support.toy_mesh import two_fake_ranks
from tests.support.toy_training import LANES, ToyPipeline, write_training_shards


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Build a loader of 18 batches an epoch."""
    write_training_shards(tmp_path / "shards")

    def loader(kind: str = "counted", **settings: Any) -> sp.SavableLoader:
        return sp.SavableLoader(ToyPipeline(str(tmp_path / "shards"), kind), seed=7, lanes=LANES, **settings)

    return loader


@pytest.mark.parametrize(
    "name", [with_accelerate.prepare, with_fabric.setup_loader, lightning.SavableDataModule, hf.SavableTrainer]
)
def test_example_matches_its_comments(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_example_shards(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    assert [run_example(code, name.__name__) for code in examples(name)] == [1]


# Hugging Face Trainer.


class Model(torch.nn.Module):
    """Model whose loss falls with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: Any, label: Any, valid: Any = None) -> dict[str, Any]:
        return {"loss": self.layer(x).square().mean()}


def trainer(make: Any, folder: Path, loader: Any = None, evaluation: Any = None, **settings: Any) -> hf.SavableTrainer:
    settings = {"ignore_data_skip": True, "max_steps": 6, "save_steps": 2, **settings}
    arguments = TrainingArguments(str(folder / "run"), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    return hf.SavableTrainer(Model(), arguments, train_loader=loader or make(), eval_loader=evaluation)


@pytest.mark.parametrize(
    "settings,match",
    [
        ({"ignore_data_skip": False}, "ignore_data_skip=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not supported"),
    ],
)
def test_hf_arguments_that_would_change_a_resumed_run_are_rejected(
    make: Any, tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        trainer(make, tmp_path, **settings)


def test_hf_accumulation_that_drops_the_last_step_of_a_resumed_epoch_is_rejected(make: Any, tmp_path: Path) -> None:
    for saves in ({}, {"save_strategy": "epoch", "enable_jit_checkpoint": True}):
        with pytest.raises(
            ValueError, match="gradient_accumulation_steps=4 does not divide the 18 batches of an epoch"
        ):
            trainer(make, tmp_path, gradient_accumulation_steps=4, **saves).train()
    trainer(make, tmp_path, gradient_accumulation_steps=4, save_strategy="epoch", max_steps=1).train()
    trainer(make, tmp_path, make("endless"), gradient_accumulation_steps=4, max_steps=1).train()


def test_hf_processes_of_one_batch_need_shared_batches(make: Any, tmp_path: Path) -> None:
    class TensorParallel(hf.SavableTrainer):  # type: ignore[misc]
        def get_tp_size(self) -> int:
            return 2

    arguments = TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to=[], ignore_data_skip=True)
    mesh = r"args\.parallelism_config\.get_device_mesh\('cpu'\)"
    refused = rf"of tp need the same batches\. Pass ranks=sp\.Ranks\.of\({mesh}, share=\('tp',\)\)"
    with pytest.raises(ValueError, match=refused):
        TensorParallel(Model(), arguments, train_loader=make())
    with pytest.raises(ValueError, match=refused):
        TensorParallel(Model(), arguments).get_eval_dataloader(make(on_iter="restart"))


@pytest.mark.parametrize("many", [False, True])
def test_hf_evaluation_must_start_at_the_start(make: Any, tmp_path: Path, many: bool) -> None:
    evaluation = make(tail="pad")
    with pytest.raises(ValueError, match='on_iter="restart"'):
        trainer(make, tmp_path, evaluation={"one": evaluation} if many else evaluation)


def test_hf_evaluates_by_name_keeps_the_best_and_rotates(make: Any, tmp_path: Path) -> None:
    evaluation = {name: make(on_iter="restart", tail="pad") for name in ("one", "other")}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "one_loss", "save_total_limit": 2}
    made = trainer(make, tmp_path, evaluation=evaluation, eval_strategy="steps", eval_steps=2, **best)
    made.train()
    scores = [entry for entry in made.state.log_history if "eval_one_loss" in entry]
    assert len(scores) == 3 and len({entry["eval_one_loss"] for entry in scores}) == 3
    kept = sorted((tmp_path / "run").glob("checkpoint-*"))
    assert [(folder / "savable_loader.json").exists() for folder in kept] == [True, True]
    made.train(resume_from_checkpoint=str(kept[-1]))  # nothing is left to do
    assert json.loads((kept[-1] / "savable_loader.json").read_text())["slot"] == int(kept[-1].name.split("-")[1])


def test_hf_resumed_run_has_the_same_best_model_and_checkpoints(make: Any, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the first one
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2, "lr_scheduler_type": "constant"}

    def run(name: str, max_steps: int, resume: bool | None = None) -> tuple[bytes, list[Any]]:
        torch.manual_seed(1)
        evaluation = make(on_iter="restart", tail="pad")
        made = trainer(make, tmp_path / name, evaluation=evaluation, max_steps=max_steps, **settings, **best)
        made.train(resume_from_checkpoint=resume)
        made.save_model(str(tmp_path / name / "loaded"))
        scores = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
        return (tmp_path / name / "loaded/model.safetensors").read_bytes(), scores

    straight, _ = run("straight", 8), run("stopped", 4)
    assert run("stopped", 8, resume=True) == straight
    kept = [
        {path.relative_to(tmp_path / name) for path in sorted(tmp_path.glob(f"{name}/run/checkpoint-*"))}
        for name in ("straight", "stopped")
    ]
    assert kept == [{Path("run/checkpoint-2"), Path("run/checkpoint-8")}] * 2
    for file in ("model.safetensors", "savable_loader.json"):
        one, other = [(tmp_path / name / "run/checkpoint-8" / file).read_bytes() for name in ("straight", "stopped")]
        assert one == other, file
    assert straight[0] == (tmp_path / "stopped/run/checkpoint-2/model.safetensors").read_bytes()


@pytest.mark.parametrize("content,match", [(None, "is not there"), (b"{", "no JSON"), (b"{}", "no state")])
def test_hf_a_checkpoint_without_the_data_is_rejected(
    make: Any, tmp_path: Path, content: bytes | None, match: str
) -> None:
    trainer(make, tmp_path, max_steps=2).train()
    file = tmp_path / "run/checkpoint-2/savable_loader.json"
    file.unlink()
    if content:
        file.write_bytes(content)
    with pytest.raises(StateError, match=match):
        trainer(make, tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("before,half,twice", [(8, 1, 2), (8, 2, 1), (26, 1, 2), (36, 2, 1)])
def test_hf_ends_after_epochs_started_by_other_ranks(
    make: Any, tmp_path: Path, before: int, half: int, twice: int
) -> None:
    """As if two ranks had taken half of the steps before, or this one had been half a rank."""
    settings = {"max_steps": -1, "num_train_epochs": 3, "save_steps": 2}
    trainer(make, tmp_path, **{**settings, "max_steps": before}).train()
    file = tmp_path / f"run/checkpoint-{before}/trainer_state.json"
    saved = json.loads(file.read_text())
    saved |= {"global_step": before * twice // half, "max_steps": 54 * twice // half}
    file.write_text(json.dumps(saved))
    loader = make()
    resumed = trainer(make, tmp_path, loader, **settings)
    resumed.train(resume_from_checkpoint=str(file.parent))
    assert resumed.state.global_step - saved["global_step"] == 54 - before
    assert (loader.state_dict()["epoch"], loader.state_dict()["slot"]) == (3, 0)
    assert resumed.args.max_steps == -1


class Skips(hf.SavableTrainer):
    """Trainer that skips a batch."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any) -> Any:
        next(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args)


def test_hf_skipped_batches_are_found_at_the_first_step(make: Any, tmp_path: Path) -> None:
    arguments = trainer(make, tmp_path).args
    with pytest.raises(sp.SavableError, match="used 1 of 2 batches"):
        Skips(Model(), arguments, train_loader=make()).train()


# Accelerate and Fabric.


def test_accelerate_rejects_a_bare_loader_on_several_ranks(make: Any, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.register_for_checkpointing(make(ranks=(0, 2)))
    with pytest.raises(sp.SavableError, match=r"rank 0 only.*trainers\.accelerate\.prepare"):
        accelerator.save_state(str(tmp_path / "saved"))


def test_tensor_parallel_processes_need_shared_batches(make: Any) -> None:
    """Accelerate builds such a mesh on GPUs alone, so this is not its Accelerator."""
    counts = {"step": 0, "gradient_accumulation_steps": 1, "register_for_checkpointing": lambda _: None}
    config = accelerate.ParallelismConfig(tp_size=2)
    accelerator: Any = SimpleNamespace(num_processes=2, parallelism_config=config, device="cpu", **counts)
    with pytest.raises(ValueError, match=r"processes of tp need the same batches\. Pass ranks=sp\.Ranks\.of"):
        with_accelerate.prepare(accelerator, make(ranks=(0, 2)))
    with_accelerate.prepare(accelerator, make(ranks=(0, 1)))


def test_fabric_tensor_parallel_processes_need_shared_batches(make: Any) -> None:
    """In one process, as one of the two of Lightning's strategy."""
    strategy = ModelParallelStrategy(lambda module, mesh: module, 1, 2)
    fabric: Any = SimpleNamespace(world_size=2, strategy=strategy, to_device=None)
    with two_fake_ranks():
        strategy._device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        refused = (
            r"of tensor_parallel need the same batches\. Pass ranks=sp\.Ranks\.of\(fabric\.strategy\.device_mesh, "
        )
        with pytest.raises(ValueError, match=refused):
            with_fabric.setup_loader(fabric, make(ranks=(0, 2)))
        with_fabric.setup_loader(fabric, make(ranks=(0, 1)))


def test_accelerate_saves_only_between_optimizer_steps(make: Any, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = with_accelerate.prepare(accelerator, make("endless"))
    accelerator.save_state(str(tmp_path / "0"))
    for step, batch in zip(range(1, 7), batches, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if step % 3:
            with pytest.raises(
                sp.SavableError,
                match=r"gradients of \d of 3 batches .* Save only where accelerator\.sync_gradients is True",
            ):
                accelerator.save_state(str(tmp_path / f"{step}"))
        else:
            accelerator.save_state(str(tmp_path / f"{step}"))
    accelerator.load_state(str(tmp_path / "3"))
    assert batches.state_dict()["slot"] == 3


def test_accelerate_cannot_skip_batches(make: Any) -> None:
    batches = with_accelerate.prepare(accelerate.Accelerator(cpu=True), make())
    for loader in (batches, make(), OnDevice(make(), "cpu")):
        with pytest.raises(AttributeError, match="Do not skip batches"):
            accelerate.skip_first_batches(loader, 3)


def test_fabric_rejects_a_bare_loader_on_several_ranks(make: Any, tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    with pytest.raises(sp.SavableError, match=r"rank 0 only.*trainers\.fabric\.setup_loader"):
        fabric.save(tmp_path / "saved", {"data": make(ranks=(0, 2))})


# Lightning.


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.validated: list[float] = []
        self.epochs: list[int] = []  # of each batch trained on
        self.trained: list[str] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.epochs.append(self.current_epoch)
        self.trained.append(digest(batch))
        return self.layer(batch["x"]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append(float(batch["x"].sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches_of(loader: sp.SavableLoader, count: int) -> list[str]:
    """Return the first batches of a loader, over the ends of epochs."""
    found: list[str] = []
    while len(found) < count:
        found += [digest(batch) for batch, _ in zip(loader, range(count - len(found)), strict=False)]
    return found


def lightning_trainer(folder: Path, **settings: Any) -> LightningTrainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return LightningTrainer(accelerator="cpu", default_root_dir=folder, **quiet, **settings)


@pytest.mark.parametrize(
    "given",
    [
        lambda loader: loader,
        lambda loader: {"one": loader},
        lambda loader: CombinedLoader([loader], "sequential"),
        lambda loader: TrainerLoader(loader),
        lambda loader: OnDevice(loader, "cpu"),
    ],
    ids=["bare", "dict", "CombinedLoader", "TrainerLoader", "OnDevice"],
)
def test_lightning_rejects_a_bare_loader_in_fit(make: Any, tmp_path: Path, given: Any) -> None:
    module = Module()
    with pytest.raises(sp.SavableError, match=r"a batch ahead.*SavableDataModule"):
        lightning_trainer(tmp_path, max_steps=2, enable_checkpointing=False).fit(module, given(make("endless")))
    assert not module.epochs


def test_lightning_evaluates_on_a_bare_loader(make: Any, tmp_path: Path) -> None:
    module = Module()
    lightning_trainer(tmp_path).validate(module, make(), verbose=False)
    assert len(module.validated) == 18


@pytest.mark.parametrize("kind", ["counted", "packed"])
@pytest.mark.parametrize(("limit", "accumulate"), [(7, 1), (7, 3), (1, 1), (0.4, 1)])
def test_lightning_epochs_follow_the_batch_limit_without_dropping_any(
    make: Any, tmp_path: Path, kind: str, limit: float, accumulate: int
) -> None:
    if kind == "packed" and limit == 0.4:
        return  # a part of an unknown number: Lightning refuses it
    each = 7 if limit == 0.4 else int(limit)
    expected = batches_of(make(kind), 6 * each)
    settings = {"limit_train_batches": limit, "accumulate_grad_batches": accumulate}

    def run(epochs: int, resume: Path | None = None, **more: Any) -> Module:
        module = Module()
        trainer = lightning_trainer(tmp_path, max_epochs=epochs, **settings, **more)
        trainer.fit(module, datamodule=lightning.SavableDataModule(lambda: make(kind)), ckpt_path=resume)
        return module

    whole = run(6)
    assert [whole.epochs.count(epoch) for epoch in range(6)] == [each] * 6
    assert whole.trained == expected
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(3, callbacks=[saver])
    steps_of_epoch = -(-each // accumulate)
    for step in (2, 3 * steps_of_epoch - 1, 3 * steps_of_epoch):
        resumed = run(6, tmp_path / f"saved/step={step}.ckpt")
        epochs, in_epoch = divmod(step, steps_of_epoch)
        assert resumed.trained == expected[epochs * each + in_epoch * accumulate :]


def test_lightning_sanity_check_does_not_change_validation_batches(make: Any, tmp_path: Path) -> None:
    module = Module()
    data = lightning.SavableDataModule(make, val=lambda: make(on_iter="restart", tail="pad"))
    lightning_trainer(tmp_path, max_epochs=3, limit_val_batches=5).fit(module, datamodule=data)
    first = module.validated[2:7]
    assert module.validated == [*first[:2], *first * 3] and len(set(first)) == 5


def test_lightning_validation_must_start_at_the_start(make: Any, tmp_path: Path) -> None:
    data = lightning.SavableDataModule(make, val=lambda: {"one": make(tail="pad")})
    with pytest.raises(ValueError, match='on_iter="restart"'):
        lightning_trainer(tmp_path, max_steps=2).fit(Module(), datamodule=data)


def test_lightning_repeats_prefetched_batches_on_resume(make: Any, tmp_path: Path) -> None:
    data = lightning.SavableDataModule(lambda: make("endless"))
    one = lightning_trainer(tmp_path, max_steps=3)
    one.fit(Module(), datamodule=data)
    one.fit_loop.epoch_loop.max_steps = 5
    one.fit(Module(), datamodule=data)
    assert data.train_dataloader().state_dict()["slot"] == 5


@pytest.mark.parametrize("before", [8, 18])
@pytest.mark.parametrize("half,twice", [(1, 2), (2, 1)])
def test_lightning_ends_an_epoch_started_by_other_ranks(
    make: Any, tmp_path: Path, before: int, half: int, twice: int
) -> None:
    """As if two ranks had counted half of the batches before, or this one had been half a rank."""
    saver = ModelCheckpoint(tmp_path, filename="saved", every_n_train_steps=before)
    lightning_trainer(tmp_path, max_steps=before, callbacks=[saver]).fit(
        Module(), datamodule=lightning.SavableDataModule(make)
    )
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    counted = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    counted |= {name: (count + (name == "completed")) * twice // half for name, count in counted.items()}
    counted["completed"] -= 1
    torch.save(saved, tmp_path / "saved.ckpt")
    module = Module()
    resumed = lightning_trainer(tmp_path, max_epochs=3)
    data = lightning.SavableDataModule(make, val=lambda: make(on_iter="restart", tail="pad"))
    resumed.fit(module, datamodule=data, ckpt_path=tmp_path / "saved.ckpt")
    assert (resumed.global_step, resumed.current_epoch) == (54, 3)
    assert len(module.validated) == 18 * (3 if before == 8 else 2)  # at each end of an epoch
