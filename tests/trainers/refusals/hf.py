"""TRL's `SFTTrainer` with the mixin, resumed by its own mechanism. It needs TRL, and is left out without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.hf import SavableData
from tests.conftest import write_numbered_shards

trl = pytest.importorskip("trl")


class Tokens(sp.TaskEncoder):
    """What a causal model takes: 8 tokens that are drawn."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return torch.tensor([rng.integers(60) for _ in range(8)])

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        tokens = torch.stack(items)
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=5)
    return sp.Batcher(sp.Encode(samples, Tokens()), size=4)


class SavableSFTTrainer(SavableData, trl.SFTTrainer):  # type: ignore[misc]
    """Notes what it trains on."""

    seen: list[str]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(digest(inputs["input_ids"]))
        return super().training_step(model, inputs, *args, **kwargs)


def trainer(folder: Path, run: str) -> SavableSFTTrainer:
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    torch.manual_seed(1)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **size))
    limits = {"max_steps": 8, "save_steps": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False}
    arguments = trl.SFTConfig(
        str(folder / run), ignore_data_skip=True, dataset_kwargs={"skip_prepare_dataset": True}, **limits
    )
    unused = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})  # SFTTrainer asks for one, and trains on ours
    loader = sp.SavableLoader(partial(pipeline, folder / "shards"), seed=7, lanes=6, num_workers=1)
    made = SavableSFTTrainer(
        model, args=arguments, train_dataset=unused, processing_class=tokenizer, train_loader=loader
    )
    made.seen = []
    return made


def weights(made: Any) -> str:
    return digest([value for _, value in sorted(made.model.state_dict().items())])


def test_sft_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    write_numbered_shards(tmp_path / "shards", [36, 36])
    straight, resumed = trainer(tmp_path, "straight"), trainer(tmp_path, "resumed")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-3"))
    assert len(straight.seen) == len(set(straight.seen)) == 8
    assert resumed.seen == straight.seen[3:]
    assert weights(resumed) == weights(straight)
