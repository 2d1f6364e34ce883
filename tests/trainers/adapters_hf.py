"""Hugging Face's Trainer: which checkpoint it goes on from, what it forgets, evaluates and says of a bare loader.

Run in a process that has imported the trainers (`drive.py`).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_jit_checkpoint import CheckpointManager

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.errors import StateError
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers import accelerate as with_accelerate
from savable_pipeline.trainers import hf
from savable_pipeline.trainers.device import OnDevice
from savable_pipeline.trainers.hf import newest_whole
from task_encoders import LanguageModelingEncoder
from tests.trainers.adapters import Model, make, trainer

__all__ = ["make"]  # a fixture


# Checkpoints that are whole.


def killed_while_it_saves(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until `checkpoint-AT` is saved, and stop before the trainer has written its own state."""
    written = TrainerState.save_to_json

    def cut(state: TrainerState, path: str) -> None:
        if state.global_step == at:
            raise KeyboardInterrupt
        written(state, path)

    monkeypatch.setattr(TrainerState, "save_to_json", cut)


@pytest.mark.parametrize("cut", [None, b"", b'{"best_metric": nul'])
def test_hf_resumes_from_the_newest_complete_checkpoint_and_names_others(
    make: Any, tmp_path: Path, cut: bytes | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        killed_while_it_saves(6, patch)
        with pytest.raises(KeyboardInterrupt):
            trainer(make, tmp_path, max_steps=8).train()
    run = tmp_path / "run"
    if cut is not None:
        (run / "checkpoint-6/trainer_state.json").write_bytes(cut)
    (run / "checkpoint-7").mkdir()
    (run / "checkpoint-7/checkpoint-is-incomplete.txt").touch()
    loader = make()
    resumed = trainer(make, tmp_path, loader, max_steps=8)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == loader.state_dict()["slot"] == 8
    (told,) = [record.getMessage() for record in caplog.records if "are incomplete" in record.getMessage()]
    assert (
        "checkpoint-4. Newer checkpoints are incomplete: " in told and "checkpoint-6, whose trainer_state.json" in told
    )
    assert "checkpoint-7, whose savable_loader.json is not there" in told
    again = trainer(make, tmp_path, max_steps=8)
    again.train(resume_from_checkpoint=True)  # from 8, which is whole: nothing is left to do
    assert len([record for record in caplog.records if "are incomplete" in record.getMessage()]) == 1


def test_hf_named_incomplete_checkpoint_is_rejected(make: Any, tmp_path: Path) -> None:
    trainer(make, tmp_path, max_steps=2).train()
    folder = tmp_path / "run/checkpoint-2"
    (folder / "trainer_state.json").unlink()
    with pytest.raises(StateError, match=r"is incomplete, its trainer_state\.json.*while it was saved"):
        trainer(make, tmp_path).train(resume_from_checkpoint=str(folder))


def test_hf_overwritten_checkpoint_is_incomplete_until_saved(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(make, tmp_path, max_steps=4).train()
    killed_while_it_saves(4, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        trainer(make, tmp_path, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert (tmp_path / "run/checkpoint-4/savable_loader.json").exists()
    assert newest_whole(tmp_path / "run") == tmp_path / "run/checkpoint-2"


def test_hf_checkpoint_folder_is_created_once_the_state_is_ready(make: Any, tmp_path: Path) -> None:
    loader = make("endless")
    made = trainer(make, tmp_path, loader, save_strategy="no", max_steps=2)
    made.train()
    next(loader)  # moved by something else
    folder = tmp_path / "run/checkpoint-2"
    with pytest.raises(sp.SavableError, match="something else moved the loader"):
        made._save_checkpoint(made.model, trial=None)
    assert not folder.exists()
    manager = CheckpointManager(made)  # which makes the folder beforehand, on SIGTERM
    with pytest.raises(sp.SavableError, match="something else moved the loader"):
        manager.execute_jit_checkpoint()
    assert not folder.exists()


# A run that has ended.


class Weights(TrainerCallback):  # type: ignore[misc]
    """Callback that keeps the weights at the end of a run, after the checkpoint is loaded."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = digest([part.detach() for part in model.parameters()])


@pytest.mark.parametrize(
    "kind,settings",
    [
        ("endless", {}),
        ("counted", {"max_steps": 20, "save_steps": 10}),
        ("counted", {"max_steps": -1, "num_train_epochs": 2, "save_steps": 12}),
        ("packed", {"max_steps": 20, "save_strategy": "epoch"}),
        ("endless", {"gradient_accumulation_steps": 2}),
    ],
)
def test_hf_finished_run_does_not_train_when_restarted(
    make: Any, tmp_path: Path, kind: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    ended = trainer(make, tmp_path, make(kind), **settings)
    ended.add_callback(weights)
    ended.train()
    step, slot = ended.state.global_step, ended._batches.state_dict()["slot"]
    checkpoints = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for _ in range(3):
        again = trainer(make, tmp_path, make(kind), **settings)
        again.add_callback(after := Weights())
        assert again.train(resume_from_checkpoint=True).global_step == step
        assert (after.found, again._batches.state_dict()["slot"]) == (weights.found, slot)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == checkpoints
    assert caplog.text.count(f"has ended at step {step} of {step}") == 3
    further = trainer(make, tmp_path, make(kind), **{**settings, "max_steps": step + 2})
    assert further.train(resume_from_checkpoint=True).global_step == step + 2


def test_hf_finished_run_loads_its_best_model(make: Any, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the first one
    settings = {"eval_strategy": "steps", "eval_steps": 2, **best}

    def run(resume: bool | None = None) -> bytes:
        made = trainer(make, tmp_path, evaluation=make(on_iter="restart", tail="pad"), **settings)
        made.train(resume_from_checkpoint=resume)
        made.save_model(str(tmp_path / "loaded"))
        return (tmp_path / "loaded/model.safetensors").read_bytes()

    assert run() == run(resume=True) == (tmp_path / "run/checkpoint-2/model.safetensors").read_bytes()


# What takes each batch several times.


def test_hf_grpo_repeats_a_batch_for_each_of_its_slices(make: Any, tmp_path: Path) -> None:
    def run(name: str, saved: str | None = None) -> tuple[list[str], int]:
        seen: list[str] = []

        class Notes(Model):
            def forward(self, x: Any, label: Any, valid: Any = None) -> dict[str, Any]:
                seen.append(digest(x))
                return super().forward(x, label)

        arguments = trainer(make, tmp_path / name, max_steps=-1, num_train_epochs=1, save_steps=1).args
        arguments.steps_per_generation, arguments.num_iterations = 2, 3  # what TRL's GRPOConfig adds
        made = hf.SavableTrainer(Notes(), arguments, train_loader=make())
        made.train(resume_from_checkpoint=saved)
        return seen, made.state.global_step

    expected = [digest(batch["x"]) for batch in make() for _ in range(6)]
    assert run("straight") == (expected, 6 * 18)
    for step in (1, 5, 6, 7):
        again, ended = run(f"from-{step}", str(tmp_path / f"straight/run/checkpoint-{step}"))
        assert again == expected[step // 6 * 6 :], "from the first slice of the batch that was under way"
        assert ended == 6 * 18 + step % 6


# What a causal model learns.


def test_hf_loss_of_accumulated_packs_equals_that_of_single_documents(tmp_path: Path) -> None:
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=259, **size)
    asked = {f"answer {'x' * i} {i}": f"prompt {i}: " for i in range(40)}
    with sp.ShardWriter(tmp_path / "shards") as writer:
        for number, (text, prompt) in enumerate(asked.items()):
            writer.write({"__key__": f"{number}", "txt": text, "json": {"prompt": prompt}})

    class Inputs(LanguageModelingEncoder):
        def batch(self, items: Any, rng: sp.Rng) -> Any:
            return hf.model_inputs(super().batch(items, rng), config)

    encoder, steps = Inputs(max_length=128, prompt="json[prompt]"), []

    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(tmp_path / "shards", lane), encoder)
        return sp.Batcher(sp.OnlinePacker(items, max_length=128), size=2)

    class Notes(hf.SavableTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, inputs, *args, **kwargs)
            steps.append((inputs["input_ids"], float(loss)))
            return loss

    settings = {"max_steps": 1, "gradient_accumulation_steps": 2, "use_cpu": True, "report_to": [], "learning_rate": 0}
    arguments = TrainingArguments(str(tmp_path / "run"), ignore_data_skip=True, disable_tqdm=True, **settings)
    model = LlamaForCausalLM(config)
    Notes(model, arguments, train_loader=sp.SavableLoader(pipeline, seed=7, lanes=1)).train()
    summed, targets = 0.0, 0
    for row in torch.cat([tokens for tokens, _ in steps]).tolist():
        for written in [part.split(chr(258))[0] for part in "".join(map(chr, row)).split(chr(257))[1:]]:
            text = next(text for text, prompt in asked.items() if prompt + text == written)
            ids = torch.tensor([[257, *written.encode(), 258]])
            labels = ids.clone()
            labels[:, : -len(text) - 1] = -100
            with torch.no_grad():
                summed += (len(text) + 1) * float(model.eval()(input_ids=ids, labels=labels).loss)
            targets += len(text) + 1
    assert len(steps) == 2 and targets > 200
    assert sum(loss for _, loss in steps) == pytest.approx(summed / targets, abs=1e-5)


# What is forgotten.


def test_hf_early_stopping_saves_its_patience_or_warns(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    every = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "constant", **best}

    def run(name: str, max_steps: int, resume: bool = False, **settings: Any) -> int:
        """The step at which it stops: the loss falls, so that no evaluation is better than the first."""
        torch.manual_seed(1)
        evaluation = make(on_iter="restart", tail="pad")
        made = trainer(make, tmp_path / name, evaluation=evaluation, max_steps=max_steps, **every, **settings)
        made.add_callback(EarlyStoppingCallback(3))
        made.train(resume_from_checkpoint=resume or None)
        return made.state.global_step

    forgets = "EarlyStoppingCallback restarts"
    assert run("straight", 14) == 8
    assert run("kept", 6) == 6
    shutil.copytree(tmp_path / "kept", tmp_path / "forgotten")
    assert run("kept", 14, True, restore_callback_states_from_checkpoint=True) == 8
    assert forgets not in caplog.text
    assert run("forgotten", 14, True) == 12
    assert caplog.text.count(forgets) == 1


# What the pipeline decides.


@dataclass
class SFTSettings(TrainingArguments):  # type: ignore[misc]
    """Settings that TRL's `SFTConfig` adds."""

    max_length: int | None = 1024
    completion_only_loss: bool | None = None


def test_hf_settings_of_batches_that_have_no_effect_are_named_once(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def named(**settings: Any) -> list[str]:
        caplog.clear()
        quiet = {"ignore_data_skip": True, "max_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
        loader = settings.pop("loader", make())
        made = hf.SavableTrainer(Model(), SFTSettings(str(tmp_path), **quiet, **settings), train_loader=loader)
        if loader is not None:
            made.train()
        return [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]

    (found,) = named(per_device_train_batch_size=2, max_length=64, completion_only_loss=True)
    assert "per_device_train_batch_size=2, max_length=64, completion_only_loss=True. " in found
    assert "The pipeline defines the batches" in found
    (found,) = named(max_length=None)
    assert found.startswith("ignored: max_length=None. ")
    assert named() == named(per_device_train_batch_size=8) == named(max_length=64, loader=None) == []


# What is evaluated.


def test_hf_predicts_on_a_loader(make: Any, tmp_path: Path) -> None:
    class Predicts(Model):
        def forward(self, x: Any, label: Any, valid: Any = None) -> dict[str, Any]:
            return {**super().forward(x, label), "numbers": x[:, 0]}

    arguments = trainer(make, tmp_path).args
    made = hf.SavableTrainer(Predicts(), arguments, train_loader=make())
    expected = torch.cat([batch["x"][:, 0] for batch in make(on_iter="restart")]).tolist()
    for _ in range(2):
        found = made.predict(make(on_iter="restart"))
        assert found.predictions.tolist() == expected and len(expected) == 72
        assert found.metrics["test_loss"] > 0
    for ask in (made.predict, made.evaluate):
        with pytest.raises(ValueError, match='on_iter="restart"'):
            ask(make())


def test_hf_names_the_labels_that_it_needs_for_an_evaluations_loss(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AnyFields(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, **fields: Any) -> dict[str, Any]:
            return self.model(**fields)

    arguments = trainer(make, tmp_path, evaluation=make(on_iter="restart")).args
    assert "eval_loss" not in caplog.text
    for names, has_loss in ((None, False), (["label"], True)):
        caplog.clear()
        arguments.label_names = names
        made = hf.SavableTrainer(AnyFields(), arguments, train_loader=make(), eval_loader=make(on_iter="restart"))
        assert ("eval_loss" in made.evaluate()) == has_loss
        assert ("evaluations have no eval_loss" in caplog.text) != has_loss


def test_hf_rejects_a_loader_on_a_device(make: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"TrainerLoader takes a SavableLoader, not OnDevice"):
        trainer(make, tmp_path, OnDevice(make(), "cpu"))


# A bare loader.


class Bare(Trainer):  # type: ignore[misc]
    """A user's trainer that saves nothing of its loader."""

    loader: Any

    def get_train_dataloader(self) -> Any:
        return self.loader


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: OnDevice(loader, "cpu")])
def test_hf_a_bare_loader_that_its_trainer_iterates_over_is_named(
    make: Any, tmp_path: Path, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = trainer(make, tmp_path, max_steps=1).args
    made = Bare(Model(), arguments)
    made.loader = wrap(make())
    made.train()
    assert caplog.text.count("Hugging Face's Trainer does not save the state") == 1
    caplog.clear()
    trainer(make, tmp_path, evaluation=make(on_iter="restart"), max_steps=2).train()
    assert "does not save the state" not in caplog.text


def test_accelerate_a_loader_that_is_merely_prepared_is_named_when_its_loop_starts(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    for batch in (bare := accelerator.prepare(make())):
        assert batch is not None
        break
    assert caplog.text.count("an Accelerator does not save the state") == 1
    next(iter(bare))
    next(iter(with_accelerate.prepare(accelerator, make())))
    assert caplog.text.count("does not save the state") == 1
