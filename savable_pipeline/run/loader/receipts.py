"""Receipts: int64 (rows, 2), the slot and the row of each row of a batch, or -1; what a trainer hands back for them.

A trainer mostly hands back, whole, what it was handed. Then its rows are known without torch, which would take more
time than all else in a loop that runs much other code in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.run.state.flights import MOST_ROWS

if TYPE_CHECKING:
    import torch

_AHEAD = 32  # batches whose receipts are made at once, unless they are large: one's alone would take ten times as long
_LARGEST = 1 << 14  # receipts that are made at once, but for a larger batch


class Handed(NamedTuple):
    """Receipts as the trainer has them: the bytes that were there, their memory, and where torch has it."""

    tensor: torch.Tensor
    raw: bytes
    memory: NDArray[np.int64]
    pointer: int

    @classmethod
    def of(cls, receipts: NDArray[np.int64]) -> Handed:
        """These, whose memory nobody else has."""
        import torch

        tensor = torch.from_numpy(receipts)  # half the time of `torch.frombuffer`
        return cls(tensor, receipts.tobytes(), receipts, tensor.data_ptr())

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written there, or moved it to memory that other processes share."""
        return self.memory.tobytes() == self.raw and self.tensor.data_ptr() == self.pointer


def receipts_of(batch: int, size: int, rows: int = 0, kept: Sequence[int] | None = None) -> torch.Tensor:
    """Those of a batch of this size; -1 for rows that are not among the bits `rows`.

    `kept`: the numbers of the rows that are in it, before those that only fill it up; by default all from 0 on.
    """
    import torch

    numbers = range(size) if kept is None else kept
    found = [(batch, row) if rows >> row & 1 else (-1, -1) for row in numbers]
    found += [(-1, -1)] * (size - len(found))
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


class NextReceipts:
    """Makes the receipts of whole batches, those of the next slots too, `step` apart."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._made: dict[int, Handed] = {}
        self._size = 0

    def has(self, batch: int, size: int) -> bool:
        """Whether those of a batch are made."""
        return batch in self._made and size == self._size

    def make(self, batch: int, size: int) -> None:
        """Make those of a batch and of some of the next."""
        batches = range(batch, batch + self._step * max(1, min(_AHEAD, _LARGEST // size)), self._step)
        made = np.empty((len(batches), size, 2), np.int64)
        made[:, :, 0] = np.array(batches)[:, None]
        made[:, :, 1] = np.arange(size)
        self._made = {each: Handed.of(made[at].copy()) for at, each in enumerate(batches)}
        self._size = size

    def take(self, batch: int) -> Handed:
        """Those of a batch that are made, once."""
        return self._made.pop(batch)


def rows_of(receipts: Any) -> tuple[dict[int, int], int]:
    """The rows of each batch that is named, and how many receipts are none that any batch has, or stand twice.

    Receipts of -1, of rows that do not count, are passed over. Raises ValueError for anything but receipts.
    """
    listed = np.asarray(receipts.numpy(force=True) if hasattr(receipts, "numpy") else receipts)
    if listed.ndim == 1:  # one, or none
        listed = listed.reshape(-1, 2)
    if listed.size and (listed.ndim != 2 or listed.shape[1] != 2 or listed.dtype.kind not in "iu"):
        raise ValueError(f"receipts must be integers (rows, 2), not {listed.dtype} {listed.shape}")
    found: dict[int, int] = {}
    odd = 0
    for batch, row in listed.tolist():
        if batch < 0:
            continue
        before = found.get(batch, 0)
        if 0 <= row < MOST_ROWS and not before >> row & 1:
            found[batch] = before | 1 << row
        else:
            odd += 1
    return found, odd
