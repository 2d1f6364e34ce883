"""The order in which lanes read rows that are decoded in groups: all lanes read from the same few groups at a time.

    groups permuted   [ g7 ][ g2 ] │ [ g0 ][ g5 ] │ …     windows, each of which fits the cache
    blocks permuted   4 0 2 1 3    │ 2 0 3 1      │       within a window
    dealt             0 1 2 0 1    │ 2 0 1 2      │       to the lanes in turn

In the order of `read_order` each lane has a span of its own, so that as many groups are open as there are lanes. Here
the blocks of a window are dealt to all lanes. A lane's positions are those of its span all the same: only what lies at
them differs.
"""

from __future__ import annotations

import numpy as np

from savable_pipeline.stages.readers.read_order import EpochOrder, Positions


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
        place = int(np.searchsorted(self._begins, start, side="right")) - 1
        begin = int(self._begins[place])
        parts = [self._order.locate(*run) for run in self._runs(place, start - begin, stop - begin)]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _runs(self, place: int, start: int, stop: int) -> list[tuple[int, int]]:
        """The places of the lane's positions in the order, as runs. The rest of a span is not dealt."""
        runs = []
        while start < min(stop, self._dealt):
            block, inside = divmod(start, self._block)
            size = min(self._block - inside, stop - start)
            first = (block * self._lanes + place) * self._block + inside
            runs.append((first, first + size))
            start += size
        if start < stop:
            rest = self._lanes * self._dealt + int(self._begins[place]) - place * self._dealt - self._dealt
            runs.append((rest + start, rest + stop))
        return runs
