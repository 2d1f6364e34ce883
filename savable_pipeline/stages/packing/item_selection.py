"""What an `ItemPacker` asks its function: for groups of the very items that it is shown, none of them changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from savable_pipeline.core.containers import named_parts
from savable_pipeline.core.rng import Rng

Select: TypeAlias = Callable[[list[Any], Rng], Sequence[Sequence[Any]]]
_Parts: TypeAlias = dict[Any, tuple[Any, int]]


def select_places(select: Select, items: list[Any], rng: Rng) -> list[list[int]]:
    """The groups that `select` makes, as places of their items. Raises ValueError for a wrong answer."""
    before = list(map(_parts, items))
    groups = [list(group) for group in select(list(items), rng)]
    for item, parts in zip(items, before, strict=True):
        _check_unchanged(item, parts, _parts(item))
    free: dict[int, list[int]] = {}
    for place in reversed(range(len(items))):  # an object that is there several times has its places in turn
        free.setdefault(id(items[place]), []).append(place)
    if [] in groups:
        raise ValueError(f"group {groups.index([])} is empty")
    return [[_place(free, item, number) for item in group] for number, group in enumerate(groups)]


def _place(free: dict[int, list[int]], item: Any, number: int) -> int:
    if id(item) not in free:
        raise ValueError(
            f"group {number} has an object that is none of the items: return the very objects that were given, no "
            "copies; what changes an item belongs in encode or pack"
        )
    if not free[id(item)]:
        raise ValueError(f"group {number} has an item that is in a group already")
    return free[id(item)].pop()


def _parts(item: Any) -> _Parts:
    """The parts of an item by name, each with its length: what shows most changes cheaply."""
    named = named_parts(item) if isinstance(item, dict) or not isinstance(item, Mapping) else None
    parts = {"the item": item, **(named or {}), **getattr(item, "__dict__", {})}
    return {name: (part, len(part) if isinstance(part, list | dict) else 0) for name, part in parts.items()}


def _check_unchanged(item: Any, before: _Parts, after: _Parts) -> None:
    for name in {**before, **after}:
        (old, length), (new, new_length) = before.get(name, (before, 0)), after.get(name, (after, 0))
        if (old is new and length == new_length) or isinstance(getattr(type(item), str(name), None), cached_property):
            continue
        raise ValueError(
            f"it changed {name!r} of an item of type {type(item).__name__}, which is not changed when the item is made "
            "again, after a resume or beyond max_held_bytes: compute it in encode or pack"
        )
