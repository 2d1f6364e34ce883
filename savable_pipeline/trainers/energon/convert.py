"""`as_torch_gives`: a batch as torch's `DataLoader`, and so Energon's loader, hands it on: with tensors for arrays."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_convert

_KEPT = {int, float, bool, str, bytes, type(None), torch.Tensor}


def as_torch_gives(value: Any) -> Any:
    """What `default_convert` makes of a value, without a call for each number of a list."""
    kind = type(value)
    if kind in _KEPT or (kind in (list, tuple) and set(map(type, value)) <= _KEPT):
        return value
    if kind is dict:
        return {name: as_torch_gives(each) for name, each in value.items()}
    if kind in (list, tuple):
        return kind([as_torch_gives(each) for each in value])
    converted: Any = default_convert(value)  # type: ignore[no-untyped-call]
    return converted
