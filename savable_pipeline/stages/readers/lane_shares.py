"""`LaneShares`: the samples of a pass, and how lanes divide them.

A pass is one epoch or several, and may end in the middle of an epoch.

    epochs=2.5 of 100 samples   100 │ 100 │ 50              three epochs; the last has the first 50 of its own order
    an epoch's order            lane 0 │ lane 1 │ lane 2    spans, which are multiples of `cut` as far as possible
    in file order               0 1 2 0 1 2 0 …             `cut` samples are dealt to each lane in turn

`cut` is a number of samples, which is saved. It is that of a batch if the lanes of a finite pass have whole batches,
that of a block in file order, and otherwise 0.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.selection import Selection
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import CheckpointMismatchError, SavableError

log = logging.getLogger(__name__)

Positions = NDArray[np.int64]
# A lane may read this many samples, or this many times its share of an epoch, without building a batch.
_UNUSED, _SHARES_UNUSED = 100_000, 10


@dataclass(frozen=True, slots=True)
class EpochSamples:
    """Samples of one epoch.

    `firsts`, int64 (shards + 1,), has the first index of each shard, then the number of samples.
    """

    shards: int
    firsts: Rows
    count: int
    selection: Selection | None

    def numbers(self, positions: Rows) -> Rows:
        """Return the dataset's indices of the samples at these positions of the epoch."""
        return positions if self.selection is None else self.selection.locate(positions)


