"""`loss_scale`: turns summed losses into the gradient of a mean over all targets.

The mean is over all ranks and micro-batches. DDP and FSDP average gradients over ranks. Two ranks with packs of
10 and 1,000 targets, each divided by its own number, would weigh a target of the first 100 times as much as one of the
second.

    gradient = mean over ranks of d(local sum · scale) = d(sum of all) / targets      scale = ranks / targets of all
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_IGNORED_LABEL = -100


def loss_scale(batches: Iterable[Mapping[str, Any]], *, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return the number of ranks divided by the targets of all ranks in a step.

    Collective. A step is one of the optimizer. Multiply the *summed* loss of each micro-batch by it. A trainer that
    divides by the number of accumulated batches, as Accelerate, DeepSpeed and Lightning do, needs the loss times that
    number too.

    Args:
        batches: This rank's batches of the step, each with `labels`. A label of -100 is no target.
        group: The ranks whose gradients are averaged. None (default): all ranks, or this process alone without
            torch.distributed.

    Returns:
        float32 (), on the device of the labels; 1 / targets for one process, and finite without targets.

    Example:
        >>> from savable_pipeline.trainers.loss_scale import loss_scale
        >>> batches = [{"labels": torch.tensor([[5, 6, -100]])}, {"labels": torch.tensor([[-100, 7, 8]])}]
        >>> float(loss_scale(batches))
        0.25
    """
    import torch
    import torch.distributed as dist

    targets = torch.stack([(batch["labels"] != _IGNORED_LABEL).sum() for batch in batches]).sum()
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size(group)
        dist.all_reduce(targets, group=group)
    return ranks / targets.clamp(min=1).float()
