"""Copies the tensors of a batch to page-locked memory, through torch's own caching allocator.

That allocator gives a block out again only when copies from it, as of `tensor.to("cuda", non_blocking=True)`, are done.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any


def pinned(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory, for copies to a GPU that do not wait; itself without a GPU."""
    import torch

    return _pinned(batch, torch.Tensor) if torch.cuda.is_available() else batch


def _pinned(value: Any, tensor: type) -> Any:
    if isinstance(value, tensor):
        return value.pin_memory()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {name: _pinned(part, tensor) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_pinned(part, tensor) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_pinned(part, tensor) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _pinned(getattr(value, field.name), tensor))
        return made
    return value
