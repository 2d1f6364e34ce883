"""Helpers of the loader's tests: hashes of the next batches, and a state saved and loaded."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from savable_pipeline.stages.batch_difference import digest


def next_hashes(batches: Iterable[Any], n: int) -> list[str]:
    """Return the hashes of the next `n` batches, or of fewer at the end."""
    return [digest(batch) for _, batch in zip(range(n), batches, strict=False)]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save a state with `torch.save`, and load it with `torch.load` and its defaults."""
    import torch  # imported here because some small processes need only the hashes

    file = io.BytesIO()
    torch.save({"data": state}, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)["data"]
    return loaded
