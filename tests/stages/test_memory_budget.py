"""How large items are, about, and a budget that the lanes of a process share."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from savable_pipeline.stages.held_items import size_of


@dataclasses.dataclass(slots=True)
class Slotted:
    data: bytes


class Plain:
    def __init__(self) -> None:
        self.data = bytes(1000)


class Struct(msgspec.Struct):
    data: bytes


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(250),
        torch.zeros(500, dtype=torch.int16),
        np.zeros(1000, np.uint8),
        memoryview(bytes(1000)),
        bytes(1000),
        bytearray(1000),
        "x" * 1000,
        {"a": bytes(500), "b": [bytes(250), (bytes(250),)]},
        [bytes(10)] * 20,
        {bytes([i]) * 50 for i in range(12)},
        Slotted(bytes(1000)),
        Plain(),
        Struct(bytes(1000)),
        Image.new("L", (20, 50)),
        list(range(35)),
    ],
    ids=lambda item: type(item).__name__,
)
def test_items_of_a_thousand_bytes_are_about_that(item: Any) -> None:
    assert 900 <= size_of(item) <= 1600


def test_a_long_list_is_measured_by_some_of_its_parts() -> None:
    looked_at = []

    class Part:
        def __sizeof__(self) -> int:
            looked_at.append(self)
            return 100

        __slots__ = ()

    assert size_of([Part() for _ in range(100_000)]) == pytest.approx(100_000 * 116, rel=0.2)
    assert len(looked_at) == 16
