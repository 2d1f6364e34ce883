"""`BucketBatcher`: batches of items of about equal length, for those who pad and do not pack."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any

import msgspec

from savable_pipeline.batch import BatchStage
from savable_pipeline.encoder import Skip, TaskEncoder
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.pack_policies import MISSING
from savable_pipeline.stage import ItemRef, Stage, State, as_ref, dry_limit, parse_state


class _BucketState(msgspec.Struct):
    buckets: list[list[Any]]
    taken: Any
    count: int
    source: dict[str, Any]


class BucketBatcher(BatchStage):
    """Gives what `encoder.batch(items, rng)` makes of items whose lengths lie in one bucket.

    `bounds` are the greatest lengths of the buckets, ascending: [64, 256] is 1 … 64 and 65 … 256. A batch has `size`
    items, or with `max_tokens` as many as stay within it when all are padded to their bucket's bound. The first bucket
    with enough items gives its batch; when a finite source ends, the rest of each bucket, shortest first, unless
    `drop_last`. What is longer than the last bound is left out and counted. `encoder=None`: the encoder upstream.
    """

    def __init__(
        self,
        source: Stage,
        *,
        bounds: Sequence[int],
        size: int | None = None,
        max_tokens: int | None = None,
        drop_last: bool | None = None,
        encoder: TaskEncoder | None = None,
    ) -> None:
        self.bounds = [index(bound) for bound in bounds]
        if not self.bounds or self.bounds[0] < 1 or any(a >= b for a, b in pairwise(self.bounds)):
            raise ValueError(f"BucketBatcher: bounds must be lengths in ascending order, not {bounds}")
        if (size is None) == (max_tokens is None):
            raise ValueError("BucketBatcher: give either size or max_tokens")
        if size is not None and size < 1:
            raise ValueError(f"BucketBatcher: size must be at least 1, not {size}")
        if max_tokens is not None and max_tokens < self.bounds[-1]:
            raise ValueError(f"BucketBatcher: max_tokens={max_tokens} has no room for one item of {self.bounds[-1]}")
        super().__init__(source, drop_last=drop_last, encoder=encoder)
        self.size = size
        self.max_tokens = max_tokens
        self._sizes = [size or (max_tokens or 0) // bound for bound in self.bounds]
        self._items: list[list[Any]] = [[] for _ in self.bounds]
        self._refs: list[list[ItemRef]] = [[] for _ in self.bounds]
        self._taken: tuple[Any, ItemRef] | None = None  # of the source, in no bucket yet
        self._row_of_skips = 0

    @property
    def held_items(self) -> int:
        """Items that wait for their batch."""
        return sum(item is not MISSING for items in self._items for item in items)

    def __next__(self) -> Any:
        bucket = self._due()
        items, refs, size = self._items[bucket], self._refs[bucket], self._sizes[bucket]
        for i, item in enumerate(items[:size]):
            if item is MISSING:
                items[i] = self._make(bucket, refs[i])
        made = [item for item in items[:size] if type(item) is not Skip]  # a `Skip` cannot be made again
        batch = self._calls.combined(made, self._count) if made else None
        self._let_go(bucket)
        return batch if made else next(self)

    def pass_over(self) -> None:
        """Drop what the next batch would be made of. Raises StopIteration at the end."""
        self._let_go(self._due())

    def _due(self) -> int:
        """The bucket that gives the next batch. Raises StopIteration if there is none."""
        bucket = self._fill()
        if bucket is None:
            raise StopIteration
        return bucket

    def _let_go(self, bucket: int) -> None:
        items, refs, size = self._items[bucket], self._refs[bucket], self._sizes[bucket]
        self._given = refs[:size]
        self._items[bucket], self._refs[bucket] = items[size:], refs[size:]
        self._count += 1

    def more(self) -> bool:
        """Whether another batch will come, found by filling a bucket."""
        return self._fill() is not None

    def _fill(self) -> int | None:
        """The bucket that gives the next batch; None at the end."""
        for bucket, refs in enumerate(self._refs):
            if len(refs) >= self._sizes[bucket]:
                return bucket
        while self._taken is not None or self._take():
            placed = self._place()
            if placed is not None and len(self._refs[placed]) >= self._sizes[placed]:
                return placed
        left = [] if self.drop_last else [bucket for bucket, refs in enumerate(self._refs) if refs]
        return left[0] if left else None

    def _take(self) -> bool:
        items, refs = self.source.take(1)
        if items:
            self._taken = items[0], refs[0]
        return bool(items)

    def _place(self) -> int | None:
        """Put the item that was taken into its bucket; None if there is none for it."""
        assert self._taken is not None
        item, ref = self._taken
        if item is MISSING:
            item = self.source.fetch(ref)
        if type(item) is Skip:  # it cannot be made again; counted where that was found
            self._taken = None
            return None
        bucket = self._bucket(item)
        if bucket == len(self.bounds):
            self._skipped()
            self._taken = None
            return None
        self._row_of_skips = 0
        self._items[bucket].append(item)
        self._refs[bucket].append(ref)
        self._taken = None
        return bucket

    def _bucket(self, item: Any) -> int:
        """The number of an item's bucket; beyond the last if it is too long."""
        return bisect_left(self.bounds, self._calls.length(item, least=0))

    def _skipped(self) -> None:
        self.counts["skipped/longer than the last bound"] += 1
        self._row_of_skips += 1
        if self._row_of_skips >= dry_limit(self.population):
            raise EncodeError(
                f"BucketBatcher(bounds={self.bounds}): {self._row_of_skips} items in a row were longer than the last; "
                "no batch will ever come of this data"
            )

    def _make(self, bucket: int, ref: ItemRef) -> Any:
        item = self.source.fetch(ref)
        if type(item) is not Skip and self._bucket(item) != bucket:
            raise CheckpointMismatchError(
                f"BucketBatcher of {self.lane}: the item {ref} lay in bucket {bucket}; made again it takes "
                f"{self.encoder.length(item)}, which does not belong there: {type(self.encoder).__name__} or what it "
                "reads changed since the state was saved, or its result depends on more than the sample and `rng`"
            )
        return item

    def save_state(self) -> State:
        """`buckets`: per bucket the refs of its items; `count`: batches given so far.

        `taken`: the ref of an item that is in no bucket yet, because an error came between; else None.
        """
        return {
            "buckets": [list(refs) for refs in self._refs],
            "taken": None if self._taken is None else self._taken[1],
            "count": self._count,
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Hold the refs of `state` again; their items are made when they are needed."""
        saved = parse_state(self, state, _BucketState)
        if len(saved.buckets) != len(self.bounds):
            raise CheckpointMismatchError(
                f"BucketBatcher(bounds={self.bounds}): the state has {len(saved.buckets)} buckets"
            )
        self.source.restore_state(saved.source)
        self._refs = [[ref for ref in map(as_ref, refs) if self.knows(ref)] for refs in saved.buckets]
        self._items = [[MISSING] * len(refs) for refs in self._refs]
        taken = None if saved.taken is None else as_ref(saved.taken)
        self._taken = None if taken is None or not self.knows(taken) else (MISSING, taken)
        self._count = saved.count

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        return {
            "bounds": self.bounds,
            "size": self.size,
            "max_tokens": self.max_tokens,
            "drop_last": self.drop_last,
            **self._encoder_settings(),
        }
