"""The parts of items and batches, and a container made anew of changed parts."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest

from savable_pipeline.core.containers import listed_parts, named_parts, with_parts_changed


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
def test_named_parts_and_the_same_container_with_others(value: Any) -> None:
    assert named_parts(value) == {"a": 1, "b": 2}
    changed = with_parts_changed(value, lambda part: part * 10)
    assert type(changed) is type(value)
    assert named_parts(changed) == {"a": 10, "b": 20}
    assert named_parts(value) == {"a": 1, "b": 2}


@pytest.mark.parametrize("value", [[1, 2], (1, 2)], ids=lambda v: type(v).__name__)
def test_listed_parts_and_the_same_container_with_others(value: Any) -> None:
    assert named_parts(value) is None
    assert listed_parts(value) == [1, 2]
    assert with_parts_changed(value, lambda part: part * 10) == type(value)([10, 20])


@pytest.mark.parametrize("value", [3, "text", b"bytes", None, {1, 2}, Data, Struct], ids=repr)
def test_a_leaf_has_no_parts(value: Any) -> None:
    assert named_parts(value) is None and listed_parts(value) is None
    assert with_parts_changed(value, lambda part: 0) is value


def test_a_mapping_that_is_no_dict_has_parts_and_stays_as_it_is() -> None:
    value = MappingProxyType({"a": 1})
    assert named_parts(value) == {"a": 1}
    assert with_parts_changed(value, lambda part: 0) is value
