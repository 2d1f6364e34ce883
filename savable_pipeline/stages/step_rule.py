"""`StepRule`: chooses packs or batches of similar cost for all ranks of a step.

    all lanes share a quantile u for each slot     0.42, 0.08, 0.91, …        drawn from the run's seed
    each lane divides 0 … 1 among the costs        ├ 3 ┼─── 7 ───┼ 12 ┤      of packs that wait or were yielded lately
    it yields the pack whose part is nearest to u  7                         a cheaper pack rather than a costlier one,
                                                                             and a pack that waited long a bit sooner

Lanes with similar costs then yield packs of similar cost, for any number of ranks, without communication. A shared
target cost would not work, because packs that cost more would accumulate in a lane. A costlier pack counts as further
away, because all ranks of a step wait for the slowest. All arithmetic is in integers. A batch of a `BucketBatcher` is
chosen like a pack.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from savable_pipeline.core.keyed_random import RANKS, SharedRanks, derive_key
from savable_pipeline.core.lane import Lane
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.advice import check_count

PAST = 16  # the ranking includes this many times `candidates` of the packs that were yielded last
LONGEST = 6  # a pack waits for at most this many times `candidates` slots
AGE = 50  # a wait of this many times `candidates` slots counts as much as the whole range of quantiles


class StepRule:
    """Rule that chooses which waiting pack or batch a lane yields next.

    Up to `candidates` packs wait. In the ranking, a waiting pack counts `weight` times as much as a yielded one. The
    distance of a part above the quantile is multiplied by `costlier`. `stage` is the name of the stage's class.
    """

    def __init__(self, stage: str, lane: Lane, *, candidates: int, weight: int, costlier: int) -> None:
        check_count(stage, "candidates", candidates)
        self.candidates, self._weight, self._costlier, self._stage = candidates, weight, costlier, stage
        self.count = 0  # number of yielded packs
        self.past = array("q")  # costs of the packs that were yielded last, int64, the newest at the end
        self._sorted: list[int] = []  # `past` in ascending order
        # the key is equal in all lanes of a run
        self._ranks = SharedRanks(key=derive_key(lane.seed, stage, lane.epoch), steps=candidates)

    @property
    def room(self) -> int:
        """Return how many packs should wait now.

        They are 4 at first, then one more in each slot, so that the first batch is yielded early.
        """
        return min(self.candidates, 4 + self.count)

    def choose(self, costs: Sequence[int], arrivals: Sequence[int]) -> int:
        """Return the position of the pack to yield.

        Args:
            costs: The cost of each waiting pack, the oldest first; at least one.
            arrivals: The value of `count` when each of these packs arrived.
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
        """Return whether the oldest pack must be yielded now.

        Otherwise this pack, or one of the next oldest, would wait too long.
        """
        now, longest = self.count, LONGEST * self.candidates
        if now - arrivals[0] <= longest - len(arrivals):
            return False
        return any(now - arrival + i >= longest for i, arrival in enumerate(arrivals))

    def count_yielded(self, cost: int) -> None:
        """Count a pack of this cost as yielded."""
        self.count += 1
        self.past.append(cost)
        insort(self._sorted, cost)
        if len(self.past) > PAST * self.candidates:
            del self._sorted[bisect_left(self._sorted, self.past.pop(0))]

    def restore(self, count: int, past: bytes) -> None:
        """Continue after `count` packs.

        `past` has the costs of the last of them, 8 bytes each. Raises `CheckpointMismatchError` if these are more than
        a rule with as many candidates remembers.
        """
        if len(past) > 8 * PAST * self.candidates or len(past) % 8:
            raise CheckpointMismatchError(
                f"{self._stage}: the state has {len(past)} bytes of costs. Use its candidates= or another copy."
            )
        self.count, self.past = count, array("q", past)
        self._sorted = sorted(self.past)
