"""Train with Lightning's Trainer, save every 10 steps, and resume when started again."""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

import savable_pipeline as sp
from savable_pipeline.trainers.lightning import SavableDataModule
from savable_pipeline.trainers.model_inputs import model_inputs
from task_encoders import LanguageModelingEncoder

run = Path("run")
settings = {"max_steps": 30, "val_check_interval": 10, "check_val_every_n_epoch": None, "logger": False}
encoder = LanguageModelingEncoder(max_length=64)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=259, **size)  # of your model: AutoConfig.from_pretrained(…)
pipeline = sp.read("shards/").shuffle(100).encode(encoder).batch(4)


def make_loader() -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2)


def make_evaluation() -> sp.SavableLoader:
    once = sp.read("shards/", epochs=1).encode(encoder).batch(4)
    return sp.SavableLoader(once, seed=7, lanes=4, on_iter="restart")


class Model(LightningModule):
    """Stands for yours."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, index):
        return self.model(**model_inputs(batch, self.model)).loss

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def make_model() -> LightningModule:
    return Model()


def newest() -> Path | None:
    """The last checkpoint."""
    return max(run.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[-1]), default=None)


def main() -> None:
    often = {"every_n_train_steps": 10, "save_top_k": -1}
    saver = ModelCheckpoint(run, filename="{step}", **often)
    data = SavableDataModule(make_loader, val=make_evaluation)
    trainer = Trainer(**{"callbacks": [saver], **settings})
    trainer.fit(make_model(), datamodule=data, ckpt_path=newest())


if __name__ == "__main__":
    main()
