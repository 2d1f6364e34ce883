"""Tells the kernel which blocks will be read, as their refs enter the buffer, so that the disk works ahead.

Measured with parts of 25 kB that are not in memory: twice the rate (tools/bench_reading.py cold). It costs 1 to 10 µs a
sample, and so is left alone where a look at some blocks says that they are in memory, and for small samples, of which a
disk reads ahead enough by itself.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.errors import ShardError

if TYPE_CHECKING:
    from savable_pipeline.dataset import Dataset

_LOOKS = 16  # so many blocks are looked at
SMALL = 16_384  # bytes of a sample in the mean, below which nothing is announced


def announce(dataset: Dataset, index: NDArray[np.int64]) -> None:
    """Have the kernel read the samples with these numbers, run by run. A shard that cannot be opened is passed over."""
    if dataset.mean_bytes < SMALL or not hasattr(os, "posix_fadvise"):
        return
    shards = np.searchsorted(dataset.firsts, index, side="right") - 1
    first = np.flatnonzero((np.diff(index, prepend=-2) != 1) | (np.diff(shards, prepend=-1) != 0))
    last = np.append(first[1:], len(index)) - 1
    begins, ends = dataset.extents(index[first], index[last], shards[first])
    runs = list(zip(shards[first].tolist(), begins.tolist(), ends.tolist(), strict=True))
    if in_memory(dataset, runs[:: -(-len(runs) // _LOOKS)]):
        return
    for shard, begin, end in runs:
        with contextlib.suppress(ShardError, OSError):
            os.posix_fadvise(dataset.descriptor(shard), begin, end - begin, os.POSIX_FADV_WILLNEED)


def in_memory(dataset: Dataset, runs: list[tuple[int, int, int]]) -> bool:
    """Whether the last byte of each run, a shard with first byte and end, can be read without waiting for a disk."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    try:
        return all(os.preadv(dataset.descriptor(shard), [byte], end - 1, os.RWF_NOWAIT) == 1 for shard, _, end in runs)
    except (ShardError, OSError):  # it would wait, or the file system cannot tell
        return False
