"""Train on packs of chats with images in Hugging Face's Trainer."""

from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, TrainingArguments

import savable_pipeline as sp
from savable_pipeline.trainers.hf import SavableTrainer, model_inputs
from task_encoders import ChatEncoder, MRope, Vision

name = "Qwen/Qwen2.5-VL-3B-Instruct"
settings = {"max_steps": 30, "save_steps": 10, "gradient_accumulation_steps": 2, "report_to": []}
config = AutoConfig.from_pretrained(name)  # with attn_implementation=…, if the model gets one
processor = AutoProcessor.from_pretrained(name)


class Inputs(ChatEncoder):
    """A batch is what the model takes."""

    def batch(self, items, rng):
        return model_inputs(super().batch(items, rng), config)


vision = Vision.from_processor(processor)
# an image of at most 512 tokens
vision = replace(vision, tiles=replace(vision.tiles, max_pixels=512 * 28 * 28))
rope = MRope(config.vision_config.tokens_per_second)
encoder = Inputs(processor.tokenizer, vision=vision, rope=rope)
items = sp.read("chats/").shuffle(100).encode(encoder)
pipeline = items.pack(max_length=512).batch(2)


def make_loader() -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2)


def main() -> SavableTrainer:
    arguments = TrainingArguments("run", ignore_data_skip=True, **settings)
    model = AutoModelForImageTextToText.from_pretrained(name)
    trainer = SavableTrainer(model, arguments, train_loader=make_loader())
    trainer.train(resume_from_checkpoint=any(Path("run").glob("checkpoint-*")))
    return trainer


if __name__ == "__main__":
    main()
