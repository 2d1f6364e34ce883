"""How a batch is written down to pass from a worker to the trainer: pickle protocol 5, tensors as their raw bytes.

A tensor keeps the order of its dimensions in memory (channels last, say), on which the bits of a convolution depend.

What is read back comes from our own worker process, never from data or a saved state.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_SMALL = 4096  # bytes: a tensor of so many is copied, so that one that is kept for long does not hold a whole batch


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # without it, there is no tensor
        if (
            torch is not None
            and type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
        ):
            other = value.requires_grad or value.is_quantized or value.is_nested or value.is_conj() or value.is_neg()
            if not other:
                order = () if value.is_contiguous() else _memory_order(value)
                laid = value.permute(order) if order else value
                return _tensor, (_raw(laid), value.dtype, tuple(laid.shape), order)
        return NotImplemented


def dumps(value: Any) -> tuple[list[Buffer], list[memoryview]]:
    """`value` as a pickle in pieces, and the bytes of its larger tensors and arrays, which stay where they are.

    Large bytes are pieces of their own: they are not copied either.
    """
    buffers: list[memoryview] = []

    def apart(buffer: pickle.PickleBuffer) -> bool:
        """Whether the pickle itself is to hold the buffer."""
        raw = buffer.raw()
        if raw.nbytes <= _SMALL:
            return True
        buffers.append(raw)
        return False

    pieces: list[Buffer] = []
    file = SimpleNamespace(write=pieces.append)
    _Pickler(file, protocol=5, buffer_callback=apart).dump(value)
    return pieces, buffers


def loads(pickled: Buffer, buffers: Iterable[Buffer]) -> Any:
    """What `dumps` wrote. Its larger tensors and arrays view `buffers`, and are writable if those are."""
    return pickle.loads(pickled, buffers=buffers)


def _raw(tensor: torch.Tensor) -> pickle.PickleBuffer | bytes:
    import torch

    if not tensor.numel():
        return b""
    return pickle.PickleBuffer(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions, the slowest in memory first."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _tensor(raw: Buffer, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    import torch

    laid = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
    return laid.permute([order.index(i) for i in range(len(order))]) if order else laid
