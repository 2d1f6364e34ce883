"""`ReaderSettings`: the settings that the readers of all stores have in common."""

from __future__ import annotations

import os
from dataclasses import dataclass

from savable_pipeline.core.on_error import OnError, check_on_error
from savable_pipeline.data.shards.selection import Subset, check_subset


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """The settings that the readers of all stores have in common; see `TarShardReader`."""

    split: str | None
    subset: Subset | None
    epochs: int | float | None
    shuffle: bool
    block_size: int | None
    window: int | None
    on_error: OnError
    exclude: str | os.PathLike[str] | None = None

    def check(self, reader: str) -> None:
        """Raises ValueError, which names the `reader`, for a wrong setting."""
        for name in ("block_size", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{reader}: {name} must be at least 1, not {value}")
        check_subset(reader, self.subset)
        check_on_error(reader, self.on_error)
