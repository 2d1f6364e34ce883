"""What a stage's `take` returns, as values beside refs."""

from __future__ import annotations

from typing import Any

from savable_pipeline import custom


def values_and_refs(stage: custom.Stage, n: int) -> tuple[list[Any], list[custom.ItemRef]]:
    """The values and refs of the next elements."""
    elements = stage.take(n)
    return [element.value for element in elements], [element.ref for element in elements]
