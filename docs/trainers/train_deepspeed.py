"""Train with DeepSpeed, save every 10 steps, and resume when started again."""

from pathlib import Path

import deepspeed
import torch

import savable_pipeline as sp
from savable_pipeline.trainers.deepspeed import prepare_for_engine
from task_encoders import LanguageModelingEncoder

run, steps, save_every = Path("run"), 30, 10
settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
encoder = LanguageModelingEncoder(max_length=64)
pipeline = sp.read("shards/").shuffle(100).encode(encoder).batch(4)


def make_loader() -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2)


class Model(torch.nn.Module):
    """Stands for yours: the fields of a batch in, the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(259, 32), torch.nn.Linear(32, 259))

    def forward(self, tokens, labels, **fields):
        return torch.nn.functional.cross_entropy(self.layers(tokens).flatten(0, 1), labels.flatten())


def make_model() -> tuple:
    model = Model()
    return model, torch.optim.AdamW(model.parameters())


def newest() -> Path | None:
    """The last checkpoint that was written to its end."""
    return max((path.parent for path in run.glob("*/latest")), default=None)


def main() -> None:
    model, optimizer = make_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    loader = prepare_for_engine(engine, make_loader())  # make it after initialize
    step = 0
    if folder := newest():
        _, saved = engine.load_checkpoint(folder)
        loader.load_state_dict(saved["data"])
        step = int(folder.name)
    while step < steps:
        for batch in loader:  # an epoch, if it has any
            engine.backward(engine(**batch))
            engine.step()
            step += 1
            if step % save_every == 0:
                state = {"data": loader.state_dict()}
                engine.save_checkpoint(run / f"{step:06}", client_state=state)
            if step == steps:
                break
    loader.close()


if __name__ == "__main__":
    main()
