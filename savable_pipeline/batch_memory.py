"""`stack` and `empty`: tensors for a batch, which in a worker lie at once where the trainer will read them.

    encoder ── stack(images) ──▶ a tensor in a shared segment ── its place in the segment ──▶ trainer

Without them a batch is made in the worker's own memory and then copied. The values are the same in either case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Memory(Protocol):
    """Gives room for batches."""

    def allocate(self, size: int) -> memoryview | None:
        """So many writable bytes, or None if there is no room for them."""


_memory: Memory | None = None


def use(memory: Memory | None) -> None:
    """From now on, take what this process's batches need from here."""
    global _memory
    _memory = memory


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of this shape, to be filled as a part of a batch."""
    import torch

    made = torch.empty(0, dtype=dtype)
    count = 1
    for length in shape:
        count *= length
    room = _memory.allocate(count * made.element_size()) if _memory is not None and count else None
    if room is None:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(room, dtype=dtype, count=count).view(tuple(shape))


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `torch.stack(tensors)` gives: (n, …) of n tensors of one shape. Raises RuntimeError if shapes differ."""
    import torch

    first = tensors[0]
    plain = all(
        type(tensor) is torch.Tensor and tensor.dtype == first.dtype and tensor.device.type == "cpu"
        and tensor.layout is torch.strided and not tensor.requires_grad and tensor.shape == first.shape
        for tensor in tensors
    )  # fmt: skip
    if not plain:
        return torch.stack(list(tensors))
    return torch.stack(list(tensors), out=empty((len(tensors), *first.shape), first.dtype))


def collate(items: list[Any]) -> Any:
    """What torch's `default_collate` makes of items, with `stack` for their tensors and arrays."""
    import torch
    from torch.utils.data._utils.collate import collate as collate_with
    from torch.utils.data._utils.collate import default_collate_fn_map

    def stacked(tensors: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        return stack(tensors)

    return collate_with(items, collate_fn_map={**default_collate_fn_map, torch.Tensor: stacked})
