"""`EpochOrders`: the orders of epochs, each made once for all lanes of a process.

Rows that are decoded in groups are mixed within windows of groups: as many as fit the cache at a time.
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
from savable_pipeline.stages.readers.dealt_order import DealtOrder
from savable_pipeline.stages.readers.growth import EpochSamples
from savable_pipeline.stages.readers.lane_shares import LaneShares
from savable_pipeline.stages.readers.read_order import EpochOrder

log = logging.getLogger(__name__)

BLOCK = 8  # samples that are dealt to a lane together
_SHARE = 4  # a window takes this part of the cache: there are two at a time, and the rows that buffers hold
_ENOUGH = 54  # groups: e**(0.9 × 4.43); their batches are 0.9 as mixed as random ones of 256 out of 100 classes
_EPOCHS_KEPT = 4  # orders kept for the lanes of a process, which are seldom more epochs apart


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
    for place, shard in enumerate(shards):
        rows, size = dataset.store.row_groups(shard) or ([], 0)
        selected = int(firsts[place + 1] - firsts[place])
        if selected:
            ends = np.cumsum(rows, dtype=np.int64)
            found.append(int(firsts[place]) + ends * selected // max(1, int(ends[-1])))
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
