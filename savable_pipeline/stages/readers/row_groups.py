"""How rows that are decoded in groups are mixed: how many groups fit the cache at a time, and if that is enough."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.stages.readers.growth import EpochSamples

log = logging.getLogger(__name__)

BLOCK = 8  # samples that are dealt to a lane together
_SHARE = 4  # a window takes this part of the cache: there are two at a time, and the rows that buffers hold
_ENOUGH = 54  # groups: e**(0.9 × 4.43), of which batches are 0.9 as mixed as random batches of 256 out of 100 classes


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The first row of each group among the samples that are read, int64 (groups + 1,), and the groups of a window."""

    firsts: Rows
    window: int


def row_groups(dataset: Dataset, samples: EpochSamples) -> RowGroups:
    """The groups of an epoch's samples, of a store that decodes some. Logs a warning where a window holds too few."""
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
