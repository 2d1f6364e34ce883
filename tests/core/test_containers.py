"""The parts of items and batches, a container made anew of changed parts, and what changes of an item are seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from savable_pipeline.core.containers import changed_part, listed_parts, named_parts, part_versions, with_parts_changed


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass(frozen=True)
class Data:
    a: int
    b: int


class Struct(msgspec.Struct, frozen=True):
    a: int
    b: int


@pytest.mark.parametrize(
    "value", [{"a": 1, "b": 2}, Pair(1, 2), Data(1, 2), Struct(1, 2)], ids=lambda v: type(v).__name__
)
def test_named_parts_of_a_container_can_be_changed(value: Any) -> None:
    assert named_parts(value) == {"a": 1, "b": 2}
    changed = with_parts_changed(value, lambda part: part * 10)
    assert type(changed) is type(value)
    assert named_parts(changed) == {"a": 10, "b": 20}
    assert named_parts(value) == {"a": 1, "b": 2}


@pytest.mark.parametrize("value", [[1, 2], (1, 2)], ids=lambda v: type(v).__name__)
def test_listed_parts_of_a_container_can_be_changed(value: Any) -> None:
    assert named_parts(value) is None
    assert listed_parts(value) == [1, 2]
    assert with_parts_changed(value, lambda part: part * 10) == type(value)([10, 20])


@pytest.mark.parametrize("value", [3, "text", b"bytes", None, {1, 2}, Data, Struct], ids=repr)
def test_values_that_are_not_containers_have_no_parts(value: Any) -> None:
    assert named_parts(value) is None and listed_parts(value) is None
    assert with_parts_changed(value, lambda part: 0) is value


def test_mapping_that_is_not_a_dict_has_parts_and_is_not_changed() -> None:
    value = MappingProxyType({"a": 1})
    assert named_parts(value) == {"a": 1}
    assert with_parts_changed(value, lambda part: 0) is value


@dataclass
class Text:
    """An item with fields, a list, a dict, and a value that it computes when it is asked for."""

    number: int
    tokens: list[int]
    more: dict[str, int] = field(default_factory=dict)

    @cached_property
    def total(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Slotted:
    """An item without a dict of its attributes."""

    number: int


class Note(msgspec.Struct):
    """An item of msgspec."""

    number: int


def set_number(item: Any) -> None:
    item.number += 1000


@pytest.mark.parametrize(
    ("item", "change", "name"),
    [
        (Text(1000, [7]), set_number, "number"),
        (Text(1, [7]), lambda item: item.tokens.append(8), "tokens"),
        (Text(1, [7]), lambda item: item.more.update(mine=1), "more"),
        (Text(1, [7]), lambda item: setattr(item, "note", "mine"), "note"),
        (Text(1, [7]), lambda item: item.total, None),
        (Slotted(1000), set_number, "number"),
        (Note(1000), set_number, "number"),
        ({"number": 1000}, lambda item: item.update(number=1001), "number"),
        ({"number": 1000}, lambda item: item.update(note=None), "note"),
        ({"number": 1000, 3: 4}, lambda item: item.pop(3), 3),
        ({"tokens": torch.zeros(2)}, lambda item: item["tokens"].sum(), None),
        ({"tokens": torch.zeros(2)}, lambda item: item.update(tokens=item["tokens"] + 1), "tokens"),
        ({"tokens": torch.zeros(2)}, lambda item: item["tokens"].add_(1), "tokens"),
        ({"tokens": torch.zeros(2)}, lambda item: item["tokens"].__setitem__(1, 7), "tokens"),
        ([7, 8], lambda item: item.append(9), "the values"),
        ("text", len, None),
    ],
)
def test_a_replaced_added_or_removed_part_is_named(item: Any, change: Callable[[Any], Any], name: Any) -> None:
    before = part_versions(item)
    assert changed_part(item, before) is None
    change(item)
    assert changed_part(item, before) == name