class GrowingSamples:
    """Samples of each epoch of a dataset to which shards were added.

    An epoch has all samples of the shards that the dataset had then, or of the `selection` of these.

        pairs    (0, 3) (2, 5)                     (epoch, shards): from epoch 2 on, five shards
        epoch    0        1        2          3
        shards   0 1 2    0 1 2    0 1 2 3 4  0 1 2 3 4

    New shards come after all old ones, so that samples keep their indices. An epoch is read as if later shards did not
    exist. Without pairs every epoch has all shards.

    Raises `CheckpointMismatchError` for pairs that do not fit the dataset.
    """

    def __init__(self, dataset: Dataset, selection: Selection | None, pairs: Sequence[tuple[int, int]]) -> None:
        self.pairs = [(int(epoch), int(shards)) for epoch, shards in pairs]
        all_shards = len(dataset.firsts) - 1
        self._begins = [epoch for epoch, _ in self.pairs] or [0]
        counts = [shards for _, shards in self.pairs] or [all_shards]
        is_rising = all(low < high for numbers in (self._begins, counts) for low, high in pairwise(numbers))
        if self._begins[0] != 0 or not is_rising or not 1 <= counts[0] <= counts[-1] <= all_shards:
            raise CheckpointMismatchError(
                f"{dataset.address}: the state is of another dataset. Pass the saved one.\n  shards joined as (epoch, "
                f"shards) {self.pairs}, here are {all_shards}"
            )
        self._dataset, self._selection = dataset, selection
        self._stretches = [self.first(shards) for shards in counts]  # epochs with the same samples
        if not self._stretches[0].count:
            raise CheckpointMismatchError(
                f"{dataset.address}: the first {counts[0]} shards have no sample. Restore them."
            )

    def of(self, epoch: int) -> EpochSamples:
        """Return the samples of an epoch."""
        if len(self._begins) == 1:
            return self._stretches[0]
        return self._stretches[int(np.searchsorted(self._begins, epoch, side="right")) - 1]

    def first(self, shards: int) -> EpochSamples:
        """Return the samples of the first `shards` shards."""
        firsts, selection = self._dataset.firsts, self._selection
        if selection is None:
            return EpochSamples(shards, firsts[: shards + 1], int(firsts[shards]), None)
        selected = selection if shards == len(firsts) - 1 else selection.of_first(shards)
        return EpochSamples(shards, selected.first_positions, selected.count, selected)

    def blocks(self, begin: int, end: int, size: int) -> int:
        """Count the blocks of `size` samples in the epochs `begin` to `end - 1`.

        The last block of an epoch may be smaller.
        """
        total = 0
        for stretch, first, following in zip(self._stretches, self._begins, [*self._begins[1:], end], strict=True):
            epochs = min(following, end) - max(first, begin)
            total += max(0, epochs) * -(-stretch.count // size)
        return total


@dataclass(frozen=True)
class LaneShares:
    """Shares of all lanes in the pass that starts with `first_epoch`.

    A batch has `rows` samples. `aligned` is whether each sample becomes one row. Samples are dealt from the lane `tag`
    on (modulo the number of lanes), so that the remainders of different sources of a `Blend` go to different lanes.
    Errors name the `reader`.
    """

    reader: str
    lane: Lane
    samples: GrowingSamples
    epochs: int | float | None
    shuffle: bool
    block_size: int | None
    tag: int = 0
    rows: int = 1
    aligned: bool = False
    first_epoch: int = 0
    cut: int = 0  # unit of shares in samples; with 0, shares differ by at most one sample

    @cached_property
    def epochs_started(self) -> int:
        """Return the number of epochs in a pass, or 0 if the pass never ends.

        A fraction of an epoch counts as one.
        """
        return 0 if self.epochs is None else ceil(Fraction(str(self.epochs)))

    def at_pass(self, number: int) -> LaneShares:
        """Return the shares of the pass with this number, with the best `cut` for it."""
        shares = replace(self, first_epoch=number * self.epochs_started)
        if not self.shuffle:
            return replace(shares, cut=self.block_size or (self.rows if self.aligned else 8))
        in_batches = self.epochs is not None and (self.lane.pad or shares.has_batches)
        return replace(shares, cut=self.rows if in_batches else 0)

    def of_pass(self, number: int) -> LaneShares:
        """Return the shares of the pass with this number.

        They are these shares if it is their pass, and otherwise those with the best `cut`.
        """
        return self if number * self.epochs_started == self.first_epoch else self.at_pass(number)

    def cut_by(self, cut: int) -> LaneShares:
        """Return the same shares with the `cut` of a state.

        Raises `CheckpointMismatchError` if it is 0 in file order.
        """
        if not self.shuffle and not cut:
            raise CheckpointMismatchError(f"{self.reader}: the state is damaged. Use another copy of the checkpoint.")
        return replace(self, cut=cut)

    @property
    def has_batches(self) -> bool:
        """Return whether the pass has a batch for each lane."""
        return self.count(self.first_epoch) >= self.rows * self.lane.count

    @property
    def is_cut_by_tail(self) -> bool:
        """Return whether a run with another `tail` would cut the pass in another unit."""
        return self.shuffle and self.epochs is not None and not self.has_batches

    def count(self, epoch: int) -> int:
        """Return the number of samples of an epoch.

        Raises ValueError for an epoch without samples.
        """
        count = self.samples.of(epoch).count
        if self.epochs is None or epoch - self.first_epoch != self.epochs_started - 1:
            return count
        last_count = int((Fraction(str(self.epochs)) - (self.epochs_started - 1)) * count)
        if self.epochs_started == 1 and not last_count:
            raise ValueError(
                f"{self.reader}: epochs={self.epochs} of {count} samples is less than one sample. Raise epochs."
            )
        return last_count

    def span(self, lane: int, epoch: int) -> tuple[int, int]:
        """Return the positions (start, stop) of a lane's span of an epoch.

        In file order, the positions of each lane start at 0.
        """
        count, lanes = self.count(epoch), self.lane.count
        if not self.cut:
            return lane_span(count, lane, lanes, epoch)
        if self.shuffle:
            return batches_span(count, self.cut, self._turn_of(lane, epoch), lanes)
        return 0, sequential_count(count, self._turn_of(lane, epoch), lanes, self.cut)

    def _turn_of(self, lane: int, epoch: int) -> int:
        """Return how many lanes are dealt samples of an epoch before this one.

        It is 0 for the lane after the one that read the last block of the previous epoch.
        """
        return (lane - self.samples.blocks(self.first_epoch, epoch, self.cut) - self.tag) % self.lane.count

    def begins(self, epoch: int) -> Positions:
        """Return the first positions of all lanes' spans of an epoch.

        They ascend, and the number of samples follows.
        """
        spans = sorted(self.span(lane, epoch) for lane in range(self.lane.count))
        return np.array([*(begin for begin, _ in spans), spans[-1][1]], dtype=np.int64)

    def in_file_order(self, epoch: int, start: int, stop: int) -> Positions:
        """Return positions in file order of the lane's samples `start` to `stop - 1`.

        They are int64 (any,).
        """
        return sequential_positions(start, stop, self._turn_of(self.lane.index, epoch), self.lane.count, self.cut)

    def warn_of_few(self, address: str, chosen: Hashable) -> None:
        """Log a warning if a finite pass has fewer batches than lanes.

        It is logged once for the samples that `chosen` identifies.
        """
        count, lanes = self.count(self.first_epoch), self.lane.count
        batches = count // self.rows
        if self.epochs is None or self.lane.pad or not 0 < batches < lanes:
            return
        warning = (
            f"{address}: {count} samples are {batches} batches of {self.rows}, too few for {lanes} lanes. Batches will "
            f"be smaller, or there will be none. Start with lanes={batches} or fewer."
        )
        self.lane.shared(("few batches", chosen), lambda: log.warning(warning))

    def check_used(self, length: int) -> None:
        """Raise `SavableError` if the lane read far too many samples since its last batch.

        Otherwise a lane whose filter drops every sample would read forever. `length` is the number of samples in the
        lane's span of an epoch.
        """
        unused = self.lane.unused or 0
        if unused > max(_SHARES_UNUSED * length, _UNUSED):
            raise SavableError(
                f"{self.reader}: {self.lane} read {unused:,} samples without a batch (its share is {length:,}). "
                "Keep more in the stage that drops them, or use fewer lanes."
            )


def check_epochs(reader: str, epochs: int | float | None) -> int | float | None:
    """Return the number of epochs, as an int if it is whole.

    Raises ValueError unless it is above 0, or None.
    """
    if epochs is None:
        return None
    if not 0 < epochs < float("inf"):
        raise ValueError(f"{reader}: epochs must be above 0 or None, not {epochs}")
    return int(epochs) if epochs == int(epochs) else float(epochs)


def lane_span(count: int, lane: int, lanes: int, epoch: int) -> tuple[int, int]:
    """Return (start, stop) of a lane's span in a shuffled epoch of an endless run.

    `count` is the number of samples in the epoch.
    """
    turn = (lane + epoch) % lanes
    return turn * count // lanes, (turn + 1) * count // lanes


def batches_span(count: int, rows: int, turn: int, lanes: int) -> tuple[int, int]:
    """Return (start, stop) of the span of the lane at `turn` in a finite pass.

    The batches of the shuffled epoch, of `rows` samples each, are dealt to the lanes one by one. Each of the first
    `count / rows` slots thus has one; the very last batch may be shorter. 10 samples in batches of 2 over 3 lanes: 0-3,
    4-7, 8-9.
    """
    batches = -(-count // rows)
    per_lane, rest = divmod(batches, lanes)  # the first `rest` lanes have one batch more
    missing, last_turn = batches * rows - count, (batches - 1) % lanes
    begin = (turn * per_lane + min(turn, rest)) * rows
    end = begin + (per_lane + (turn < rest)) * rows
    return begin - missing * (turn > last_turn), end - missing * (turn >= last_turn)


def sequential_count(count: int, turn: int, lanes: int, block_size: int) -> int:
    """Count the samples that the lane at `turn` gets in an epoch in file order."""
    blocks = -(-count // block_size)  # rounded up
    own_blocks = len(range(turn, blocks, lanes))
    has_last = own_blocks and (blocks - 1) % lanes == turn
    return own_blocks * block_size - (blocks * block_size - count if has_last else 0)


def sequential_positions(start: int, stop: int, turn: int, lanes: int, block_size: int) -> Positions:
    """Return positions of samples of the lane at `turn` in file order: int64 (any,).

    They are its samples `start` to `stop - 1`.
    """
    positions = np.arange(start, stop)
    block = positions // block_size * lanes + turn
    return block * block_size + positions % block_size
