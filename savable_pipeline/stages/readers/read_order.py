"""Order in which a lane reads a dataset.

The sample at any position of any epoch is computed in O(log shards).

Shuffled: the shards are permuted and concatenated. The sequence is cut into windows of about equal numbers of shards,
at most `window` each (a dataset of fewer than twice `window` shards is one window). Each window is cut into blocks of
`block_size` samples, and its blocks are permuted. The result is cut into one span per lane. In an endless run, spans
differ by one sample at most, and the lanes exchange them from epoch to epoch. In a finite pass, spans consist of whole
batches:

    shards permuted   [ s7 ][ s2 ][ s0 ] │ [ s5 ][ s1 ] …          two windows
    blocks permuted   4 0 2 6 1 3 5      │ 2 0 3 1 …
    spans             lane 0 │ lane 1    │ lane 2 …

Not shuffled: blocks in file order are dealt round-robin to the lanes. Each epoch starts with the lane after the last
one of the epoch before. If a block is a batch, the batches of the run come in file order.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import Bijection, derive_key, permutation
from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.stages.readers.lane_shares import EpochSamples, LaneShares, Positions

log = logging.getLogger(__name__)

BLOCK_SIZE = 8  # samples that are dealt to a lane together
# A window may fill a quarter of the cache, because the cache has two windows at a time, and rows that are in buffers.
_WINDOWS_PER_CACHE = 4
# A warning is logged if a window has fewer groups than e**(0.9 × 4.43). With so many, the entropy of classes in batches
# of 256 is 0.9 of that of random batches, which is 4.43 for 100 classes.
_ENOUGH_GROUPS = 54
_CACHED_EPOCHS = 4  # number of epochs whose orders are cached; lanes of a process are seldom further apart
_CACHED_WINDOWS = 128  # permutations of blocks to cache, one per window, at most 128 kB each


class EpochOrder:
    """One epoch's shuffled order of the whole dataset, which all lanes share.

    `firsts`, int64 (shards + 1,), is the index of each shard's first sample, then the number of samples.
    """

    def __init__(
        self, firsts: NDArray[np.int64], *, seed: int, source: int, epoch: int, block_size: int, window: int | None
    ) -> None:
        shards = len(firsts) - 1
        self._key = derive_key(seed, "reader", source, epoch)
        self._block_size = block_size
        self._order = permutation(derive_key(self._key, "shards"), shards)
        counts = np.diff(firsts)[self._order]
        self._ends = np.cumsum(counts)  # the end of each permuted shard in the permuted sequence
        # for each permuted shard, the index of a sample minus its position in the permuted sequence
        self._index_offsets = firsts[self._order] - (self._ends - counts)
        windows = 1 if window is None or shards < 2 * window else -(-shards // window)  # rounded up
        last_shards = [(i + 1) * shards // windows - 1 for i in range(windows)]
        self._window_ends = self._ends[last_shards]
        self._blocks: dict[int, Bijection] = {}

    def locate(self, start: int, stop: int) -> Positions:
        """Return the indices of samples of the epoch: int64 (any,).

        They are at positions `start` to `stop - 1`.
        """
        parts = []
        while start < stop:
            window = int(np.searchsorted(self._window_ends, start, side="right"))
            end = min(stop, int(self._window_ends[window]))
            parts.append(self._in_window(window, start, end))
            start = end
        positions = np.concatenate(parts) if len(parts) != 1 else parts[0]
        found: Positions = positions + self._index_offsets[np.searchsorted(self._ends, positions, side="right")]
        return found

    def _in_window(self, window: int, start: int, stop: int) -> Positions:
        """Return where the samples of a window were before its blocks were permuted: int64 (stop - start,).

        `start` to `stop - 1` are positions after that. The last block of the window stays last if it is shorter.
        """
        begin = int(self._window_ends[window - 1]) if window else 0
        blocks = (int(self._window_ends[window]) - begin) // self._block_size
        first, last = (start - begin) // self._block_size, (stop - begin - 1) // self._block_size
        block_numbers = np.arange(first, last + 1)
        is_full = block_numbers < blocks  # the last block may be shorter
        block_numbers[is_full] = self._bijection(window, blocks)(block_numbers[is_full])
        positions = (block_numbers[:, None] * self._block_size + np.arange(self._block_size)).ravel()
        skipped = first * self._block_size
        return begin + positions[start - begin - skipped : stop - begin - skipped]

    def _bijection(self, window: int, blocks: int) -> Bijection:
        """Return the permutation of the blocks of a window, from the cache if possible."""
        if window not in self._blocks:
            if len(self._blocks) >= _CACHED_WINDOWS:
                self._blocks.clear()
            self._blocks[window] = Bijection(derive_key(self._key, "blocks", window), blocks)
        return self._blocks[window]


class DealtOrder:
    """Order of one epoch of a dataset whose rows are decoded in groups.

    All lanes share it.

    Rows are mixed within windows of groups, as many as fit the cache at a time, and the blocks of `order` are dealt to
    the lanes in turn, so that all lanes read from the same few groups:

        groups permuted   [ g7 ][ g2 ] │ [ g0 ][ g5 ] │ …     windows, each of which fits the cache
        blocks permuted   4 0 2 1 3    │ 2 0 3 1      │       within a window
        dealt             0 1 2 0 1    │ 2 0 1 2      │       to the lanes in turn

    With an `EpochOrder` each lane would read its own span, so that each lane had other groups open. Positions are
    numbered as in an `EpochOrder`: a lane has the positions of its span, but other samples are at these positions.

    `begins`, int64 (lanes + 1,), has the first positions of the lanes' spans, ascending, then the number of samples.
    """

    def __init__(self, order: EpochOrder, begins: Positions, block_size: int) -> None:
        self._order, self._begins, self._block_size = order, begins, block_size
        self._lanes = len(begins) - 1
        # number of samples of each lane that are dealt in whole blocks
        self._dealt = int(np.diff(begins).min()) // block_size * block_size

    def locate(self, start: int, stop: int) -> Positions:
        """Return the indices of samples of one lane: int64 (any,).

        They are at positions `start` to `stop - 1`.
        """
        turn = int(np.searchsorted(self._begins, start, side="right")) - 1
        begin = int(self._begins[turn])
        parts = [self._order.locate(*run) for run in self._runs(turn, start - begin, stop - begin)]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _runs(self, turn: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges (start, stop) of `order` with the samples at these positions in the span number `turn`.

        What remains of a span after its dealt blocks follows the dealt blocks of all lanes.
        """
        runs = []
        while start < min(stop, self._dealt):
            block, inside = divmod(start, self._block_size)
            size = min(self._block_size - inside, stop - start)
            first = (block * self._lanes + turn) * self._block_size + inside
            runs.append((first, first + size))
            start += size
        if start < stop:
            rest = self._lanes * self._dealt + int(self._begins[turn]) - turn * self._dealt - self._dealt
            runs.append((rest + start, rest + stop))
        return runs


