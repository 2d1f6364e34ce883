"""`BucketRule`: which full bucket a lane gives its next batch of, so that all lanes take the same one at a time.

    all lanes share a rank for each batch      u = 0.42, 0.08, 0.91, …          drawn from the run's seed
    each divides 0 … 1 among its buckets       ├ short ┼── middle ──┼ long ┤    by the batches that came to each
    it gives a batch of the one u falls in     a bucket that holds more is a little wider

If that bucket is not full, the nearest shorter one that is takes its place, else the nearest longer one: so the other
ranks seldom wait for this one. All arithmetic is of integers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from savable_pipeline.core.shared_ranks import RANKS, SharedRanks
from savable_pipeline.stages.bucket_sizes import Bucket, BucketSizes

FIRST = 4  # full batches to hold before the first one is given
STEPS = 32  # of the shared ranks
WIDER = 16  # times `hold`: a bucket is wider by 1 / (WIDER · hold) of all for each batch that it holds
COUNTED = 256  # times `hold`: when so many batches have come, all counts are halved
_BATCH = 1 << 20  # parts of a batch, in which batches are counted


class BucketRule:
    """The choice of a lane that holds up to `hold` full batches; `key` is the same in all lanes of a run."""

    def __init__(self, *, key: int, hold: int, sizes: BucketSizes) -> None:
        self._ranks = SharedRanks(key=key, steps=STEPS)
        self._hold = hold
        self._sizes = sizes
        self._came: dict[Bucket, int] = {}  # items that came to each bucket
        self._total = 0  # parts of batches that these are

    def room(self, n: int) -> int:
        """How many full batches to hold before batch n: few at first, so that the first one does not wait long."""
        return min(self._hold, FIRST + n)

    def came(self, bucket: Bucket) -> None:
        """Count an item that came to a bucket."""
        self._came[bucket] = self._came.get(bucket, 0) + 1
        self._total += self._parts(bucket)
        if self._total >= COUNTED * self._hold * _BATCH:
            self.restore([(bucket, count // 2) for bucket, count in self._came.items()])

    def _parts(self, bucket: Bucket) -> int:
        """The parts of a batch that an item is."""
        return max(1, _BATCH // self._sizes.of(*bucket))

    def choose(self, n: int, held: Mapping[Bucket, int], full: Collection[Bucket]) -> Bucket:
        """The bucket of batch n: one of `full`, not empty; `held` are the items in each bucket that has some."""
        widths = self._widths(held)
        wanted = self._ranks.rank(n) * sum(widths.values())
        begin, chosen = 0, None
        for bucket in sorted(widths, key=_shortest_first):
            if bucket in full and (chosen is None or begin * RANKS <= wanted):
                chosen = bucket
            begin += widths[bucket]
        assert chosen is not None, "a full bucket holds items"
        return chosen

    def _widths(self, held: Mapping[Bucket, int]) -> dict[Bucket, int]:
        """The share of each bucket that has or had items, of the sum."""
        scale = WIDER * self._hold
        widths = {bucket: scale * count * self._parts(bucket) for bucket, count in self._came.items()}
        for bucket, count in held.items():
            widths[bucket] = widths.get(bucket, 0) + self._total * count // self._sizes.of(*bucket)
        return widths

    def counts(self) -> list[tuple[Bucket, int]]:
        """The items that came to each bucket: for `restore`."""
        return list(self._came.items())

    def restore(self, counts: Sequence[tuple[Bucket, int]]) -> None:
        """Continue after these."""
        self._came = {bucket: count for bucket, count in counts if count}
        self._total = sum(count * self._parts(bucket) for bucket, count in self._came.items())


def _shortest_first(bucket: Bucket) -> tuple[int, str]:
    group, number = bucket
    return number, repr(group)
