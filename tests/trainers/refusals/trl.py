"""TRL's `SFTTrainer` with the mixin: its last weights after a resume, and what it evaluates on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.hf import SavableData
from tests.support.toy_training import LANES, write_training_shards
from tests.trainers.drive import causal_model, pipeline_for


class SavableSFTTrainer(SavableData, SFTTrainer):  # type: ignore[misc]
    """Notes what it trains on, and evaluates on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[str] = []
        self.evaluated: list[str] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(digest(inputs["input_ids"]))
        return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.evaluated.append(digest(inputs["input_ids"]))
        return super().prediction_step(model, inputs, *args, **kwargs)


def make_loader(folder: Path, kind: str = "endless", *, seed: int = 7, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline_for("trl", folder, kind), seed=seed, lanes=LANES, **settings)


def collate(_: Any) -> Any:
    raise AssertionError("the loader makes the batches")


def trainer(folder: Path, run: str, **given: Any) -> SavableSFTTrainer:
    torch.manual_seed(1)
    model, tokenizer = causal_model()
    limits = {"max_steps": 8, "save_steps": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False}
    prepared = {"skip_prepare_dataset": True}
    arguments = SFTConfig(str(folder / run), ignore_data_skip=True, dataset_kwargs=prepared, **limits)
    unused = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    parts = {"train_dataset": unused, "data_collator": collate, "processing_class": tokenizer}
    return SavableSFTTrainer(model, arguments, train_loader=make_loader(folder), **parts, **given)


def weights(made: Any) -> str:
    return digest([value for _, value in sorted(made.model.state_dict().items())])


def test_sft_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    write_training_shards(tmp_path / "shards")
    straight, resumed = trainer(tmp_path, "straight"), trainer(tmp_path, "resumed")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-3"))
    assert len(straight.seen) == len(set(straight.seen)) == 8
    assert resumed.seen == straight.seen[3:]
    assert weights(resumed) == weights(straight)


def test_sft_evaluates_by_name_and_on_what_it_is_given(tmp_path: Path) -> None:
    write_training_shards(tmp_path / "shards")
    one, other = [make_loader(tmp_path, "counted", seed=seed, on_iter="restart") for seed in (7, 8)]
    made = trainer(tmp_path, "run", eval_loader={"one": one, "other": other})
    assert {"eval_one_loss", "eval_other_loss"} <= set(made.evaluate())
    made.evaluate(one)
    expected = [digest(batch["input_ids"]) for loader in (one, other, one) for batch in loader]
    assert len(set(expected)) == 36 and made.evaluated == expected
