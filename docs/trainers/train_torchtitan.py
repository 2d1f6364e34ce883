"""Train as torchtitan's trainer does, save every 10 steps, and resume when started again."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torchtitan.components.checkpointer.dcp import CheckpointManager

import savable_pipeline as sp
from savable_pipeline.trainers.torchtitan import SavableDataLoader, inputs_and_labels
from task_encoders import LanguageModelingEncoder

base, steps = ".", 30
settings = {"enable": True, "interval": 10, "folder": "run", "async_mode": "disabled"}
convert = inputs_and_labels  # of a batch to what the trainer takes, the default


def make_loader(*, ranks, seq_len, local_batch_size, infinite, **other):
    encoder = LanguageModelingEncoder(max_length=seq_len)
    samples = sp.read("shards/", epochs=None if infinite else 1)
    items = samples.encode(encoder).pack(max_length=seq_len)
    pipeline = items.batch(local_batch_size)
    return sp.SavableLoader(pipeline, seed=7, ranks=ranks)


class Model(torch.nn.Module):
    """Stands for yours: a batch in, the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(259, 32), torch.nn.Linear(32, 259))

    def forward(self, tokens, labels):
        return torch.nn.functional.cross_entropy(self.layers(tokens).flatten(0, 1), labels.flatten())


class Optimizers:
    """Stands for torchtitan's container of optimizers."""

    def __init__(self, model, optimizer) -> None:
        self.both = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(*self.both)

    def load_state_dict(self, state) -> None:
        set_optimizer_state_dict(*self.both, state)


class Steps:
    """Stands for the trainer's own state, and for its schedulers."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state) -> None:
        self.step = state["step"]


def make_model() -> tuple:
    dist.init_process_group()
    model = Model()
    return model, torch.optim.AdamW(model.parameters())


def main() -> None:
    model, optimizer = make_model()
    train_state = Steps()
    parts = {"model_parts": [model], "optimizers": Optimizers(model, optimizer), "lr_schedulers": Steps()}
    others = {"states": {"train_state": train_state}, "sd_adapter": None, "base_folder": base}
    # dataloader= of your Trainer.Config
    data = SavableDataLoader.Config(make=make_loader, convert=convert)

    ranks = {"dp_rank": dist.get_rank(), "dp_world_size": dist.get_world_size()}
    dataloader = data.build(**ranks, tokenizer=None, seq_len=64, local_batch_size=4)
    checkpointer = CheckpointManager.Config(**settings).build(dataloader=dataloader, **parts, **others)
    checkpointer.load()  # loads the loader
    while train_state.step < steps:
        for inputs, labels in dataloader:
            model(inputs["input"], labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            train_state.step += 1
            checkpointer.save(train_state.step)  # each settings["interval"] steps
            if train_state.step == steps:
                break
    dataloader.close()


if __name__ == "__main__":
    main()
