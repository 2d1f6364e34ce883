"""A rank of `test_loss_scale`: writes its gradient after a step, by a loop of its own or by Hugging Face's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import savable_pipeline as sp
from savable_pipeline.trainers.loss_scale import loss_scale
from task_encoders import LanguageModelingEncoder

TARGETS = [[10, 2], [1000, 300], [7, 0], [500, 40]]  # of the packs of each batch, so that rank 0 has few
LENGTHS = [3, 200, 40, 150]  # of the texts for Hugging Face's Trainer, one a batch


def batches() -> list[dict[str, torch.Tensor]]:
    """Return four batches of two packs, whose numbers of targets differ widely."""
    draw, made = torch.Generator().manual_seed(7), []
    for targets in TARGETS:
        tokens = torch.randint(0, 11, (2, 1024), generator=draw)
        labels = torch.full((2, 1024), -100)
        for row, count in enumerate(targets):
            labels[row, 3 : 3 + count] = tokens[row, 4 : 4 + count]
        made.append({"tokens": tokens, "labels": labels})
    return made


def toy_model() -> Any:
    """Return a model that computes logits of the next token, float64."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)).double()


def loss_of(model: Any, batch: dict[str, torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the cross entropy of the targets."""
    return torch.nn.functional.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction=reduction
    )


def joined_batch(several: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return one batch of all rows."""
    return {name: torch.cat([batch[name] for batch in several]) for name in several[0]}


def own_loop(accumulated: bool) -> list[torch.Tensor]:
    """Return the gradients of a step of DDP."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(toy_model())
    own = batches()[rank::ranks]
    step = own if accumulated else [joined_batch(own)]
    scale = loss_scale(step)
    for batch in step:
        (loss_of(model, batch, "sum") * scale).backward()
    return [weight.grad for weight in model.parameters()]


def trained_by_hf(folder: Path, accumulated: int, *, own: bool) -> list[torch.Tensor]:
    """Return the weights after a step of SGD on each rank's next batches. `own`: with the function of the page."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from savable_pipeline.trainers.hf import SavableTrainer, model_inputs

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=259, **size)

    class Inputs(LanguageModelingEncoder):
        def batch(self, items: Any, rng: sp.Rng) -> Any:
            return model_inputs(super().batch(items, rng), config)

    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    steps: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": accumulated}
    plain: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    arguments = TrainingArguments(str(folder / "run"), ignore_data_skip=True, **quiet, **steps, **plain)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).double()
    texts = sp.read(str(folder / "shards"), shuffle=False)
    loader = sp.SavableLoader(texts.encode(Inputs(max_length=256)).batch(1), seed=7, lanes=4)
    more: dict[str, Any] = {}
    if own:
        model.accepts_loss_kwargs = False  # as Qwen2.5-VL
        more["compute_loss_func"] = mean_of_targets
    SavableTrainer(model, arguments, train_loader=loader, **more).train()
    return list(model.state_dict().values())


def mean_of_targets(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the loss as the function of docs/trainers/hf.md does."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def main(into: str, how: str, accumulated: str) -> None:
    folder = Path(into)
    if how != "loop":
        found = trained_by_hf(folder, int(accumulated), own=how == "function")
    else:
        dist.init_process_group("gloo")
        found = own_loop(accumulated == "accumulated")
    torch.save(found, folder / f"{how}-{accumulated}-{dist.get_rank()}-of-{dist.get_world_size()}.pt")
    dist.destroy_process_group()
