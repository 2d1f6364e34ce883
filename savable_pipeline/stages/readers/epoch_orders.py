"""`EpochOrders`: the orders of epochs, each made once for all lanes of a process.

Rows that are decoded in groups are mixed within windows of groups: as many as fit the cache at a time. All lanes read
from the same few groups then:

    groups permuted   [ g7 ][ g2 ] │ [ g0 ][ g5 ] │ …     windows, each of which fits the cache
    blocks permuted   4 0 2 1 3    │ 2 0 3 1      │       within a window
    dealt             0 1 2 0 1    │ 2 0 1 2      │       to the lanes in turn

In the order of `read_order` each lane has a span of its own, so that as many groups are open as there are lanes. Here
the blocks of a window are dealt to all lanes. A lane's positions are those of its span all the same: only what lies at
them differs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.stages.readers.growth import EpochSamples
from savable_pipeline.stages.readers.lane_shares import LaneShares
from savable_pipeline.stages.readers.read_order import EpochOrder, Positions

log = logging.getLogger(__name__)

BLOCK = 8  # samples that are dealt to a lane together
_SHARE = 4  # a window takes this part of the cache: there are two at a time, and the rows that buffers hold
_ENOUGH = 54  # groups: e**(0.9 × 4.43); their batches are 0.9 as mixed as random ones of 256 out of 100 classes
_EPOCHS_KEPT = 4  # orders kept for the lanes of a process, which are seldom more epochs apart


class DealtOrder:
    """One epoch's order of the whole dataset, which all lanes share: `order`, its blocks dealt to the lanes in turn.

    `begins`, int64 (lanes + 1,), are the first positions of the lanes' spans, ascending, then the number of samples.
    """

    def __init__(self, order: EpochOrder, begins: Positions, block_size: int) -> None:
        self._order, self._begins, self._block = order, begins, block_size
        self._lanes = len(begins) - 1
        self._dealt = int(np.diff(begins).min()) // block_size * block_size  # samples of each lane that are dealt

    def locate(self, start: int, stop: int) -> Positions:
        """The samples at positions `start` to `stop - 1`, all of one lane's span: indices of the dataset, int64."""
        turn = int(np.searchsorted(self._begins, start, side="right")) - 1
        begin = int(self._begins[turn])
        parts = [self._order.locate(*run) for run in self._runs(turn, start - begin, stop - begin)]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _runs(self, turn: int, start: int, stop: int) -> list[tuple[int, int]]:
        """The places of the lane's positions in the order, as runs. The rest of a span is not dealt."""
        runs = []
        while start < min(stop, self._dealt):
            block, inside = divmod(start, self._block)
            size = min(self._block - inside, stop - start)
            first = (block * self._lanes + turn) * self._block + inside
            runs.append((first, first + size))
            start += size
        if start < stop:
            rest = self._lanes * self._dealt + int(self._begins[turn]) - turn * self._dealt - self._dealt
            runs.append((rest + start, rest + stop))
        return runs


class EpochOrders:
    """The last orders of the epochs of `dataset`, whose shards are shuffled in windows of `window`.

    `deals`: its rows are decoded in groups, and a window holds as many groups as fit the cache.
    """

    def __init__(self, dataset: Dataset, window: int | None, *, deals: bool) -> None:
        self._dataset, self._window, self._deals = dataset, window, deals
        self._kept: OrderedDict[Any, EpochOrder | DealtOrder] = OrderedDict()
        self._groups: dict[int, RowGroups] = {}  # by the number of shards

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, shares: LaneShares, epoch: int, source: int) -> EpochOrder | DealtOrder:
        """The order of an epoch of the samples of `source`."""
        samples, seed = shares.samples.of(epoch), shares.lane.seed
        groups = self.groups_of(samples) if self._deals else None
        window = self._window if groups is None else groups.window
        wanted = (seed, shares.tag, epoch, samples.shards, shares.block_size, window, shares.cut)
        if wanted not in self._kept:
            firsts, block_size = samples.firsts if groups is None else groups.firsts, shares.block_size or 1
            order = EpochOrder(firsts, seed=seed, source=source, epoch=epoch, block_size=block_size, window=window)
            self._kept[wanted] = DealtOrder(order, shares.begins(epoch), block_size) if self._deals else order
            while len(self._kept) > _EPOCHS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[wanted]

    def groups_of(self, samples: EpochSamples) -> RowGroups:
        """The groups of an epoch's rows. Logs a warning, once, where a window holds too few."""
        if samples.shards not in self._groups:
            self._groups[samples.shards] = _row_groups(self._dataset, samples)
        return self._groups[samples.shards]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The first row of each group among the samples that are read, int64 (groups + 1,), and the groups of a window."""

    firsts: Rows
    window: int


def _row_groups(dataset: Dataset, samples: EpochSamples) -> RowGroups:
    """The groups of the samples of an epoch."""
    shards = range(samples.shards) if samples.selection is None else samples.selection.order.tolist()
    firsts = samples.firsts
    found, total, groups = [np.zeros(1, dtype=np.int64)], 0, 0
    for position, shard in enumerate(shards):
        rows, size = dataset.store.row_groups(shard) or ([], 0)
        selected = int(firsts[position + 1] - firsts[position])
        if selected:
            ends = np.cumsum(rows, dtype=np.int64)
            found.append(int(firsts[position]) + ends * selected // max(1, int(ends[-1])))
            total, groups = total + size, groups + len(rows)
    mean = max(1, total // max(1, groups))
    window = max(1, dataset.store.decoded_bytes // _SHARE // mean)
    if window < min(groups, _ENOUGH):
        log.warning(
            "%s: row groups of %s: samples of %d of them at a time are mixed. Write row groups of at most %s, or give "
            "cache_bytes=%d, for batches that are mixed nearly as at random",
            dataset.address,
            human_bytes(mean),
            window,
            human_bytes(dataset.store.decoded_bytes // _SHARE // _ENOUGH),
            mean * _SHARE * _ENOUGH,
        )
    return RowGroups(np.concatenate(found), window)
