"""`MediaTotals`: a table of media in numbers, for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MediaTotals:
    """The media of one part. `size`, `fps` and `rate` are the most frequent ones, with their share; "" for none."""

    parts: int
    hours: float
    broken: int  # parts whose headers cannot be read
    size: str
    fps: str
    rate: str

    @classmethod
    def of(cls, rows: NDArray[Any]) -> MediaTotals:
        """Those of the rows of a table: ROW (any,)."""
        hours = float(np.nansum(rows["duration_s"])) / 3600
        sized = rows[rows["width"] >= 0]
        return cls(
            len(rows),
            hours,
            int(np.count_nonzero(rows["broken"])),
            _most(
                sized["width"].astype(np.int64) << 32 | sized["height"], lambda size: f"{size >> 32}×{size % (1 << 32)}"
            ),
            _most(rows["fps"][~np.isnan(rows["fps"])].round(2), lambda fps: f"{fps:g}"),
            _most(rows["rate"][rows["rate"] >= 0], lambda rate: f"{rate:,} Hz"),
        )


def _most(values: NDArray[Any], shown: Any) -> str:
    """The most frequent of these values, and its share where there are others."""
    if not len(values):
        return ""
    each, counts = np.unique(values, return_counts=True)
    best = int(counts.argmax())
    share = f" ({counts[best] / len(values):.0%})" if len(each) > 1 else ""
    return f"{shown(each[best].item())}{share}"
