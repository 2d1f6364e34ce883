"""Finds what a function changed in an item that it was only to look at."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias

from savable_pipeline.core.containers import named_parts

Parts: TypeAlias = dict[Any, tuple[Any, int]]


def parts_of(item: Any) -> Parts:
    """The keys, fields and attributes of an item, each with its length or a tensor's version: cheap, but not complete.

    A write into a NumPy array, or into what a part holds in turn, does not show.
    """
    if isinstance(item, list):
        return {"the values": (item, len(item))}
    named = named_parts(item) if isinstance(item, dict) or not isinstance(item, Mapping) else None
    parts = {**(named or {}), **getattr(item, "__dict__", {})}
    return {name: (part, _version(part)) for name, part in parts.items()}


def _version(part: Any) -> int:
    """The length of a list or dict, or how often a tensor has been written to."""
    if isinstance(part, list | dict):
        return len(part)
    try:
        return int(getattr(part, "_version", 0))
    except (RuntimeError, TypeError, ValueError):  # a tensor of the mode of inference; a field of the user's own
        return 0


def changed_part(item: Any, before: Parts) -> Any:
    """The name of a part that is not as it was, unless it is a `cached_property` of the item; None if there is none."""
    after = parts_of(item)
    for name in {**before, **after}:
        (old, length), (new, new_length) = before.get(name, (before, 0)), after.get(name, (after, 0))
        if (old is not new or length != new_length) and not _is_cache(item, name):
            return name
    return None


def _is_cache(item: Any, name: Any) -> bool:
    return isinstance(name, str) and isinstance(getattr(type(item), name, None), cached_property)
