"""Train as Megatron's loop does, save every 10 steps, and resume when started again."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

import savable_pipeline as sp
from task_encoders import LanguageModelingEncoder

run, steps, save_every = Path("run"), 30, 10
encoder = LanguageModelingEncoder(max_length=64)
pipeline = sp.read("shards/").shuffle(100).encode(encoder).batch(4)


def make_loader(group: dist.ProcessGroup) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2, ranks=group)


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


def begin() -> tuple[dist.ProcessGroup, int]:
    """The group of data parallelism, and this process's number among those that get the same batches."""
    dist.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    return parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_rank()


def save_model(folder: Path, parts: dict) -> None:
    """Stands for Megatron's own: the last file of a checkpoint says that it is whole."""
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "model.pt")
        (folder / "done").touch()
    dist.barrier()


def load_model(folder: Path, parts: dict) -> None:
    saved = torch.load(folder / "model.pt")
    for name, part in parts.items():
        part.load_state_dict(saved[name])


def newest() -> Path | None:
    """The last checkpoint that was written to its end."""
    return max((path.parent for path in run.glob("*/done")), default=None)


def main() -> None:
    group, peer = begin()
    model, optimizer = make_model()
    both = {"model": getattr(model, "module", model), "optimizer": optimizer}
    loader = make_loader(group=group)
    batches = RerunDataIterator(iter(loader))
    step = 0
    if folder := newest():
        files = sorted(folder.glob("train_dataloader_dprank*.pt"))
        states = [torch.load(file)["dataloader_state_dict"] for file in files]
        loader.restore_state(sp.merge_states(states))
        load_model(folder, both)
        step = int(folder.name)
    while step < steps:
        model(**next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        batches.advance()  # the rerun state machine does it behind each step
        step += 1
        if step % save_every == 0:
            folder = run / f"{step:06}"
            folder.mkdir(parents=True, exist_ok=True)
            if peer == 0:
                saved = {"dataloader_state_dict": batches.iterable.save_state()}
                torch.save(saved, folder / f"train_dataloader_dprank{dist.get_rank(group):03}.pt")
            save_model(folder, both)
    loader.close()


if __name__ == "__main__":
    main()
