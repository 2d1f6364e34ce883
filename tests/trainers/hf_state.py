"""The Trainer's checkpoints at any moment of a step. Run in a process that has imported it (`drive.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers import hf
from tests.support.shards import write_numbered_shards
from tests.support.toy_training import LANES, ToyPipeline, write_training_shards

EPOCH = 18  # batches


@pytest.fixture
def make(tmp_path: Path) -> Any:
    write_training_shards(tmp_path / "shards")

    def loader(kind: str = "endless") -> sp.SavableLoader:
        return sp.SavableLoader(ToyPipeline(str(tmp_path / "shards"), kind), seed=7, lanes=LANES)

    return loader


class Model(torch.nn.Module):
    """Model that records its batches, and fails in the one numbered `fails_at`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[str] = []
        self.fails_at = 0

    def forward(self, x: Any, label: Any) -> dict[str, Any]:
        self.seen.append(digest(x))
        if len(self.seen) == self.fails_at:
            raise KeyboardInterrupt
        return {"loss": self.layer(x).square().mean()}

    @property
    def weights(self) -> str:
        return digest([part.detach() for part in self.parameters()])


def trainer(folder: Path, loader: Any, *callbacks: Any, **settings: Any) -> hf.SavableTrainer:
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), ignore_data_skip=True, **{**quiet, "max_steps": 6, **settings})
    return hf.SavableTrainer(Model(), arguments, train_loader=loader, callbacks=[*callbacks])


