"""A limit on the bytes of made items that the open packs of a process hold together, however many lanes it runs.

An open pack needs only the refs and lengths of its items: an item beyond the limit is dropped, and made again when its
pack is given.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from savable_pipeline.core.containers import named_parts
from savable_pipeline.data.dataset.sample import Sample

_LEAVES = {int, float, str, bytes, bool, type(None)}
_LOOKED_AT = 16  # parts of a longer list that are measured; the rest is taken to be like them


class MemoryBudget:
    """The bytes that all lanes of a process hold together, whatever threads run them."""

    def __init__(self) -> None:
        self.used = 0
        self.lock = threading.RLock()  # reentrant, since garbage may be collected in any thread at any moment


class BudgetShare:
    """The bytes that one stage holds, released when the stage is garbage-collected."""

    def __init__(self, budget: MemoryBudget, *, max_bytes: int) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._bytes = 0
        self.count = 0

    def hold(self, item_bytes: int) -> bool:
        """Count an item of this size as held and return True; False if it exceeds the limit."""
        with self._budget.lock:
            if self._budget.used + item_bytes > self._max_bytes:
                return False
            self._budget.used += item_bytes
        self._bytes += item_bytes
        self.count += 1
        return True

    def release(self, item_bytes: int) -> None:
        """Stop counting an item of this size."""
        with self._budget.lock:
            self._budget.used -= item_bytes
        self._bytes -= item_bytes
        self.count -= 1

    def __del__(self) -> None:
        with self._budget.lock:
            self._budget.used -= self._bytes


def size_of(item: Any) -> int:
    """The approximate size of an item in memory, in bytes; of a long list, some elements are measured."""
    if type(item) in _LEAVES:  # most parts of an item are of these types, and the checks below take longer
        return sys.getsizeof(item)
    if isinstance(nbytes := getattr(item, "nbytes", None), int):  # a tensor, an array, a memoryview
        return nbytes
    if isinstance(item, Sample):
        return sys.getsizeof(item)  # its parts are not in memory: they are read when asked for
    if isinstance(item, list | tuple | set | frozenset):
        return 64 + _sum_of(list(item))
    if (named := named_parts(item)) is not None:
        return 64 + size_of(list(named)) + size_of(list(named.values()))
    pillow = sys.modules.get("PIL.Image")  # if nothing has imported Pillow, no item is an image
    if pillow is not None and isinstance(item, pillow.Image):
        return int(item.width * item.height * len(item.getbands()))
    if hasattr(item, "__dict__"):
        return 64 + size_of(vars(item))
    return sys.getsizeof(item)


def _sum_of(parts: list[Any]) -> int:
    if len(parts) <= _LOOKED_AT:
        return sum(map(size_of, parts))
    step = len(parts) // _LOOKED_AT
    return sum(map(size_of, parts[: step * _LOOKED_AT : step])) * len(parts) // _LOOKED_AT
