"""`GrowingSamples`: the samples that each epoch of a reader has, where shards were added to the dataset in the run.

    pairs    (0, 3) (2, 5)                     (epoch, shards): from epoch 2 on, two shards more
    epoch    0        1        2          3
    shards   0 1 2    0 1 2    0 1 2 3 4  0 1 2 3 4

New shards come after all old ones, so that a sample keeps its number, and an epoch is read as if there were no later
shard. Without pairs every epoch has all shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.selection import Selection
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import CheckpointMismatchError


@dataclass(frozen=True, slots=True)
class EpochSamples:
    """The samples of one epoch: `firsts`, int64 (shards + 1,), is where each shard begins, then their number."""

    shards: int
    firsts: Rows
    count: int
    selection: Selection | None

    def numbers(self, positions: Rows) -> Rows:
        """The numbers in the dataset of the samples at these places of the epoch."""
        return positions if self.selection is None else self.selection.locate(positions)


class GrowingSamples:
    """The samples of `dataset`, or those of `selection`, by epoch.

    Raises `CheckpointMismatchError` for pairs that do not fit the dataset.
    """

    def __init__(self, dataset: Dataset, selection: Selection | None, pairs: Sequence[tuple[int, int]]) -> None:
        self.pairs = [(int(epoch), int(shards)) for epoch, shards in pairs]
        all_shards = len(dataset.firsts) - 1
        self._begins = [epoch for epoch, _ in self.pairs] or [0]
        known = [shards for _, shards in self.pairs] or [all_shards]
        rising = all(low < high for row in (self._begins, known) for low, high in pairwise(row))
        if self._begins[0] != 0 or not rising or not 1 <= known[0] <= known[-1] <= all_shards:
            raise CheckpointMismatchError(
                f"{dataset.address}: by the state, shards joined as (epoch, shards) {self.pairs}, but here are "
                f"{all_shards}; does the state belong to this dataset?"
            )
        self._dataset, self._selection = dataset, selection
        self._stretches = [self.first(shards) for shards in known]
        if not self._stretches[0].count:
            raise CheckpointMismatchError(f"{dataset.address}: its first {known[0]} shards hold no sample")

    def of(self, epoch: int) -> EpochSamples:
        """The samples of an epoch."""
        if len(self._begins) == 1:
            return self._stretches[0]
        return self._stretches[int(np.searchsorted(self._begins, epoch, side="right")) - 1]

    def first(self, shards: int) -> EpochSamples:
        """The samples of the first `shards` shards."""
        firsts, selection = self._dataset.firsts, self._selection
        if selection is None:
            return EpochSamples(shards, firsts[: shards + 1], int(firsts[shards]), None)
        part = selection if shards == len(firsts) - 1 else selection.of_first(shards)
        return EpochSamples(shards, part.firsts, part.count, part)

    def blocks(self, begin: int, end: int, size: int) -> int:
        """The number of blocks of `size` samples in the epochs `begin` to `end - 1`; an epoch's last may be shorter."""
        total = 0
        for stretch, low, high in zip(self._stretches, self._begins, [*self._begins[1:], end], strict=True):
            epochs = min(high, end) - max(low, begin)
            total += max(0, epochs) * -(-stretch.count // size)
        return total
