"""TRL's `GRPOTrainer` with the mixin: it generates from every batch once, wherever it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.hf import SavableDataMixin
from tests.support.toy_training import LANES, Prompts, write_training_shards
from tests.trainers.drive import causal_model, pipeline_for

ROWS = 8  # of a batch of the loader: 4 prompts, twice each


class SavableGRPOTrainer(SavableDataMixin, GRPOTrainer):  # type: ignore[misc]
    """Trainer that records the batches that it generates from, and those that it trains on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[str] = []
        self.trained: list[str] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.asked.append(digest(inputs))
        return super()._generate_and_score_completions(inputs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.trained.append(digest([inputs["prompt_ids"], inputs["completion_ids"]]))
        return super().compute_loss(model, inputs, *args, **kwargs)


def make_loader(folder: Path, kind: str = "endless", **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline_for("grpo", folder, kind), seed=7, lanes=LANES, **settings)


def batches(folder: Path, kind: str, n: int) -> list[str]:
    loader = make_loader(folder, kind)
    return [digest(batch) for _, batch in zip(range(n), loader, strict=False)]


def reward(completions: list[str], **fields: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def trainer(folder: Path, run: str, slices: int, kind: str = "endless", **given: Any) -> SavableGRPOTrainer:
    torch.manual_seed(1)
    model, tokenizer = causal_model()
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False, "seed": 1}
    rows = {"per_device_train_batch_size": ROWS // slices, "steps_per_generation": slices, "num_generations": 2}
    settings = {"max_completion_length": 4, "max_steps": 12, "save_steps": 3, **quiet, **rows, **given}
    arguments = GRPOConfig(str(folder / run), ignore_data_skip=True, **settings)
    unused = Dataset.from_dict({"prompt": [""]})
    parts = {"train_dataset": unused, "processing_class": tokenizer, "train_loader": make_loader(folder, kind)}
    return SavableGRPOTrainer(model, reward, arguments, **parts)


@pytest.mark.parametrize(
    ("slices", "settings"),
    [(1, {}), (2, {}), (4, {"gradient_accumulation_steps": 2}), (2, {"num_iterations": 3}), (1, {"num_iterations": 2})],
)
def test_each_batch_is_used_once_and_again_after_a_checkpoint_within_it(
    tmp_path: Path, slices: int, settings: dict[str, int]
) -> None:
    write_training_shards(tmp_path / "shards")
    accumulated = settings.get("gradient_accumulation_steps", 1)
    times = slices * settings.get("num_iterations", 1)
    straight = trainer(tmp_path, "straight", slices, **settings)
    straight.train()
    expected = batches(tmp_path, "endless", 20)
    assert straight.asked == expected[: -(-12 * accumulated // times)]
    for saved in (3, 6, 9):
        resumed = trainer(tmp_path, f"from-{saved}", slices, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"straight/checkpoint-{saved}"))
        whole = saved * accumulated // times
        assert resumed.asked == expected[whole : whole + len(resumed.asked)]
        if saved * accumulated % times == 0:
            assert resumed.trained == straight.trained[saved * accumulated :], "and the completions are the same"


@pytest.mark.parametrize("saved", [2, 3])
def test_epoch_ends_with_its_last_batch_after_any_save(tmp_path: Path, saved: int) -> None:
    write_training_shards(tmp_path / "shards")
    epoch = batches(tmp_path, "counted", 18)
    whole = {"max_steps": -1, "num_train_epochs": 1, "save_steps": saved}
    straight = trainer(tmp_path, "straight", 2, "counted", **whole)
    straight.train()
    assert straight.asked == epoch and straight.state.global_step == 36
    resumed = trainer(tmp_path, "resumed", 2, "counted", **whole)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"straight/checkpoint-{saved}"))
    assert resumed.asked == epoch[1:]
    assert resumed.state.global_step == 36 + saved % 2


def test_training_continues_in_the_same_trainer(tmp_path: Path) -> None:
    write_training_shards(tmp_path / "shards")
    made = trainer(tmp_path, "run", 2, max_steps=3)
    made.train()
    made.train()
    assert list(dict.fromkeys(made.asked)) == batches(tmp_path, "endless", len(set(made.asked)))


def test_rows_that_the_trainer_would_drop_are_an_error(tmp_path: Path) -> None:
    write_training_shards(tmp_path / "shards")
    with pytest.raises(ValueError, match=rf"{ROWS} rows does not divide into steps_per_generation=3"):
        trainer(tmp_path, "run", 3, per_device_train_batch_size=2).train()


def test_grpo_evaluates_on_a_loader(tmp_path: Path) -> None:
    write_training_shards(tmp_path / "shards")
    made = trainer(tmp_path, "run", 1)
    made.evaluate(make_loader(tmp_path, "counted", on_iter="restart"))
    assert made.asked == batches(tmp_path, "counted", 18)
    assert Prompts.generations == made.num_generations
