"""Train with Lightning Fabric, save every 10 steps, and resume when started again."""

from pathlib import Path

import torch
from lightning.fabric import Fabric
from transformers import LlamaConfig, LlamaForCausalLM

import savable_pipeline as sp
from savable_pipeline.trainers.fabric import setup_loader
from savable_pipeline.trainers.model_inputs import model_inputs
from task_encoders import LanguageModelingEncoder

run, steps, save_every = Path("run"), 30, 10
settings = {"devices": 1}
encoder = LanguageModelingEncoder(max_length=64)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=259, **size)  # of your model: AutoConfig.from_pretrained(…)
pipeline = sp.read("shards/").shuffle(100).encode(encoder).batch(4)


def make_loader() -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2)


class Model(torch.nn.Module):
    """Stands for yours: the fields of a batch in, the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def forward(self, **batch):
        return self.model(**model_inputs(batch, self.model)).loss


def make_model() -> tuple:
    model = Model()
    return model, torch.optim.AdamW(model.parameters())


def newest() -> Path | None:
    """The last checkpoint that was written to its end."""
    return max((path.parent for path in run.glob("*/done")), default=None)


def main() -> None:
    fabric = Fabric(**settings)
    fabric.launch()
    model, optimizer = fabric.setup(*make_model())
    loader = setup_loader(fabric, make_loader())  # make it after launch()
    state = {"model": model, "optimizer": optimizer, "data": loader}
    step = 0
    if folder := newest():
        fabric.load(folder / "state.ckpt", state)  # loads the loader
        step = int(folder.name)
    while step < steps:
        for batch in loader:  # an epoch, if it has any
            fabric.backward(model(**batch))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % save_every == 0:
                folder = run / f"{step:06}"
                fabric.save(folder / "state.ckpt", state)
                fabric.barrier()
                (folder / "done").touch()
            if step == steps:
                break
    loader.close()


if __name__ == "__main__":
    main()
