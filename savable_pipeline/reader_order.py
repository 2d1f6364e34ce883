"""The order in which a lane reads a dataset: any position of any epoch, found in O(log shards).

Shuffled. The shards are permuted and laid end to end; the sequence is cut into windows of about equal numbers of
shards, at most `window` each (a dataset of fewer than twice `window` shards is one window); each window is cut into
blocks of `block_size` samples, and its blocks are permuted. The result is cut into one span a lane, which differ by
one sample at most and rotate with the epoch:

    shards permuted   [ s7 ][ s2 ][ s0 ] │ [ s5 ][ s1 ] …          two windows
    blocks permuted   4 0 2 6 1 3 5      │ 2 0 3 1 …
    spans             lane 0 │ lane 1    │ lane 2 …

Not shuffled. Blocks of file order are dealt round-robin over the lanes, one place further every epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.keys import Bijection, key, permutation

Positions = NDArray[np.int64]
_WINDOWS_KEPT = 128  # permutations of blocks kept at a time, 128 kB each at most


class ShuffledEpoch:
    """One epoch's order over the whole dataset; the lanes share it."""

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
        self._key = key(seed, "reader", source, epoch)
        self._block = block_size
        self._order = permutation(key(self._key, "shards"), shards)
        counts = np.diff(firsts)[self._order]
        self._ends = np.cumsum(counts)  # of each permuted shard, in the permuted sequence
        self._shift = firsts[self._order] - (self._ends - counts)  # from the permuted sequence to the dataset
        windows = 1 if window is None or shards < 2 * window else -(-shards // window)
        last = [(i + 1) * shards // windows - 1 for i in range(windows)]
        self._window_ends = self._ends[last]
        self._blocks: dict[int, Bijection] = {}

    def locate(self, start: int, stop: int) -> Positions:
        """The samples at positions `start` to `stop - 1` of the epoch, as indices of the dataset: int64."""
        parts = []
        while start < stop:
            window = int(np.searchsorted(self._window_ends, start, side="right"))
            end = min(stop, int(self._window_ends[window]))
            parts.append(self._in_window(window, start, end))
            start = end
        places = np.concatenate(parts) if len(parts) != 1 else parts[0]
        found: Positions = places + self._shift[np.searchsorted(self._ends, places, side="right")]
        return found

    def _in_window(self, window: int, start: int, stop: int) -> Positions:
        """Places in the permuted sequence of shards; whole blocks are permuted, a last shorter one stays last."""
        begin = int(self._window_ends[window - 1]) if window else 0
        blocks = (int(self._window_ends[window]) - begin) // self._block
        first, last = (start - begin) // self._block, (stop - begin - 1) // self._block
        numbers = np.arange(first, last + 1)
        whole = numbers < blocks
        numbers[whole] = self._bijection(window, blocks)(numbers[whole])
        places = (numbers[:, None] * self._block + np.arange(self._block)).ravel()
        skipped = first * self._block
        return begin + places[start - begin - skipped : stop - begin - skipped]

    def _bijection(self, window: int, blocks: int) -> Bijection:
        if window not in self._blocks:
            if len(self._blocks) >= _WINDOWS_KEPT:
                self._blocks.clear()
            self._blocks[window] = Bijection(key(self._key, "blocks", window), blocks)
        return self._blocks[window]


def span(count: int, lane: int, lanes: int, epoch: int) -> tuple[int, int]:
    """First and last position (exclusive) of a lane's span of a shuffled epoch of `count` samples."""
    turn = (lane + epoch) % lanes
    return turn * count // lanes, (turn + 1) * count // lanes


def dealt_count(count: int, lane: int, lanes: int, epoch: int, block_size: int) -> int:
    """How many samples of an epoch in file order a lane gets."""
    turn = (lane + epoch) % lanes
    blocks = -(-count // block_size)
    mine = len(range(turn, blocks, lanes))
    has_last = mine and (blocks - 1) % lanes == turn
    return mine * block_size - (blocks * block_size - count if has_last else 0)


def dealt(start: int, stop: int, lane: int, lanes: int, epoch: int, block_size: int) -> Positions:
    """The samples at a lane's positions `start` to `stop - 1` of an epoch in file order: int64 indices."""
    positions = np.arange(start, stop)
    block = positions // block_size * lanes + (lane + epoch) % lanes
    return block * block_size + positions % block_size
