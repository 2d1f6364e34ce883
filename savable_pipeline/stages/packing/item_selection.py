"""What an `ItemPacker` asks its function: for groups of the very items that it is shown, none of them changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from savable_pipeline.core.item_changes import changed_part, parts_of
from savable_pipeline.core.rng import Rng

Select: TypeAlias = Callable[[list[Any], Rng], Sequence[Sequence[Any]]]


def select_places(select: Select, items: list[Any], rng: Rng) -> list[list[int]]:
    """The groups that `select` makes, as places of their items. Raises ValueError for a wrong answer."""
    before = list(map(parts_of, items))
    groups = _groups(select(list(items), rng))
    for item, parts in zip(items, before, strict=True):
        if (name := changed_part(item, parts)) is not None:
            raise ValueError(
                f"it changed {name!r} of an item of type {type(item).__name__}, which is not changed when the item is "
                "made again, after a resume or beyond max_held_bytes: compute it in encode or pack"
            )
    free: dict[int, list[int]] = {}
    for place in reversed(range(len(items))):  # an object that is there several times has its places in turn
        free.setdefault(id(items[place]), []).append(place)
    return [_places(group, number, free) for number, group in enumerate(groups)]


def _groups(found: Any) -> list[list[Any]]:
    if not isinstance(found, Iterable) or isinstance(found, dict | str):
        raise ValueError(f"it returned {type(found).__name__}: return a list of packs, each a list of items")
    groups = list(found)
    for group in groups:
        if not isinstance(group, list | tuple):
            raise ValueError(f"a pack is a list of items, not {type(group).__name__}: return a list of such lists")
    return [list(group) for group in groups]


def _places(group: list[Any], number: int, free: dict[int, list[int]]) -> list[int]:
    places: list[int] = []
    for item in group:
        if id(item) not in free:
            raise ValueError(
                f"group {number} has an object, of type {type(item).__name__}, that is none of the items: return "
                "those that were given, no copies and no numbers; "
                "what changes an item belongs in encode or pack"
            )
        if not free[id(item)]:
            raise ValueError(f"group {number} has an item that is in a group already")
        places.append(free[id(item)].pop())
    if not places:
        raise ValueError(f"group {number} is empty")
    return places
