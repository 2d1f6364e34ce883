"""`Presence`: which samples of a cached dataset are in the cache, as reads ask it, and whether all of them are."""

from __future__ import annotations

import time

import numpy as np

from savable_pipeline.data.remote.shard_cache import ShardCache
from savable_pipeline.data.stores.indexed_shards import IndexedShards

_LOOK_S, _LOOK_SHARE = 1.0, 50  # between two looks whether all are present: seconds, and times what a look takes


class Presence:
    """The flags of a cached version (see `shard_cache`). If all samples are `kept`, looks whether all are present."""

    def __init__(self, cached: ShardCache, shards: IndexedShards, *, kept: bool) -> None:
        self.present, self.used, self.evictions = cached.present.data, cached.used.data, cached.evictions
        self.complete_at = -1  # the count of evictions when every sample was present; -1: not all are
        self._cached, self._kept = cached, kept
        self._numbers = cached.shards_of(shards.first_rows[np.diff(shards.firsts) > 0])  # in the cache's index
        self._look_at = 0.0

    def is_complete(self) -> bool:
        """Whether every sample was found in the cache, and nothing was evicted since."""
        if self.evictions[0] == self.complete_at:
            return True
        self.complete_at = -1
        return False

    def look(self, now: float) -> None:
        """Looks, now and then, whether every sample is present: then nothing need be announced, or looked up by row."""
        if not self._kept or now < self._look_at:
            return
        evictions = self.evictions[0]
        if self._cached.all_present(self._numbers):
            self.complete_at = evictions
        self._look_at = time.monotonic() + max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - now))
