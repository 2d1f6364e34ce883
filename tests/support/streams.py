"""What the tests of the loader have in common: a stream of batches as hashes, and a state through a file."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from savable_pipeline.stages.batch_difference import digest


def take(batches: Iterable[Any], n: int) -> list[str]:
    """The hashes of the next `n` batches; fewer only at the end."""
    return [digest(batch) for _, batch in zip(range(n), batches, strict=False)]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """What `torch.load`, with its defaults, makes of what `torch.save` wrote."""
    import torch  # here, since some small processes need only the hashes

    file = io.BytesIO()
    torch.save({"data": state}, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)["data"]
    return loaded
