"""How a batch is written down to pass from a worker to the trainer: pickle protocol 5, tensors as their raw bytes.

What is read back comes from our own worker process, never from data or a saved state.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
            plain = not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
            if plain:
                return _tensor, (_raw(value), value.dtype, tuple(value.shape))
        return NotImplemented


def dumps(value: Any) -> bytes:
    """`value` as bytes."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def loads(raw: bytes) -> Any:
    """What `dumps` wrote; tensors are writable."""
    return pickle.loads(raw)


def _raw(tensor: torch.Tensor) -> pickle.PickleBuffer | bytes:
    if not tensor.numel():
        return b""
    return pickle.PickleBuffer(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _tensor(raw: bytearray | bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(shape)
