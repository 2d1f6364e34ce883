"""Train with TRL's GRPO, save every 10 steps, and resume when started again."""

from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import savable_pipeline as sp
from savable_pipeline.trainers.hf import SavableDataMixin

settings = {"max_steps": 30, "save_steps": 10, "report_to": [], "bf16": False, "max_completion_length": 8}
rows = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4}


class Prompts(sp.TaskEncoder):
    """Each prompt once for each of its completions, in a row."""

    def encode(self, sample, rng):
        return {"prompt": sample.text("txt")}

    def batch(self, items, rng):
        return [item for item in items for _ in range(rows["num_generations"])]


# 4 prompts: 8 rows x 2 steps / 4 completions
pipeline = sp.read("shards/").shuffle(100).encode(Prompts()).batch(4)


def make_loader() -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2)


def make_evaluation() -> sp.SavableLoader | None:
    return None


def reward(completions: list[str], **fields) -> list[float]:
    """Stands for yours. `fields` has what else is in the dicts of a batch."""
    return [float(len(set(text))) for text in completions]


def make_model() -> tuple:
    """Stands for yours, and for its tokenizer."""
    words = {"<pad>": 0, "<eos>": 1, **{letter: 2 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **size))
    return model, PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")


class SavableGRPOTrainer(SavableDataMixin, GRPOTrainer): ...


def main() -> SavableGRPOTrainer:
    arguments = GRPOConfig("run", ignore_data_skip=True, **settings, **rows)
    model, tokenizer = make_model()
    trainer = SavableGRPOTrainer(
        model,
        reward,
        arguments,
        train_dataset=Dataset.from_dict({"prompt": [""]}),  # asked for, and not trained on
        processing_class=tokenizer,
        train_loader=make_loader(),
        eval_loader=make_evaluation(),
    )
    trainer.train(resume_from_checkpoint=any(Path("run").glob("checkpoint-*")))
    return trainer


if __name__ == "__main__":
    main()
