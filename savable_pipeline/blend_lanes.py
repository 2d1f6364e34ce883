"""How many samples of each source every lane of a `Blend` takes, so that the sum over the lanes is exact too.

After n steps source i, of weight w of a total W, is due n w / W samples in each lane. Where all sources are due two in
`block` steps, there is a closed form at multiples of `block`: of lane number l of L, the first i sources together take
floor(n t + l / L), t being their share. Each lane is less than one sample off, and so is the sum over lanes, since
floor(x) + floor(x + 1/L) + ... + floor(x + (L-1)/L) = floor(L x) (Hermite's identity).

In between it would take samples back. So a block is halved, and again, until its parts are `stride` steps long:

    0 ............... block        closed form at both ends
    0 ..... middle .. block        the closed form, no less than at the left end, no more than at the right one;
    0 . m . middle .. block        then lanes, and after them the sums over lanes, are put right by single samples

The counts at a step follow from the step alone, in as many halvings as it takes to come there. That no lane is more
than 1.5 samples off, and no sum over lanes much more, was found by search (tools/search_blend.py), not proven.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

_ONE = 1 << 30  # a sample, where it is divided
_NEVER = -(1 << 62)
_FAR = 1 << 60
_KEPT = 64  # steps whose counts are kept; a lane comes back to those that its next one lies between


class LaneCounts:
    """The counts of `lanes` lanes, numbered so that neighbours take a source one soon after the other."""

    def __init__(self, weights: Sequence[int], lanes: int, *, stride: int) -> None:
        self.stride = stride
        self._weights = list(weights)
        self._total = sum(weights)
        self._lanes = np.arange(lanes)[:, None]
        self._shares = list(accumulate(weights, initial=0))
        self._block = stride
        while self._block * min(weights) < self._total and len(weights) > 2:
            self._block *= 2
        self._dues = np.array([weight * _ONE // self._total for weight in weights])  # with a step
        self._kept: OrderedDict[int, Ints] = OrderedDict()

    def at(self, step: int) -> Ints:
        """Samples of each source that every lane has taken after `step` steps, a multiple of the stride.

        int64 (lanes, sources), not to be written to.
        """
        low, length = step // self._block * self._block, self._block
        left, right = self._known(low), self._known(low + length)
        while low < step:
            length //= 2
            middle = self._known(low + length, (left, right))
            if low + length <= step:
                low, left = low + length, middle
            else:
                right = middle
        return left

    def _known(self, step: int, between: tuple[Ints, Ints] | None = None) -> Ints:
        if step not in self._kept:
            self._kept[step] = self._closed_form(step) if between is None else self._halved(step, *between)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(step)
        return self._kept[step]

    def _closed_form(self, step: int) -> Ints:
        lanes, bounds, carries = len(self._lanes), [], []
        for share in self._shares:
            whole, rest = divmod(step * share, self._total)
            bounds.append(whole)
            carries.append(lanes - rest * lanes // self._total)  # from this lane on the fraction makes one more
        return np.diff(np.array(bounds) + (self._lanes >= np.array(carries)), axis=1)

    def _halved(self, step: int, left: Ints, right: Ints) -> Ints:
        """Counts between those of the left and of the right end, near the closed form."""
        counts = np.clip(self._closed_form(step), left, right)
        due = [divmod(step * weight, self._total) for weight in self._weights]
        behind = (np.array([whole for whole, _ in due]) - counts) * _ONE
        behind += np.array([rest * _ONE // self._total for _, rest in due])
        _settle_lanes(step, counts, behind, left, right, self._dues)
        _settle_sums(counts, behind, left, right, self._dues, limit=5 * _ONE // 4, most=_ONE)
        _settle_sums(counts, behind, left, right, self._dues, limit=3 * _ONE // 2, most=2 * _ONE)
        return counts


def _settle_lanes(step: int, counts: Ints, behind: Ints, left: Ints, right: Ints, dues: Ints) -> None:
    """Have each lane take `step` samples in all: more of sources that are behind, or fewer of those ahead.

    Of the sources by which a lane stays within 1.25 samples, or less where they come often, the one whose sum over
    lanes is furthest off; some lanes after some, so that they do not all choose the same.
    """
    limit = 5 * _ONE // 4 - np.minimum(dues, _ONE - dues) // 2
    missing = step - counts.sum(axis=1)
    some = max(8, np.count_nonzero(missing) // 4)
    while len(rows := np.flatnonzero(missing)[:some]):
        change = np.sign(missing[rows])
        free = np.where(change[:, None] > 0, counts[rows] < right[rows], counts[rows] > left[rows])
        late = change[:, None] * behind[rows]
        sums = change[:, None] * behind.sum(axis=0)
        value = np.where(late >= _ONE - limit, late + sums, late - limit - _FAR)
        chosen = np.where(free, value, _NEVER).argmax(axis=1)
        counts[rows, chosen] += change
        behind[rows, chosen] -= change * _ONE
        missing[rows] -= change


def _settle_sums(counts: Ints, behind: Ints, left: Ints, right: Ints, dues: Ints, *, limit: int, most: int) -> None:
    """Have lanes take one source instead of another, until no two sums over lanes are further than `most` apart.

    Of the lanes that stay within `limit` and can go on from there, those that gain most.
    """
    sums = behind.sum(axis=0)
    closed = np.zeros((len(sums), len(sums)), bool)
    while True:
        gaps = np.where(closed, 0, sums - sums[:, None])
        source, other = divmod(int(gaps.argmax()), len(sums))  # of `source` too many were taken, of `other` too few
        if gaps[source, other] <= most:
            return
        wanted = max(1, int(min(-sums[source], sums[other])) // _ONE)
        free = (counts[:, source] > left[:, source]) & (counts[:, other] < right[:, other])
        free &= (behind[:, source] <= limit - _ONE) & (behind[:, other] >= _ONE - limit)
        lanes = np.flatnonzero(free)
        after = behind[lanes]
        after[:, source] += _ONE
        after[:, other] -= _ONE
        free[lanes] = _can_go_on(after, dues)
        gain = np.where(free, behind[:, other] - behind[:, source], _NEVER)
        lanes = np.argsort(-gain, kind="stable")[: min(wanted, int(free.sum()))]
        closed[source, other] = len(lanes) < wanted
        for column, change in (source, -1), (other, 1):
            counts[lanes, column] += change
            behind[lanes, column] -= change * _ONE
            sums[column] -= change * _ONE * len(lanes)


def _can_go_on(behind: Ints, dues: Ints) -> NDArray[np.bool_]:
    """Whether lanes can be within 1.5 samples one step later, and two, and were one step before, and two."""
    most, able = 3 * _ONE // 2, np.ones(len(behind), bool)
    for steps in (1, 2):
        able &= (behind + steps * dues > most).sum(axis=1) <= steps
        able &= (behind - steps * dues < -most).sum(axis=1) <= steps
    return able
