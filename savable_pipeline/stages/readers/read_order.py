"""Order in which a lane reads a dataset.

Any position of any epoch is computed in O(log shards).

Shuffled: the shards are permuted and joined end to end. The sequence is cut into windows of about equal numbers of
shards, at most `window` each (a dataset of fewer than twice `window` shards is one window). Each window is cut into
blocks of `block_size` samples, and its blocks are permuted. The result is cut into one span per lane. In an endless
run, spans differ by one sample at most, and the lanes exchange them from epoch to epoch; in a finite pass they are
whole batches:

    shards permuted   [ s7 ][ s2 ][ s0 ] │ [ s5 ][ s1 ] …          two windows
    blocks permuted   4 0 2 6 1 3 5      │ 2 0 3 1 …
    spans             lane 0 │ lane 1    │ lane 2 …

Not shuffled: blocks in file order are dealt round-robin to the lanes, each epoch from where the last one ended. Where a
block is a batch, the slots of the run come in file order.
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
_SHARE = 4  # a window takes this part of the cache: there are two at a time, and the rows that buffers hold
_ENOUGH = 54  # groups: e**(0.9 × 4.43); their batches are 0.9 as mixed as random ones of 256 out of 100 classes
_CACHED_EPOCHS = 4  # orders kept for the lanes of a process, which are seldom more epochs apart
_CACHED_WINDOWS = 128  # cached permutations of blocks, one per window, 128 kB each at most


class EpochOrder:
    """One epoch's shuffled order of the whole dataset, which all lanes share.

    `firsts`, int64 (shards + 1,), is the index of each shard's first sample, then the number of samples.
    """

    def __init__(
        self, firsts: NDArray[np.int64], *, seed: int, source: int, epoch: int, block_size: int, window: int | None
    ) -> None:
        shards = len(firsts) - 1
        self._key = derive_key(seed, "reader", source, epoch)
        self._block = block_size
        self._order = permutation(derive_key(self._key, "shards"), shards)
        counts = np.diff(firsts)[self._order]
        self._ends = np.cumsum(counts)  # of each permuted shard, in the permuted sequence
        self._shift = firsts[self._order] - (self._ends - counts)  # from the permuted sequence to the dataset
        windows = 1 if window is None or shards < 2 * window else -(-shards // window)
        last = [(i + 1) * shards // windows - 1 for i in range(windows)]
        self._window_ends = self._ends[last]
        self._blocks: dict[int, Bijection] = {}

    def locate(self, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop - 1` of the epoch.

        They are indices of the dataset, int64 (any,).
        """
        parts = []
        while start < stop:
            window = int(np.searchsorted(self._window_ends, start, side="right"))
            end = min(stop, int(self._window_ends[window]))
            parts.append(self._in_window(window, start, end))
            start = end
        positions = np.concatenate(parts) if len(parts) != 1 else parts[0]
        found: Positions = positions + self._shift[np.searchsorted(self._ends, positions, side="right")]
        return found

    def _in_window(self, window: int, start: int, stop: int) -> Positions:
        """Positions in the permuted sequence of shards; a last, shorter block of the window stays last."""
        begin = int(self._window_ends[window - 1]) if window else 0
        blocks = (int(self._window_ends[window]) - begin) // self._block
        first, last = (start - begin) // self._block, (stop - begin - 1) // self._block
        numbers = np.arange(first, last + 1)
        whole = numbers < blocks
        numbers[whole] = self._bijection(window, blocks)(numbers[whole])
        positions = (numbers[:, None] * self._block + np.arange(self._block)).ravel()
        skipped = first * self._block
        return begin + positions[start - begin - skipped : stop - begin - skipped]

    def _bijection(self, window: int, blocks: int) -> Bijection:
        if window not in self._blocks:
            if len(self._blocks) >= _CACHED_WINDOWS:
                self._blocks.clear()
            self._blocks[window] = Bijection(derive_key(self._key, "blocks", window), blocks)
        return self._blocks[window]


class DealtOrder:
    """Order of one epoch of the whole dataset, which all lanes share.

    The blocks of `order` are dealt to the lanes in turn.

    Rows that are decoded in groups are mixed within windows of groups: as many as fit the cache at a time. All lanes
    read from the same few groups then:

        groups permuted   [ g7 ][ g2 ] │ [ g0 ][ g5 ] │ …     windows, each of which fits the cache
        blocks permuted   4 0 2 1 3    │ 2 0 3 1      │       within a window
        dealt             0 1 2 0 1    │ 2 0 1 2      │       to the lanes in turn

    In an `EpochOrder` each lane has a span of its own, so that as many groups are open as there are lanes. Here the
    blocks of a window are dealt to all lanes. A lane's positions are those of its span all the same: only what is at
    them differs.

    `begins`, int64 (lanes + 1,), are the first positions of the lanes' spans, ascending, then the number of samples.
    """

    def __init__(self, order: EpochOrder, begins: Positions, block_size: int) -> None:
        self._order, self._begins, self._block = order, begins, block_size
        self._lanes = len(begins) - 1
        self._dealt = int(np.diff(begins).min()) // block_size * block_size  # samples of each lane that are dealt

    def locate(self, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop - 1` of one lane.

        They are indices of the dataset, int64.
        """
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
    """Last orders of the epochs of `dataset`, built once a process.

    Shards are shuffled in windows of `window`.

    `deals`: its rows are decoded in groups, and a window holds as many groups as fit the cache.
    """

    def __init__(self, dataset: Dataset, window: int | None, *, deals: bool) -> None:
        self._dataset, self._window, self._deals = dataset, window, deals
        self._cached: OrderedDict[Any, EpochOrder | DealtOrder] = OrderedDict()
        self._groups: dict[int, RowGroups] = {}  # by the number of shards

    def __len__(self) -> int:
        return len(self._cached)

    def of(self, shares: LaneShares, epoch: int, source: int) -> EpochOrder | DealtOrder:
        """The order of an epoch of the samples of `source`."""
        samples, seed = shares.samples.of(epoch), shares.lane.seed
        groups = self.groups_of(samples) if self._deals else None
        window = self._window if groups is None else groups.window
        wanted = (seed, shares.tag, epoch, samples.shards, shares.block_size, window, shares.cut, shares.lane.count)
        if wanted not in self._cached:
            firsts, block_size = samples.firsts if groups is None else groups.firsts, shares.block_size or 1
            order = EpochOrder(firsts, seed=seed, source=source, epoch=epoch, block_size=block_size, window=window)
            self._cached[wanted] = DealtOrder(order, shares.begins(epoch), block_size) if self._deals else order
            while len(self._cached) > _CACHED_EPOCHS:
                self._cached.popitem(last=False)
        return self._cached[wanted]

    def groups_of(self, samples: EpochSamples) -> RowGroups:
        """Return the groups of an epoch's rows.

        Logs a warning, once, if a window has too few.
        """
        if samples.shards not in self._groups:
            self._groups[samples.shards] = _row_groups(self._dataset, samples)
        return self._groups[samples.shards]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """First row of each group among the read samples, int64 (groups + 1,).

    It also has the groups of a window.
    """

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
            "%s: the row groups have %s, so only %d are mixed at a time. Write groups of at most %s, or set "
            "cache_bytes=%d.",
            dataset.address,
            human_bytes(mean),
            window,
            human_bytes(dataset.store.decoded_bytes // _SHARE // _ENOUGH),
            mean * _SHARE * _ENOUGH,
        )
    return RowGroups(np.concatenate(found), window)
