"""Receipts: int64 (rows, 2), the slot and the row of each row of a batch, or -1; what a trainer hands back for them.

A trainer mostly hands back, whole, what it was handed. Then its rows are known without torch, which would take more
time than all else: about 10 µs, in a loop that runs much other code in between.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from savable_pipeline.run.state.flights import MOST_ROWS
from savable_pipeline.stages.batch_samples import Integers

if TYPE_CHECKING:
    import torch

_AHEAD = 1024  # receipts that are made at once: one batch's alone would take ten times as long


class Handed(msgspec.Struct, frozen=True, gc=False):
    """Receipts as the trainer has them; `array` views the same memory, `digest` is of what stood there."""

    tensor: torch.Tensor
    array: Any  # int64 (rows, 2)
    digest: int

    @classmethod
    def of(cls, batch: int, size: int, rows: int = -1) -> Handed:
        """Those of a batch of this size; -1 for rows that are not among the bits `rows`."""
        import torch

        array: Any = _whole(batch, size)
        if rows + 1 and rows + 1 != 1 << size:
            array[[not rows >> row & 1 for row in range(size)]] = -1
        return cls(torch.from_numpy(array), array, xxh3_64_intdigest(array))

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written there."""
        return xxh3_64_intdigest(self.array) == self.digest


class NextReceipts:
    """Makes the receipts of whole batches, those of the next slots too, `step` apart; lets go of them together, too."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._made: dict[int, Handed] = {}
        self._taken: list[Handed] = []
        self._size = 0

    def take(self, batch: int, size: int) -> Handed:
        """Those of a batch, once."""
        found = self._made.pop(batch, None) if size == self._size else None
        if found is None:
            ahead = range(batch, batch + self._step * max(1, min(64, _AHEAD // (size or 1))), self._step)
            self._made, self._taken, self._size = {each: Handed.of(each, size) for each in ahead}, [], size
            found = self._made.pop(batch)
        self._taken.append(found)
        return found


def rows_of(receipts: Any) -> tuple[dict[int, int], int]:
    """The rows of each batch that is named, and how many receipts are none that any batch has, or stand twice.

    Receipts of -1, of rows that do not count, are passed over. Raises ValueError for anything but receipts.
    """
    listed = np.asarray(receipts.numpy(force=True) if hasattr(receipts, "numpy") else receipts)
    if listed.ndim == 1:  # one, or none
        listed = listed.reshape(-1, 2)
    if listed.size and (listed.ndim != 2 or listed.shape[1] != 2 or listed.dtype.kind not in "iu"):
        raise ValueError(f"receipts are integers (rows, 2), slot and row of each, not {listed.dtype} {listed.shape}")
    if len(listed) > 1 and (first := int(listed[0, 0])) >= 0 and np.array_equal(listed, _whole(first, len(listed))):
        return {first: (1 << len(listed)) - 1}, 0  # the short way
    found: dict[int, int] = {}
    odd = 0
    for batch, row in listed.tolist():
        before = found.get(batch, 0)
        if batch < 0:
            continue
        if 0 <= row < MOST_ROWS and not before >> row & 1:
            found[batch] = before | 1 << row
        else:
            odd += 1
    return found, odd


def _whole(batch: int, size: int) -> Integers:
    found = _numbered(size).copy()
    found[:, 0] = batch
    return found


@lru_cache
def _numbered(size: int) -> Integers:
    return np.stack([np.zeros(size, np.int64), np.arange(size)], axis=1)
