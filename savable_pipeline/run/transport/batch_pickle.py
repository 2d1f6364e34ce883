"""`dumps` and `loads`: pickle a batch by protocol 5, with tensors as raw bytes.

A worker pickles, and the trainer unpickles. A tensor keeps its memory format, such as channels last, because the bits
of a convolution's result depend on it. `loads` only reads pickles that our own worker wrote, never data or a state.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from savable_pipeline.core.named_object import imported

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_COPIED_BYTES = 4096  # tensors up to this size are copied, so that storing one does not keep a whole batch in memory


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = imported("torch")  # if nothing has imported torch, no value is a tensor
        if (
            torch is not None
            and type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
        ):
            special = value.requires_grad or value.is_quantized or value.is_nested or value.is_conj() or value.is_neg()
            if not special:
                by_stride = sorted(range(value.dim()), key=value.stride, reverse=True)  # the order in memory
                order = () if value.is_contiguous() else tuple(by_stride)
                ordered = value.permute(order) if order else value
                return _rebuild_tensor, (_raw_bytes(ordered), value.dtype, tuple(ordered.shape), order)
        return NotImplemented


def dumps(value: Any) -> tuple[list[Buffer], list[memoryview]]:
    """Return the pickle of `value` in pieces, and views of large tensors and arrays.

    The data of tensors and large `bytes` objects are not copied: each large `bytes` object is a piece of its own.
    """
    buffers: list[memoryview] = []

    def goes_inline(buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer is small enough for the pickle itself.

        If not, add it to `buffers`.
        """
        raw = buffer.raw()
        if raw.nbytes <= _COPIED_BYTES:
            return True
        buffers.append(raw)
        return False

    pieces: list[Buffer] = []
    file = SimpleNamespace(write=pieces.append)
    _Pickler(file, protocol=5, buffer_callback=goes_inline).dump(value)
    return pieces, buffers


def loads(pickled: Buffer, buffers: Iterable[Buffer]) -> Any:
    """Return the value that `dumps` wrote.

    Its larger tensors and arrays are views of `buffers`, and writable if those are.
    """
    return pickle.loads(pickled, buffers=buffers)


def _raw_bytes(tensor: torch.Tensor) -> pickle.PickleBuffer | bytes:
    """Return the data of a tensor in the order of its dimensions."""
    import torch

    if not tensor.numel():
        return b""
    return pickle.PickleBuffer(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _rebuild_tensor(raw: Buffer, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor whose dimensions, permuted to `order`, have this shape and these bytes."""
    import torch

    ordered = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
    return ordered.permute([order.index(i) for i in range(len(order))]) if order else ordered
