"""Walks over the containers in items and batches: mappings, lists, tuples, named tuples, dataclasses and structs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec


def named_parts(value: Any) -> Mapping[Any, Any] | None:
    """The parts of a container by name; None for a value that has no named parts."""
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
    """The parts of a list or a tuple, in order; None for any other value."""
    return list(value) if isinstance(value, list | tuple) else None


def with_parts_changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind with `change(part)` in place of each part; any other value as it is."""
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
    made = copy.copy(value)
    for name, part in named.items():
        object.__setattr__(made, name, change(part))
    return made
