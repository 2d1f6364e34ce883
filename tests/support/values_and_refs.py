"""The values that a stage's `take` returns, beside their refs."""

from __future__ import annotations

from typing import Any

from savable_pipeline import custom


def values_and_refs(stage: custom.Stage, n: int) -> tuple[list[Any], list[custom.ItemRef]]:
    """Return the values and refs of the next `n` elements."""
    elements = stage.take(n)
    return [element.value for element in elements], [element.ref for element in elements]
