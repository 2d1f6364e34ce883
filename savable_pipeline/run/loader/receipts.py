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


class IssuedReceipts(NamedTuple):
    """Receipts as the trainer has them.

    The bytes that were there, their memory, and where torch has it.
    """

    tensor: torch.Tensor
    raw: bytes
    memory: NDArray[np.int64]
    pointer: int

    @classmethod
    def of(cls, receipts: NDArray[np.int64]) -> list[IssuedReceipts]:
        """Those of several batches.

        Int64 (batches, rows, 2), in memory that nobody else has.
        """
        import torch

        tensors = torch.from_numpy(receipts).unbind(0)  # a tensor for each batch takes ten times as long
        rows = list(receipts)
        return [cls(tensor, row.tobytes(), row, tensor.data_ptr()) for tensor, row in zip(tensors, rows, strict=True)]

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


def next_receipts(batch: int, size: int, step: int) -> dict[int, IssuedReceipts]:
    """Those of a whole batch, and of some of the next slots' batches, `step` apart."""
    batches = range(batch, batch + step * max(1, min(_AHEAD, _LARGEST // size)), step)
    receipts = np.empty((len(batches), size, 2), np.int64)
    receipts[:, :, 0] = np.array(batches)[:, None]
    receipts[:, :, 1] = np.arange(size)
    return dict(zip(batches, IssuedReceipts.of(receipts), strict=True))


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
