"""How many bytes of made items the open packs of a process hold, so that many lanes in one process fit into it.

A pack needs only the refs and lengths of its items: an item that is not held is made again when its pack is given.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

_LOOKED_AT = 16  # of a longer list, so many are measured and the rest taken to be like them


class ByteBudget:
    """What all lanes of a process hold together."""

    def __init__(self) -> None:
        self.used = 0


class HeldItems:
    """One stage's part of the budget, given back when the stage is gone."""

    def __init__(self, budget: ByteBudget, *, max_bytes: int) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._bytes = 0
        self.count = 0

    def hold(self, item_bytes: int) -> bool:
        """Whether an item of this size may be held; then it counts."""
        if self._budget.used + item_bytes > self._max_bytes:
            return False
        self._budget.used += item_bytes
        self._bytes += item_bytes
        self.count += 1
        return True

    def release(self, item_bytes: int) -> None:
        """An item of this size is held no longer."""
        self._budget.used -= item_bytes
        self._bytes -= item_bytes
        self.count -= 1

    def __del__(self) -> None:
        self._budget.used -= self._bytes


def size_of(item: Any) -> int:
    """About how many bytes an item takes in memory; the end of a long list is not looked at."""
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, np.ndarray | np.generic | memoryview):
        return item.nbytes
    if isinstance(item, dict):
        return 64 + size_of(list(item)) + size_of(list(item.values()))
    if isinstance(item, list | tuple | set | frozenset):
        return 64 + _sum_of(list(item))
    if isinstance(item, Image.Image):
        return item.width * item.height * len(item.getbands())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return 64 + sum(size_of(getattr(item, field.name)) for field in dataclasses.fields(item))
    if isinstance(item, msgspec.Struct):
        return 64 + sum(size_of(getattr(item, name)) for name in item.__struct_fields__)
    if hasattr(item, "__dict__"):
        return 64 + size_of(vars(item))
    return sys.getsizeof(item)


def _sum_of(parts: list[Any]) -> int:
    if len(parts) <= _LOOKED_AT:
        return sum(map(size_of, parts))
    step = len(parts) // _LOOKED_AT
    return sum(map(size_of, parts[: step * _LOOKED_AT : step])) * len(parts) // _LOOKED_AT
