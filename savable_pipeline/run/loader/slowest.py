"""`Slowest`: the slowest sample and shard among the samples of the batches that are timed."""

from __future__ import annotations

from typing import NamedTuple

from savable_pipeline.run.engine.sample_watch import Watched

_LEAST = 8  # samples of a shard before its mean counts
_MOST = 4096  # shards that are kept


class SlowSample(NamedTuple):
    """A sample: its shard, its number with the tag of its source, and the nanoseconds that its encoder took."""

    shard: str
    number: int
    nanoseconds: int


class Slowest:
    """Sums up the times of samples by shard, reading included."""

    def __init__(self) -> None:
        self.sample: SlowSample | None = None
        self._shards: dict[str, tuple[int, int]] = {}  # samples and nanoseconds

    def add(self, watched: Watched) -> None:
        """Count the samples of a batch."""
        for shard, number, nanoseconds in watched.samples:
            count, total = self._shards.get(shard, (0, 0))
            self._shards[shard] = count + 1, total + nanoseconds
            if self.sample is None or nanoseconds > self.sample.nanoseconds:
                self.sample = SlowSample(shard, number, nanoseconds)
        if len(self._shards) > _MOST:
            kept = sorted(self._shards, key=self._mean, reverse=True)[: _MOST // 2]
            self._shards = {shard: self._shards[shard] for shard in kept}

    def _mean(self, shard: str) -> float:
        count, total = self._shards[shard]
        return total / count / 1e9

    @property
    def shard(self) -> tuple[str, float] | None:
        """The shard whose samples took longest on average, and that mean in s; None while few have been timed."""
        known = [shard for shard, (count, _) in self._shards.items() if count >= _LEAST]
        return max(((shard, self._mean(shard)) for shard in known), key=lambda entry: entry[1], default=None)
