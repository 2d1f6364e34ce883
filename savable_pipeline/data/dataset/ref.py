"""`Ref`: ID of an item. Its index includes the tag of its source in a `Blend`."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# A ref in a buffer or a state has 12 bytes, so that a large buffer stays small.
REF = np.dtype([("index", "<u8"), ("epoch", "<u4")])
RefArray: TypeAlias = NDArray[np.void]
# Bits 48 to 62 of an index are the tag of its source in a `Blend`. Bit 63 is 0, so an index fits a signed integer.
TAG_SHIFT = 48
TAGS = 1 << 15


class Ref(NamedTuple):
    """ID of an item, from which it can be rebuilt identically.

    Attributes:
        source: A stable hash of the source's name.
        epoch: The epoch in which the sample was read.
        index: The number of the sample in the whole dataset.
        part: The number of the item among those that an encoder builds from one sample.

    Example:
        >>> sample = next(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
        >>> (sample.ref.epoch, sample.ref.index, sample.ref.part)
        (0, 0, 0)
    """

    source: int
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no one needs here
    part: int = 0


def tag_of(index: int) -> int:
    """Return the tag of the source in the index of a ref, 0 without a `Blend`."""
    return index >> TAG_SHIFT


def source_counter(index: int, event: str) -> str:
    """Return the name of a counter of a source, such as "source/3/skipped".

    The source is that of this index, and `event` is what is counted.
    """
    return f"source/{tag_of(index)}/{event}"


def skip_counters(reason: str, index: int) -> tuple[str, str]:
    """Return the names of a stage's two counters for a dropped sample.

    The first counts by reason, the second by the source of this index.
    """
    return f"skipped/{reason}", source_counter(index, "skipped")


def untagged(index: int) -> int:
    """Return the index of a ref in its own dataset."""
    return index & ((1 << TAG_SHIFT) - 1)
