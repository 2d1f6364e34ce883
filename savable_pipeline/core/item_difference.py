"""Finds why items cannot be stacked to a batch: the field in which two of them differ, or that holds no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_STACKED = (int, float, str, bytes)


class ItemDifference(NamedTuple):
    """What differs, in words, and the numbers of two items that do."""

    text: str
    items: tuple[int, ...]


class DifferingItemsError(ValueError):
    """Items that cannot be stacked; `items` are the numbers of two that show why."""

    def __init__(self, message: str, items: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.items = items


def fields_differ(items: Sequence[Any]) -> bool:
    """Whether some of these items, or of the dicts within them, have a field that others do not have."""
    first = items[0]
    if isinstance(first, Mapping):
        names = first.keys()
        if any(isinstance(item, Mapping) and item.keys() != names for item in items):
            return True
    if type(first) is dict:  # no mapping that reads its values from a disk
        return any(
            isinstance(value, dict | list | tuple) and fields_differ([item[name] for item in items])
            for name, value in first.items()
        )
    if isinstance(first, list | tuple) and any(isinstance(value, dict | list | tuple) for value in first):
        return any(map(fields_differ, zip(*items, strict=False)))
    return False


def find_difference(items: Sequence[Any], field: str = "") -> ItemDifference | None:
    """The first field in which items differ in keys, length, shape or type, or that cannot be stacked."""
    first = items[0]
    kind = _differing(items, field, lambda item: f"type {type(item).__name__}")
    if kind is not None:
        return kind
    if isinstance(first, Mapping):
        return _differing(items, field, lambda item: f"the fields {', '.join(map(str, item))}") or _first_found(
            items, [(name, f"{field}[{name!r}]") for name in first]
        )
    if hasattr(first, "shape"):
        return _differing(items, field, lambda item: f"shape {tuple(item.shape)}")
    if isinstance(first, list | tuple):
        return _differing(items, field, lambda item: f"{len(item)} values") or _first_found(
            items, [(number, f"{field}[{number}]") for number in range(len(first))]
        )
    if isinstance(first, _STACKED):
        return None
    return ItemDifference(
        f"{field or 'an item'} is of type {type(first).__name__}, which cannot be stacked",
        (0,),
    )


def _first_found(items: Sequence[Any], parts: Sequence[tuple[Any, str]]) -> ItemDifference | None:
    found = (find_difference([item[part] for item in items], name) for part, name in parts)
    return next((difference for difference in found if difference is not None), None)


def _differing(items: Sequence[Any], field: str, describe: Callable[[Any], str]) -> ItemDifference | None:
    shown = [describe(item) for item in items]
    other = next((number for number, text in enumerate(shown) if text != shown[0]), None)
    if other is None:
        return None
    where = f" in {field}" if field else ""
    return ItemDifference(
        f"items differ{where}: item 0 has {shown[0]}, item {other} has {shown[other]}; make them "
        "equal, or write a batch(items, rng) that pads",
        (0, other),
    )
