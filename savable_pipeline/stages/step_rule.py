"""`StepRule`: chooses packs or batches of similar cost for all ranks of a step.

    all lanes share a quantile u for each slot     0.42, 0.08, 0.91, …        drawn from the run's seed
    each lane divides 0 … 1 among the costs        ├ 3 ┼─── 7 ───┼ 12 ┤       of what waits and what it yielded lately
    it yields what has the part nearest to u       7                          a cheaper one rather than a costlier one,
                                                                              and what has waited long a little sooner

Lanes with similar costs then yield similar ones, for any number of ranks, without communication. A shared target cost
would not work, because what costs more would accumulate in a lane. A costlier part counts as further away, because all
ranks of a step wait for the slowest. All arithmetic is in integers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from savable_pipeline.core.keyed_random import RANKS, SharedRanks, derive_key
from savable_pipeline.core.lane import Lane
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.advice import check_count

PAST = 16  # the ranking has this many times `candidates` of what was yielded last
LONGEST = 6  # the longest wait is this many times `candidates` slots
AGE = 50  # after this many times `candidates` slots, waiting counts as much as the whole range of quantiles


class StepRule:
    """Rule that chooses which waiting pack or batch a lane yields next.

    Up to `candidates` wait. In the ranking, one that waits counts `weight` times as much as a yielded one. A part above
    the quantile counts as `costlier` times as far away. `stage` is the name of the stage's class.
    """

    def __init__(self, stage: str, lane: Lane, *, candidates: int, weight: int, costlier: int) -> None:
        check_count(stage, "candidates", candidates)
        self.candidates, self._weight, self._costlier, self._stage = candidates, weight, costlier, stage
        self.count = 0  # number of yielded ones
        self.past = array("q")  # costs of those yielded last, int64, the newest at the end
        self._sorted: list[int] = []  # the same, sorted
        # the key is equal in all lanes of a run
        self._ranks = SharedRanks(key=derive_key(lane.seed, stage, lane.epoch), steps=candidates)

    @property
    def room(self) -> int:
        """Return how many should wait now.

        It is 4 at first, then one more each slot, so that the first batch comes soon.
        """
        return min(self.candidates, 4 + self.count)

    def choose(self, costs: Sequence[int], arrivals: Sequence[int]) -> int:
        """Return the position of the one to yield.

        Args:
            costs: The cost of each that waits, the oldest first, at least one.
            arrivals: The `count` at the arrival of each.
        """
        if self._is_overdue(arrivals):
            return 0
        now, past, weight = self.count, self._sorted, self._weight
        ranked = sorted(costs)
        total = weight * len(ranked) + len(past)
        wanted = self._ranks.rank(now) * total
        # The score is distance / (RANKS * total) - waited / (AGE * candidates), times both denominators.
        scale, age = AGE * self.candidates, RANKS * total
        best, least = 0, None
        for i, (cost, arrival) in enumerate(zip(costs, arrivals, strict=True)):
            begin = (weight * bisect_left(ranked, cost) + bisect_left(past, cost)) * RANKS
            if begin > wanted:
                distance = self._costlier * (begin - wanted)
            else:
                distance = max(0, wanted - (weight * bisect_right(ranked, cost) + bisect_right(past, cost)) * RANKS)
            score = distance * scale - (now - arrival) * age
            if least is None or score < least:
                best, least = i, score
        return best

    def _is_overdue(self, arrivals: Sequence[int]) -> bool:
        """Return whether the oldest must be yielded now.

        Otherwise it, or the next oldest, would wait too long.
        """
        now, longest = self.count, LONGEST * self.candidates
        if now - arrivals[0] <= longest - len(arrivals):
            return False
        return any(now - arrival + i >= longest for i, arrival in enumerate(arrivals))

    def count_yielded(self, cost: int) -> None:
        """Count one of this cost as yielded."""
        self.count += 1
        self.past.append(cost)
        insort(self._sorted, cost)
        if len(self.past) > PAST * self.candidates:
            del self._sorted[bisect_left(self._sorted, self.past.pop(0))]

    def restore(self, count: int, past: bytes) -> None:
        """Continue after `count` ones.

        The last of them had the costs `past`, 8 bytes each.

        Raises `CheckpointMismatchError` if a rule with as many candidates has no such past.
        """
        if len(past) > 8 * PAST * self.candidates or len(past) % 8:
            raise CheckpointMismatchError(
                f"{self._stage}: the state has {len(past)} bytes of costs. Use its candidates= or another copy."
            )
        self.count, self.past = count, array("q", past)
        self._sorted = sorted(self.past)
