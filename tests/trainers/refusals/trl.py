"""TRL's `SFTTrainer` with the mixin: its last weights after a resume, and what it evaluates on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.hf import SavableDataMixin
from tests.support.toy_training import LANES, write_training_shards
from tests.trainers.drive import causal_model, pipeline_for
from tests.trainers.hf_images import base, check_restart, names_of

__all__ = ["base"]  # a fixture


class SavableSFTTrainer(SavableDataMixin, SFTTrainer):  # type: ignore[misc]
    """Trainer that records what it trains on and evaluates on."""

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


def trainer(folder: Path, run: str, settings: dict[str, Any] | None = None, **given: Any) -> SavableSFTTrainer:
    torch.manual_seed(1)
    model, tokenizer = causal_model()
    limits = {"max_steps": 8, "save_steps": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False}
    arguments = SFTConfig(str(folder / run), ignore_data_skip=True, **limits, **(settings or {}))
    parts = {"processing_class": tokenizer, "train_loader": make_loader(folder), **given}
    return SavableSFTTrainer(model, arguments, **parts)


def weights(made: Any) -> str:
    return digest([value for _, value in sorted(made.model.state_dict().items())])


def test_sft_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    write_training_shards(tmp_path / "shards")
    straight, resumed = trainer(tmp_path, "straight"), trainer(tmp_path, "resumed")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-3"))
    assert len(straight.seen) == len(set(straight.seen)) == 8
    assert resumed.seen == straight.seen[3:]
    assert weights(resumed) == weights(straight)


def test_sft_evaluates_by_name_and_on_passed_loaders(tmp_path: Path) -> None:
    write_training_shards(tmp_path / "shards")
    one, other = [make_loader(tmp_path, "counted", seed=seed, on_iter="restart") for seed in (7, 8)]
    made = trainer(tmp_path, "run", eval_loader={"one": one, "other": other})
    assert {"eval_one_loss", "eval_other_loss"} <= set(made.evaluate())
    made.evaluate(one)
    expected = [digest(batch["input_ids"]) for loader in (one, other, one) for batch in loader]
    assert len(set(expected)) == 36 and made.evaluated == expected


@pytest.mark.parametrize("settings", [{"packing": True}, {"padding_free": True, "max_length": None}])
def test_sft_its_own_packing_is_rejected(tmp_path: Path, settings: dict[str, Any]) -> None:
    write_training_shards(tmp_path / "shards")
    with pytest.raises(ValueError, match=r"packing and padding_free of SFTConfig .* Use .pack"):
        trainer(tmp_path, "run", settings)


def test_sft_dataset_next_to_the_loader_and_dataset_settings_are_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_training_shards(tmp_path / "shards")
    trainer(tmp_path, "run")
    assert "ignored" not in caplog.text
    texts = Dataset.from_dict({"text": ["a", "b"]})
    made = trainer(tmp_path, "run", {"dataset_text_field": "said"}, train_dataset=texts, data_collator=list)
    assert "ignored: dataset_text_field='said', train_dataset. " in caplog.text
    assert made.train_dataset.column_names == ["text"], "which is not tokenized either"


def test_sft_packed_images_have_single_document_losses_also_when_resumed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "images", shared := ModuleType("images"))
    vars(shared).update(names_of("images.py", base))
    check_restart(names_of("images_sft.py", base), "SavableSFTTrainer", base, tmp_path, monkeypatch)
