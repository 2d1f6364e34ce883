"""Train with TRL's SFT, save every 10 steps, and resume when started again."""

from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import savable_pipeline as sp
from savable_pipeline.trainers.hf import SavableDataMixin, model_inputs
from task_encoders import LanguageModelingEncoder

settings = {"max_steps": 30, "save_steps": 10, "report_to": [], "bf16": False}
size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=259, **size)  # of your model: AutoConfig.from_pretrained(…)


class Inputs(LanguageModelingEncoder):
    """A batch is what the model takes."""

    def batch(self, items, rng):
        return model_inputs(super().batch(items, rng), config)


encoder = Inputs(max_length=64)  # to mask prompts: prompt="json[prompt]", or a ChatEncoder
pipeline = sp.read("shards/").shuffle(100).encode(encoder).batch(4)


def make_loader() -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2)


def make_evaluation() -> sp.SavableLoader | None:
    return None


def make_model() -> tuple:
    """Stands for yours, and for its tokenizer."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    return LlamaForCausalLM(config), tokenizer


class SavableSFTTrainer(SavableDataMixin, SFTTrainer): ...


def main() -> SavableSFTTrainer:
    arguments = SFTConfig("run", ignore_data_skip=True, **settings)
    model, tokenizer = make_model()
    trainer = SavableSFTTrainer(
        model,
        arguments,
        processing_class=tokenizer,
        train_loader=make_loader(),
        eval_loader=make_evaluation(),
    )
    trainer.train(resume_from_checkpoint=any(Path("run").glob("checkpoint-*")))
    return trainer


if __name__ == "__main__":
    main()
