"""The order in which a lane reads a dataset; any position of any epoch is computed in O(log shards).

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

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import Bijection, derive_key, permutation

Positions = NDArray[np.int64]
_WINDOWS_KEPT = 128  # cached permutations of blocks, one per window, 128 kB each at most


class EpochOrder:
    """One epoch's shuffled order of the whole dataset, which all lanes share.

    `firsts`, int64 (shards + 1,), is the index of each shard's first sample, then the number of samples.
    """

    def __init__(
        self,
        firsts: NDArray[np.int64],
        *,
        seed: int,
        source: int,
        epoch: int,
        block_size: int,
        window: int | None,
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
        """The samples at positions `start` to `stop - 1` of the epoch: indices of the dataset, int64 (any,)."""
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
            if len(self._blocks) >= _WINDOWS_KEPT:
                self._blocks.clear()
            self._blocks[window] = Bijection(derive_key(self._key, "blocks", window), blocks)
        return self._blocks[window]


def lane_span(count: int, lane: int, lanes: int, epoch: int) -> tuple[int, int]:
    """The first and the last position (exclusive) of a lane's span in a shuffled epoch of `count` samples."""
    turn = (lane + epoch) % lanes
    return turn * count // lanes, (turn + 1) * count // lanes


def batches_span(count: int, rows: int, turn: int, lanes: int) -> tuple[int, int]:
    """First and last position (exclusive) of the lane at `turn` in a shuffled epoch of a finite pass.

    The epoch's batches of `rows` samples are dealt to the lanes one by one, so that each of the first `count / rows`
    slots has one; the very last batch may be shorter. 10 samples in batches of 2 over 3 lanes: 0-3, 4-7, 8-9.
    """
    batches = -(-count // rows)
    each, more = divmod(batches, lanes)
    missing, last = batches * rows - count, (batches - 1) % lanes
    begin = (turn * each + min(turn, more)) * rows
    end = begin + (each + (turn < more)) * rows
    return begin - missing * (turn > last), end - missing * (turn >= last)


def sequential_count(count: int, turn: int, lanes: int, block_size: int) -> int:
    """The number of samples that the lane at `turn` gets in an epoch in file order."""
    blocks = -(-count // block_size)
    mine = len(range(turn, blocks, lanes))
    has_last = mine and (blocks - 1) % lanes == turn
    return mine * block_size - (blocks * block_size - count if has_last else 0)


def sequential_positions(start: int, stop: int, turn: int, lanes: int, block_size: int) -> Positions:
    """The samples at positions `start` to `stop - 1` of the lane at `turn` in file order: indices, int64 (any,)."""
    positions = np.arange(start, stop)
    block = positions // block_size * lanes + turn
    return block * block_size + positions % block_size