class Preempted(TrainerCallback):  # type: ignore[misc]
    """Callback that requests a checkpoint in an event of a step, or only in the `nth` of those, as SIGTERM does."""

    def __init__(self, event: str, step: int, nth: int | None = None) -> None:
        self.trainer: Any = None
        self.events = 0

        def ask(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events += state.global_step == step
            if state.global_step == step and nth in (None, self.events):
                [jit] = [each for each in self.trainer.callback_handler.callbacks if hasattr(each, "jit_manager")]
                assert isinstance(jit, JITCheckpointCallback) and jit.jit_manager is not None
                jit.jit_manager.is_checkpoint_requested = True

        setattr(self, event, ask)


@pytest.mark.parametrize(
    "event,accumulate",
    [("on_step_begin", 1), ("on_pre_optimizer_step", 1), ("on_step_begin", 3), ("on_substep_end", 3)]
    + [("on_optimizer_step", accumulate) for accumulate in (1, 3)],
)
def test_checkpoint_before_the_end_of_a_job_is_right_at_any_step(
    make: Any, tmp_path: Path, event: str, accumulate: int
) -> None:
    """In the event itself or in the next one: also between a window's backward passes and its step."""
    straight = trainer(tmp_path / "straight", make(), gradient_accumulation_steps=accumulate)
    straight.train()
    settings = {"gradient_accumulation_steps": accumulate, "enable_jit_checkpoint": True}
    asks = Preempted(event, 2)
    killed = trainer(tmp_path / "run", make(), asks, **settings)
    asks.trainer = killed
    killed.train()
    [saved] = (tmp_path / "run").glob("checkpoint-*")
    done = int(saved.name.split("-")[1]) * accumulate
    assert len(killed.model.seen) >= done
    resumed = trainer(tmp_path / "run", make(), **settings)
    resumed.train(resume_from_checkpoint=str(saved))
    assert killed.model.seen[:done] + resumed.model.seen == straight.model.seen
    assert resumed.model.weights == straight.model.weights


@pytest.mark.parametrize("kind", ["endless", "counted"])
def test_interrupted_step_restarts_in_the_next_call(make: Any, tmp_path: Path, kind: str) -> None:
    straight = trainer(tmp_path / "straight", make(kind), gradient_accumulation_steps=3, max_steps=5)
    straight.train()
    made = trainer(tmp_path / "run", make(kind), gradient_accumulation_steps=3, max_steps=5)
    made.model.fails_at = random.choice([7, 8, 9])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    seen = made.model.seen[:6]
    made.model.seen, made.model.fails_at = [], 0
    made.train()
    assert seen + made.model.seen[:9] == straight.model.seen


def test_gradients_carried_to_the_next_epoch_do_not_repeat_batches(make: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, make("packed"), gradient_accumulation_steps=4, max_steps=8)
    made.train()
    assert len(made.model.seen) == len(set(made.model.seen))


@pytest.mark.parametrize("accumulate", [4, 16])
@pytest.mark.parametrize("event,nth", [("on_epoch_end", 1), ("on_step_begin", 2), ("on_substep_end", 3)])
def test_gradients_carried_over_an_epochs_end_survive_a_checkpoint(
    make: Any, tmp_path: Path, event: str, nth: int, accumulate: int
) -> None:
    """An epoch has 18 batches, and the trainer does not know it: the last two wait for the next epoch's first step."""
    of_epoch = EPOCH // accumulate
    settings = {"gradient_accumulation_steps": accumulate, "max_steps": 2 * of_epoch}
    straight = trainer(tmp_path / "straight", make("packed"), **settings)
    straight.train()
    asks = Preempted(event, of_epoch, nth)
    killed = trainer(tmp_path / "run", make("packed"), asks, enable_jit_checkpoint=True, **settings)
    asks.trainer = killed
    killed.train()
    assert len(killed.model.seen) > EPOCH  # the step behind the epoch's end was started, and not ended
    saved = tmp_path / f"run/checkpoint-{of_epoch}"
    resumed = trainer(tmp_path / "run", make("packed"), **settings)
    resumed.train(resume_from_checkpoint=str(saved))
    assert resumed.model.seen == straight.model.seen[of_epoch * accumulate :]
    assert resumed.model.weights == straight.model.weights


def test_step_interrupted_after_an_epochs_end_restarts_with_carried_gradients(make: Any, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 4, "max_steps": 6}
    straight = trainer(tmp_path / "straight", make("packed"), **settings)
    straight.train()
    made = trainer(tmp_path / "run", make("packed"), **settings)
    made.model.fails_at = EPOCH + random.choice([1, 2, 3, 4])  # in the step that they wait for
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.model.seen, made.model.fails_at = [], 0
    made.train()
    assert made.model.seen[: EPOCH - 16 + 8] == straight.model.seen[16 : EPOCH + 8]


def test_accumulation_longer_than_an_epoch_is_an_error(tmp_path: Path) -> None:
    write_numbered_shards(tmp_path / "shards", [12])
    for kind, trained_on in (("packed", 6), ("counted", 3)):  # which steps at an epoch's end that it knows
        loader = sp.SavableLoader(ToyPipeline(str(tmp_path / "shards"), kind), seed=7, lanes=3)
        made = trainer(tmp_path, loader, gradient_accumulation_steps=4, max_steps=1)
        with nullcontext() if kind == "counted" else pytest.raises(ValueError, match="never takes the last 6 batch"):
            made.train()
        assert len(made.model.seen) == trained_on


def test_accumulation_that_cannot_be_rolled_back_is_rejected_at_start(make: Any, tmp_path: Path) -> None:
    trainer(tmp_path, make(), gradient_accumulation_steps=16, max_steps=1).train()
    made = trainer(tmp_path, make(), gradient_accumulation_steps=17, max_steps=1)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=17 exceeds the limit of 16"):
        made.train()
    assert not made.model.seen


def test_checkpoint_after_deepspeeds_step_is_rejected() -> None:
    given: dict[str, Any] = {"ignore_data_skip": True, "auto_find_batch_size": False, "deepspeed": {}}
    check: Callable[..., None] = hf._check_arguments
    check(SimpleNamespace(**given, enable_jit_checkpoint=True), None)
    with pytest.raises(ValueError, match="with DeepSpeed"):
        check(SimpleNamespace(**{**given, "deepspeed": "zero.json"}, enable_jit_checkpoint=True), None)


def test_checkpoint_keeps_a_users_save_pretrained(tmp_path: Path) -> None:
    class Own(PreTrainedModel):
        config_class = PretrainedConfig

    model, calls = Own(PretrainedConfig()), list[dict[str, Any]]()
    model.save_pretrained = own = lambda **settings: calls.append(settings)
    for _ in range(2):
        with hf._loadable_weight_names(model):
            model.save_pretrained()
        assert vars(model)["save_pretrained"] is own
    assert calls == [{"save_original_format": False}] * 2
    del model.save_pretrained
    with hf._loadable_weight_names(model):
        pass
    assert "save_pretrained" not in vars(model)


def test_fresh_run_next_to_its_checkpoints_warns_how_to_resume(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path / "run", make(), save_strategy="steps", save_steps=3).train()
    assert "starts at the first batch" not in caplog.text
    trainer(tmp_path / "run", make(), max_steps=1).train()
    assert "run has checkpoint-6, but the run starts at the first batch. Call train(resume" in caplog.text
    caplog.clear()
    trainer(tmp_path / "run", make(), max_steps=7).train(resume_from_checkpoint=True)
    assert "starts at the first batch" not in caplog.text
