"""Asks the kernel to read samples ahead (`posix_fadvise`) as their refs enter the buffer, so that the disk works ahead.

Measured with parts of 25 kB that are not in memory: twice the rate (tools/bench/reading.py cold). A call costs 1 to
10 µs a sample, so none is made where a look at some blocks finds them in memory, nor for small samples, which the
kernel reads ahead by itself. None either for samples of more than 8 MiB: of a film perhaps two seconds are wanted, and
in one that is read as a whole the kernel soon reads ahead.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

import numpy as np

from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.errors import SavableError

_BLOCKS_TRIED = 16  # blocks that are looked at to tell whether all are in memory
_LONG = 8 << 20  # bytes of a sample, such as a film, of which perhaps a little alone is read
SMALL = 16_384  # mean bytes of a sample, below which nothing is announced


class Extents(Protocol):
    """Where samples lie in their files."""

    found: IndexedFiles

    def extents(self, first: Rows, last: Rows, shards: Rows, /) -> tuple[Rows, Rows]:
        """The first byte, and the byte after the last, of runs of samples `first` to `last`, each run in one shard."""


def readahead(rows: Extents, files: ShardFiles, indices: Rows) -> None:
    """Asks the kernel to read these samples, one call per contiguous run. Shards that cannot be opened are left out."""
    found = rows.found
    if found.mean_bytes < SMALL or not hasattr(os, "posix_fadvise"):
        return
    numbers = found.shards_of(indices)
    begins, ends = rows.extents(indices, indices, numbers)
    indices, numbers = indices[ends - begins <= _LONG], numbers[ends - begins <= _LONG]
    if not len(indices):
        return
    first = np.flatnonzero((np.diff(indices, prepend=-2) != 1) | (np.diff(numbers, prepend=-1) != 0))
    last = np.append(first[1:], len(indices)) - 1
    begins, ends = rows.extents(indices[first], indices[last], numbers[first])
    runs = list(zip(numbers[first].tolist(), begins.tolist(), ends.tolist(), strict=True))
    if in_memory(files, runs[:: -(-len(runs) // _BLOCKS_TRIED)]):
        return
    for shard, begin, end in runs:
        with contextlib.suppress(SavableError, OSError):
            os.posix_fadvise(files[shard], begin, end - begin, os.POSIX_FADV_WILLNEED)


def in_memory(files: ShardFiles, runs: list[tuple[int, int, int]]) -> bool:
    """Whether the last byte of each run (shard, first byte, end) can be read without waiting for a disk."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    try:
        return all(os.preadv(files[shard], [byte], end - 1, os.RWF_NOWAIT) == 1 for shard, _, end in runs)
    except (SavableError, OSError):  # the read would wait, or the file system cannot tell
        return False
