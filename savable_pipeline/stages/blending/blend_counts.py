"""The number of samples of each source that every lane of a `Blend` takes, so that sums over lanes are exact, too.

After n steps source i, with weight w of a total W, should have given n w / W samples in each lane. If every source
should give at least one sample per `block` steps, a closed form holds at multiples of `block`: in lane l of L, the
first i sources together have given floor(n t + l / L) samples, where t is their share. Each lane is less than one
sample off, and so is the sum over lanes, since floor(x) + floor(x + 1/L) + ... + floor(x + (L-1)/L) = floor(L x)
(Hermite's identity).

Between multiples of `block` the closed form could decrease. So a block is halved repeatedly, down to `stride` steps:

    0 ............... block        closed form at both ends
    0 ..... middle .. block        the closed form, clipped to stay between the counts at the left and the right end;
    0 . m . middle .. block        then single samples are moved to correct the lanes, and after them the sums

The counts at a step depend on the step alone and take log2(block / stride) halvings. That no lane is more than 1.5
samples off, and no sum over lanes much more, was found by search (tools/soak/blends.py); it is not proven.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

_ONE = 1 << 30  # one sample, in the fixed-point numbers of this file
_NEVER = -(1 << 62)
_FAR = 1 << 60
_KEPT = 64  # steps whose counts are cached: the next step of a lane is halved from the same ends


class LaneCounts:
    """The counts of `lanes` lanes; lanes with neighbouring numbers take a source at nearly the same step."""

    def __init__(self, weights: Sequence[int], lanes: int, *, stride: int) -> None:
        self.stride = stride
        self._weights = list(weights)
        self._total = sum(weights)
        self._lanes = np.arange(lanes)[:, None]
        self._shares = list(accumulate(weights, initial=0))
        self._block = stride
        while self._block * min(weights) < self._total and len(weights) > 2:
            self._block *= 2
        self._dues = np.array([weight * _ONE // self._total for weight in weights])  # each source's share of one step
        self._kept: OrderedDict[int, Ints] = OrderedDict()

    def at(self, step: int) -> Ints:
        """The samples of each source that every lane has taken after `step` steps, a multiple of `stride`.

        int64 (lanes, sources); do not write to it.
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
            carries.append(lanes - rest * lanes // self._total)  # from this lane on, the fraction adds one sample
        return np.diff(np.array(bounds) + (self._lanes >= np.array(carries)), axis=1)

    def _halved(self, step: int, left: Ints, right: Ints) -> Ints:
        """The counts at `step`: between those at the left and at the right end, and near the closed form."""
        counts = np.clip(self._closed_form(step), left, right)
        due = [divmod(step * weight, self._total) for weight in self._weights]
        behind = (np.array([whole for whole, _ in due]) - counts) * _ONE
        behind += np.array([rest * _ONE // self._total for _, rest in due])
        _settle_lanes(step, counts, behind, left, right, self._dues)
        _settle_sums(counts, behind, left, right, self._dues, limit=5 * _ONE // 4, most=_ONE)
        _settle_sums(counts, behind, left, right, self._dues, limit=3 * _ONE // 2, most=2 * _ONE)
        return counts


def _settle_lanes(step: int, counts: Ints, behind: Ints, left: Ints, right: Ints, dues: Ints) -> None:
    """Make the counts of each lane sum to `step`: add samples of sources that are behind, or remove from those ahead.

    Among the sources that keep a lane within 1.25 samples (within less for frequent sources), choose the one whose sum
    over lanes is furthest off. Correct a quarter of the lanes at a time, so that they do not all choose one source.
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
    """Exchange samples of one source for another's, until no two sums over lanes are more than `most` apart.

    Choose the lanes that gain most, among those that stay within `limit` and can continue from there.
    """
    sums = behind.sum(axis=0)
    closed = np.zeros((len(sums), len(sums)), bool)
    while True:
        gaps = np.where(closed, 0, sums - sums[:, None])
        source, other = divmod(int(gaps.argmax()), len(sums))  # `source` has given too many samples, `other` too few
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
    """Whether each lane can stay within 1.5 samples for the two steps before and the two steps after: bool (lanes,)."""
    most, able = 3 * _ONE // 2, np.ones(len(behind), bool)
    for steps in (1, 2):
        able &= (behind + steps * dues > most).sum(axis=1) <= steps
        able &= (behind - steps * dues < -most).sum(axis=1) <= steps
    return able
