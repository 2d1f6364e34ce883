"""`RankRule`: which held pack a lane yields next, so that all lanes yield packs of about equal cost at a time.

    all lanes share a rank for each slot    u = 0.42, 0.08, 0.91, …        drawn from the run's seed
    each ranks its held packs               cheapest 0.0 ─────── 1.0 dearest    among those held and recently given
    it yields the one nearest to u, an old one a little sooner; one that has waited too long, at once

Lanes whose packs are alike then give packs of like cost, whatever the number of ranks, without asking each other. A
shared target *cost* would not last: what a lane received beyond it would pile up. All arithmetic is of integers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

from savable_pipeline.core.shared_ranks import SharedRanks

PAST = 16  # times `hold`: packs given last that count
WEIGHT = 8  # a held pack counts as much as this many given ones
LONGEST = 6  # times `hold`: the longest that a pack may be held, in slots
AGE = 50  # times `hold`: slots of waiting that outweigh the whole range of ranks


class WaitingPack(NamedTuple):
    """What the rule knows of a held pack."""

    cost: int
    arrival: int  # packs that the lane had given when this one came


class RankRule:
    """The choice of a lane that holds up to `hold` packs; `key` is the same in all lanes of a run."""

    def __init__(self, *, key: int, hold: int) -> None:
        self.hold = hold
        self.count = 0  # packs given
        self.past = array("q")  # the costs of the packs given last, int64, the newest at the end
        self._sorted: list[int] = []
        self._ranks = SharedRanks(key=key, steps=hold)

    @property
    def room(self) -> int:
        """How many packs to hold now: 4 at first, then one more each slot, so that a first batch does not wait."""
        return min(self.hold, 4 + self.count)

    def choose(self, held: Sequence[WaitingPack]) -> int:
        """The position of the pack to give; `held` is sorted by arrival, not empty."""
        if self._is_overdue(held):
            return 0
        now, past = self.count, self._sorted
        ranked = sorted([waiting.cost for waiting in held])
        total = 2 * (WEIGHT * len(ranked) + len(past))
        # the distance from u less the bonus, |rank / total - u| - waited / (AGE · hold), times AGE · hold · total
        scale = AGE * self.hold
        wanted = AGE // 2 * (2 * self._ranks.step(now) + 1) * total  # of u = (2 · step + 1) / (2 · hold)
        best, least = 0, None
        for i, (cost, arrival) in enumerate(held):
            rank = WEIGHT * (bisect_left(ranked, cost) + bisect_right(ranked, cost))
            rank += bisect_left(past, cost) + bisect_right(past, cost)
            score = abs(rank * scale - wanted) - (now - arrival) * total
            if least is None or score < least:
                best, least = i, score
        return best

    def _is_overdue(self, held: Sequence[WaitingPack]) -> bool:
        """Whether the oldest must be given now, so that none of those that came with it waits too long."""
        now, longest = self.count, LONGEST * self.hold
        if now - held[0].arrival <= longest - len(held):
            return False
        return any(now - waiting.arrival + i >= longest for i, waiting in enumerate(held))

    def gave(self, cost: int) -> None:
        """Count a pack of this cost as given."""
        self.count += 1
        self.past.append(cost)
        insort(self._sorted, cost)
        if len(self.past) > PAST * self.hold:
            del self._sorted[bisect_left(self._sorted, self.past.pop(0))]

    def restore(self, count: int, past: Sequence[int]) -> None:
        """Continue after `count` packs; the last ones had these costs."""
        self.count = count
        self.past = array("q", past)
        self._sorted = sorted(past)
