"""Parts of items and batches: list them, detect changes, find differences.

Containers are mappings, lists, tuples, named tuples, dataclasses and structs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec


def named_parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a container by name, or None for other values."""
    if type(value) is dict or isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    return None


def listed_parts(value: Any) -> list[Any] | None:
    """Return the parts of a list or tuple in order, or None for any other value."""
    return list(value) if isinstance(value, list | tuple) else None


def with_parts_changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with `change(part)` for each part.

    Any other value is returned as it is.
    """
    named = named_parts(value)
    if isinstance(value, dict):
        return {name: change(part) for name, part in value.items()}
    if isinstance(value, tuple) and named is not None:
        return type(value)(*map(change, value))
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{name: change(part) for name, part in (named or {}).items()})
    if named is None or isinstance(value, Mapping):
        return value
    copied = copy.copy(value)
    for name, part in named.items():
        object.__setattr__(copied, name, change(part))
    return copied


PartVersions: TypeAlias = dict[Any, tuple[Any, int]]


def part_versions(item: Any) -> PartVersions:
    """Return an item's values by key, field or attribute, each with a version.

    A version changes with some writes. The version is a length, or how often a tensor was written to. This is cheap but
    incomplete: writes into NumPy arrays or nested containers change no version.
    """
    if isinstance(item, list):
        return {"the values": (item, len(item))}
    named = named_parts(item) if isinstance(item, dict) or not isinstance(item, Mapping) else None
    parts = {**(named or {}), **getattr(item, "__dict__", {})}
    return {name: (part, _version(part)) for name, part in parts.items()}


def _version(part: Any) -> int:
    """Return the length of a list or dict, or how often a tensor was written to."""
    if isinstance(part, list | dict):
        return len(part)
    try:
        return int(getattr(part, "_version", 0))
    except (RuntimeError, TypeError, ValueError):  # a tensor of inference mode, or a user's own `_version`
        return 0


def changed_part(item: Any, before: PartVersions) -> Any:
    """Return the name of a part that changed, or None if no part did.

    A `cached_property` of the item does not count.
    """
    after = part_versions(item)
    for name in {**before, **after}:
        # the default is a value that no part has, so that an added or removed part differs
        (old, old_version), (new, new_version) = before.get(name, (before, 0)), after.get(name, (after, 0))
        is_cached = isinstance(name, str) and isinstance(getattr(type(item), name, None), cached_property)
        if (old is not new or old_version != new_version) and not is_cached:
            return name
    return None


_STACKABLE = (int, float, str, bytes)


class ItemDifference(NamedTuple):
    """Reason why items cannot be stacked, and the indices of items that show it."""

    text: str
    items: tuple[int, ...]


class DifferingItemsError(ValueError):
    """Error about items that cannot be stacked.

    `items` are the indices of one or two items that show why.
    """

    def __init__(self, message: str, items: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.items = items


def fields_differ(items: Sequence[Any]) -> bool:
    """Return whether items, or dicts within them, have different fields."""
    first = items[0]
    if isinstance(first, Mapping):
        names = first.keys()
        if any(isinstance(item, Mapping) and item.keys() != names for item in items):
            return True
    if type(first) is dict:  # other mappings may read their values from a disk
        return any(
            isinstance(value, dict | list | tuple) and fields_differ([item[name] for item in items])
            for name, value in first.items()
        )
    if isinstance(first, list | tuple) and any(isinstance(value, dict | list | tuple) for value in first):
        return any(map(fields_differ, zip(*items, strict=False)))
    return False


def find_item_difference(items: Sequence[Any], field: str = "") -> ItemDifference | None:
    """Return why items cannot be stacked, or None if they can.

    They need equal keys, lengths, shapes and types. `field` is the name in messages, such as "['boxes'][0]" for nested
    parts, and "" for whole items.
    """
    first = items[0]
    if (difference := _compare(items, field, lambda item: f"type {type(item).__name__}")) is not None:
        return difference
    if isinstance(first, Mapping):
        return _compare(items, field, lambda item: f"the fields {', '.join(map(str, item))}") or _compare_parts(
            items, [(name, f"{field}[{name!r}]") for name in first]
        )
    if hasattr(first, "shape"):
        return _compare(items, field, lambda item: f"shape {tuple(item.shape)}")
    if isinstance(first, list | tuple):
        return _compare(items, field, lambda item: f"{len(item)} values") or _compare_parts(
            items, [(index, f"{field}[{index}]") for index in range(len(first))]
        )
    if isinstance(first, _STACKABLE):
        return None
    return ItemDifference(
        f"{field or 'an item'} is of type {type(first).__name__}, which cannot be stacked; return "
        "numbers, strings, arrays or tensors",
        (0,),
    )


def _compare_parts(items: Sequence[Any], parts: Sequence[tuple[Any, str]]) -> ItemDifference | None:
    """Return the first difference in `parts`, which are pairs of a key or index and a name for messages."""
    differences = (find_item_difference([item[key] for item in items], name) for key, name in parts)
    return next((difference for difference in differences if difference is not None), None)


def _compare(items: Sequence[Any], field: str, describe: Callable[[Any], str]) -> ItemDifference | None:
    """Return the difference of item 0 and the first item that `describe` describes otherwise, or None."""
    descriptions = [describe(item) for item in items]
    other = next((index for index, text in enumerate(descriptions) if text != descriptions[0]), None)
    if other is None:
        return None
    where = f" in {field}" if field else ""
    return ItemDifference(
        f"items differ{where}: item 0 has {descriptions[0]}, item {other} has {descriptions[other]}; make them "
        "equal, or write an sp.TaskEncoder with a batch(items, rng) that pads",
        (0, other),
    )
