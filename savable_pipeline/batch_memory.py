"""`stack` and `empty`: tensors for a batch, which in a worker lie at once where the trainer will read them.

    encoder ── stack(images) ──▶ a tensor in a shared segment ── its place in the segment ──▶ trainer

Without them a batch is made in the worker's own memory and then copied. The values are the same in either case. Items
may lie there too, made in `empty` or read by `Sample.array`: those that lie side by side are stacked without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Memory(Protocol):
    """Gives room for batches."""

    def allocate(self, size: int) -> memoryview | None:
        """So many writable bytes, or None if there is no room for them."""

    def given(self, address: int, size: int) -> memoryview | None:
        """These bytes of this process's memory, if they were all allocated here for the next batch."""


_memory: Memory | None = None


def use(memory: Memory | None) -> None:
    """From now on, take what this process's batches need from here."""
    global _memory
    _memory = memory


def empty_bytes(size: int) -> NDArray[np.uint8]:
    """An uninitialised array, uint8 (size,), to be filled as a part of an item or a batch."""
    room = _memory.allocate(size) if _memory is not None and size else None
    return np.empty(size, np.uint8) if room is None else np.frombuffer(room, np.uint8)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of this shape, to be filled as a part of an item or a batch."""
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
    """What `torch.stack(tensors)` gives: (n, …) of n tensors of one shape. Raises RuntimeError if shapes differ.

    Tensors that lie side by side in a batch's memory are not copied: what is given views them.
    """
    import torch

    first = tensors[0]
    plain = all(
        type(tensor) is torch.Tensor and tensor.dtype == first.dtype and tensor.device.type == "cpu"
        and tensor.layout is torch.strided and not tensor.requires_grad and tensor.shape == first.shape
        for tensor in tensors
    )  # fmt: skip
    if not plain:
        return torch.stack(list(tensors))
    shape = (len(tensors), *first.shape)
    room = _side_by_side(tensors)
    if room is not None:
        return torch.frombuffer(room, dtype=first.dtype).view(shape)
    return torch.stack(list(tensors), out=empty(shape, first.dtype))


def _side_by_side(tensors: Sequence[torch.Tensor]) -> memoryview | None:
    """The memory of these tensors, of one shape and type, if they fill a piece of what was given for the next batch."""
    start, size = tensors[0].data_ptr(), tensors[0].numel() * tensors[0].element_size()
    if _memory is None or not size or tensors[-1].data_ptr() != start + (len(tensors) - 1) * size:
        return None
    for number, tensor in enumerate(tensors):
        if tensor.data_ptr() != start + number * size or not tensor.is_contiguous():
            return None
    return _memory.given(start, size * len(tensors))


def collate(items: list[Any]) -> Any:
    """What torch's `default_collate` makes of items, with `stack` for their tensors and arrays."""
    import torch
    from torch.utils.data._utils.collate import collate as collate_with
    from torch.utils.data._utils.collate import default_collate_fn_map

    def stacked(tensors: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        return stack(tensors)

    return collate_with(items, collate_fn_map={**default_collate_fn_map, torch.Tensor: stacked})
