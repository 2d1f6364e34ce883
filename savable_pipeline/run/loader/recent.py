"""`Recent`: percentiles of the last numbers of a series."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

_PERCENTS = (50, 90, 99)


class Recent:
    """Keeps the last `kept` numbers that were added."""

    def __init__(self, kept: int = 1024) -> None:
        self._numbers: deque[float] = deque(maxlen=kept)
        self.add = self._numbers.append

    def percentiles(self, name: str) -> Iterator[tuple[str, float]]:
        """`NAME/p50`, `/p90` and `/p99`: the least number that 50, 90 or 99 % do not exceed. None without numbers."""
        ordered = sorted(self._numbers)
        if ordered:
            for percent in _PERCENTS:
                yield f"{name}/p{percent}", ordered[-(-len(ordered) * percent // 100) - 1]
