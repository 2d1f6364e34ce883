"""What changes of an item are seen, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import pytest
import torch

from savable_pipeline.core.item_changes import changed_part, parts_of


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


class Struct(msgspec.Struct):
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
        (Struct(1000), set_number, "number"),
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
    before = parts_of(item)
    assert changed_part(item, before) is None
    change(item)
    assert changed_part(item, before) == name