class EpochOrders:
    """Cache of the orders of the last epochs of `dataset`, one cache per process.

    `window` is the number of shards in a window. If `deals`, rows are decoded in groups, and a window has as many
    groups as fit the cache.
    """

    def __init__(self, dataset: Dataset, window: int | None, *, deals: bool) -> None:
        self._dataset, self._window, self._deals = dataset, window, deals
        self._cached: OrderedDict[Any, EpochOrder | DealtOrder] = OrderedDict()
        self._groups: dict[int, RowGroups] = {}  # by the number of shards

    def __len__(self) -> int:
        return len(self._cached)

    def of(self, shares: LaneShares, epoch: int, source: int) -> EpochOrder | DealtOrder:
        """Return the order of an epoch. `source` is the `Ref.source` of its samples."""
        samples, seed = shares.samples.of(epoch), shares.lane.seed
        groups = self.groups_of(samples) if self._deals else None
        window = self._window if groups is None else groups.window
        key = (seed, shares.tag, epoch, samples.shards, shares.block_size, window, shares.cut, shares.lane.count)
        if key not in self._cached:
            firsts, block_size = samples.firsts if groups is None else groups.firsts, shares.block_size or 1
            order = EpochOrder(firsts, seed=seed, source=source, epoch=epoch, block_size=block_size, window=window)
            self._cached[key] = DealtOrder(order, shares.begins(epoch), block_size) if self._deals else order
            while len(self._cached) > _CACHED_EPOCHS:
                self._cached.popitem(last=False)
        return self._cached[key]

    def groups_of(self, samples: EpochSamples) -> RowGroups:
        """Return the groups of the rows of an epoch.

        Logs a warning if a window has too few groups, once for each number of shards.
        """
        if samples.shards not in self._groups:
            self._groups[samples.shards] = _row_groups(self._dataset, samples)
        return self._groups[samples.shards]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Groups of rows that are decoded together.

    `firsts`, int64 (groups + 1,), has the index of each group's first row among the samples of an epoch, then the
    number of samples. `window` is the number of groups in a window.
    """

    firsts: Rows
    window: int


def _row_groups(dataset: Dataset, samples: EpochSamples) -> RowGroups:
    """Return the groups of the samples of an epoch, and how many of them fit a window."""
    shards = range(samples.shards) if samples.selection is None else samples.selection.order.tolist()
    firsts = samples.firsts
    ends_of_groups, total, groups = [np.zeros(1, dtype=np.int64)], 0, 0
    for position, shard in enumerate(shards):
        rows, size = dataset.store.row_groups(shard) or ([], 0)
        selected = int(firsts[position + 1] - firsts[position])
        if selected:
            ends = np.cumsum(rows, dtype=np.int64)
            ends_of_groups.append(int(firsts[position]) + ends * selected // max(1, int(ends[-1])))
            total, groups = total + size, groups + len(rows)
    mean_bytes = max(1, total // max(1, groups))
    window = max(1, dataset.store.decoded_bytes // _WINDOWS_PER_CACHE // mean_bytes)
    if window < min(groups, _ENOUGH_GROUPS):
        log.warning(
            "%s: the row groups have %s, so only %d are mixed at a time. Write groups of at most %s, or set "
            "cache_bytes=%d.",
            dataset.address,
            human_bytes(mean_bytes),
            window,
            human_bytes(dataset.store.decoded_bytes // _WINDOWS_PER_CACHE // _ENOUGH_GROUPS),
            mean_bytes * _WINDOWS_PER_CACHE * _ENOUGH_GROUPS,
        )
    return RowGroups(np.concatenate(ends_of_groups), window)
