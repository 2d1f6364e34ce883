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
from savable_pipeline.stages.element import Element

_LEAVES = {int, float, str, bytes, bool, type(None)}
_LOOKED_AT = 16  # parts of a longer list that are measured; the rest is taken to be like them


class MemoryBudget:
    """The bytes that all lanes of a process hold together, whatever threads run them."""

    def __init__(self) -> None:
        self.used = 0
        self.lock = threading.RLock()  # reentrant, since garbage may be collected in any thread at any moment


class BudgetShare:
    """The bytes of made elements that one stage holds, released when the stage is garbage-collected."""

    def __init__(self, budget: MemoryBudget, *, max_bytes: int) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._bytes = 0
        self.count = 0

    def keep(self, element: Element, value: Any) -> None:
        """Give an unmade element this value, if that does not exceed the limit."""
        size = size_of(value)
        with self._budget.lock:
            if self._budget.used + size > self._max_bytes:
                return
            self._budget.used += size
        self._bytes += size
        self.count += 1
        element.value, element.held_bytes = value, size

    def release(self, element: Element) -> None:
        """Count an element as held no more."""
        if element.is_made:
            with self._budget.lock:
                self._budget.used -= element.held_bytes
            self._bytes -= element.held_bytes
            self.count -= 1

    def __del__(self) -> None:
        with self._budget.lock:
            self._budget.used -= self._bytes


def size_of(item: Any) -> int:
    """The approximate size of an item in memory, in bytes; of a long list, some elements are measured."""
    if type(item) in _LEAVES:  # most parts of an item are of these types, and the checks below take longer
        return sys.getsizeof(item)
    if type(item) is list:
        return 64 + _sum_of(item)
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
    step = len(parts) // _LOOKED_AT
    some = parts[: step * _LOOKED_AT : step] if step > 1 else parts
    measure = sys.getsizeof if _LEAVES.issuperset(map(type, some)) else size_of
    return sum(map(measure, some)) * len(parts) // max(1, len(some))
