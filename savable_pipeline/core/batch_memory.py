"""`stack` and `empty`: create batch tensors in the memory shared with the trainer.

    encoder ── stack(images) ──▶ tensor in a shared segment ── offset in the segment ──▶ trainer

Tensors that other functions create are in the worker's own memory and are copied later, with the same values. Items may
be in shared memory too, if `empty` or `Sample.array` allocated them. `stack` joins adjacent items without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.containers import DifferingItemsError, fields_differ, find_item_difference

if TYPE_CHECKING:
    import torch


class Memory(Protocol):
    """Allocates memory for batches."""

    def allocate(self, size: int) -> memoryview | None:
        """Return `size` writable bytes, or None if there is no room for them."""

    def allocated(self, address: int, size: int) -> memoryview | None:
        """Return the `size` bytes at an address, or None.

        The result is None unless `allocate` returned these bytes for the batch that is being built.
        """


_memory: Memory | None = None


def use(memory: Memory | None) -> None:
    """Allocate this process's batches in `memory`; None selects ordinary memory."""
    global _memory
    _memory = memory


def empty_bytes(size: int) -> NDArray[np.uint8]:
    """Return an uninitialised array to fill as a part of an item: uint8 (size,)."""
    buffer = _memory.allocate(size) if _memory is not None and size else None
    return np.empty(size, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor, to fill as a part of an item or a batch.

    In a worker, the tensor is in the shared memory of the next batch if there is room, and reaches the trainer without
    a copy. Elsewhere it is `torch.empty(shape, dtype=dtype)`.

    Args:
        shape: The length of each dimension.
        dtype: The type of the elements.

    Example:
        >>> ids = sp.empty((2, 3), torch.int64).fill_(7)  # int64 (2, 3)
        >>> ids.tolist()
        [[7, 7, 7], [7, 7, 7]]
    """
    import torch

    element_bytes = torch.empty(0, dtype=dtype).element_size()
    count = math.prod(shape)
    buffer = _memory.allocate(count * element_bytes) if _memory is not None and count else None
    if buffer is None:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(tuple(shape))


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack n tensors of one shape to one tensor (n, …), as `torch.stack` does.

    In a worker, the result is in the batch's shared memory. If the tensors are already adjacent there (see `empty` and
    `Sample.array`), the result is a view of them.

    Args:
        tensors: At least one tensor.

    Raises:
        RuntimeError: Their shapes differ.

    Example:
        >>> sp.stack([torch.tensor([1, 2]), torch.tensor([3, 4])])  # int64 (2, 2)
        tensor([[1, 2],
                [3, 4]])
    """
    import torch

    first = tensors[0]
    is_plain = all(
        type(tensor) is torch.Tensor and tensor.dtype == first.dtype and tensor.device.type == "cpu"
        and tensor.layout is torch.strided and not tensor.requires_grad and tensor.shape == first.shape
        for tensor in tensors
    )  # fmt: skip
    if not is_plain:
        return torch.stack(list(tensors))
    shape = (len(tensors), *first.shape)
    if (buffer := _adjacent_memory(tensors)) is not None:
        return torch.frombuffer(buffer, dtype=first.dtype).view(shape)
    return torch.stack(list(tensors), out=empty(shape, first.dtype))


def _adjacent_memory(tensors: Sequence[torch.Tensor]) -> memoryview | None:
    """Return the memory of tensors of one shape that are adjacent in the next batch, else None."""
    start, size = tensors[0].data_ptr(), tensors[0].numel() * tensors[0].element_size()
    if _memory is None or not size or tensors[-1].data_ptr() != start + (len(tensors) - 1) * size:
        return None
    if any(each.data_ptr() != start + i * size or not each.is_contiguous() for i, each in enumerate(tensors)):
        return None
    return _memory.allocated(start, size * len(tensors))


def collate(items: list[Any]) -> Any:
    """Build a batch as torch's `default_collate` does, but with `stack`.

    Raises `DifferingItemsError`, which names the field, for items that cannot be stacked.
    """
    import torch
    from torch.utils.data._utils import collate as torch_collate

    functions = {**torch_collate.default_collate_fn_map, torch.Tensor: lambda tensors, **_: stack(tensors)}
    try:
        if fields_differ(items):
            raise KeyError  # torch would drop the fields that the first item does not have
        return torch_collate.collate(items, collate_fn_map=functions)
    except (RuntimeError, TypeError, KeyError):
        if (difference := find_item_difference(items)) is None:
            raise
        raise DifferingItemsError(*difference) from None
