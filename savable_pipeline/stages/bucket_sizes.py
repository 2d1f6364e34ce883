"""`BucketSizes`: how many items a batch of a bucket has, by the item's group and the bucket's bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any, TypeAlias

Group: TypeAlias = Any  # an int, a str, None, or a tuple of these
BatchSize: TypeAlias = int | Sequence[int]  # items of a batch: of every bucket, or of each


class BucketSizes:
    """The sizes of `BucketBatcher`, checked. Raises ValueError for wrong ones.

    `bounds` are empty where items are put together by their group alone: then there is one bucket, of any length.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        size: BatchSize | Mapping[Group, BatchSize] | Callable[[Group], int] | None,
        max_tokens: int | None,
        *,
        grouped: bool,
    ) -> None:
        self.bounds = [index(bound) for bound in bounds]
        if any(a >= b for a, b in pairwise([0, *self.bounds])) or not (self.bounds or grouped):
            raise ValueError(f"BucketBatcher: bounds must be lengths in ascending order, not {bounds}")
        if (size is None) == (max_tokens is None):
            raise ValueError("BucketBatcher: give either size or max_tokens")
        if (isinstance(size, Mapping) or callable(size)) and not grouped:
            raise ValueError("BucketBatcher: a size for each group needs group=, which says what an item's group is")
        self.buckets = len(self.bounds) or 1
        self._groups: dict[Group, list[int]] = {}
        self._every: list[int] = []
        self._of_group: Callable[[Group], int] | None = None
        if max_tokens is not None:
            self._every = self._by_tokens(max_tokens)
        elif isinstance(size, Mapping):
            self._groups = {plain_group(group): self._sizes(each) for group, each in size.items()}
        elif callable(size):
            self._of_group = size
        elif size is not None:
            self._every = self._sizes(size)

    def _by_tokens(self, max_tokens: int) -> list[int]:
        if not self.bounds:
            raise ValueError("BucketBatcher: max_tokens needs bounds: a batch is padded to that of its bucket")
        if max_tokens < self.bounds[-1]:
            raise ValueError(f"BucketBatcher: max_tokens={max_tokens} has no room for one item of {self.bounds[-1]}")
        return [max_tokens // bound for bound in self.bounds]

    def _sizes(self, size: BatchSize) -> list[int]:
        sizes = [index(each) for each in size] if isinstance(size, Sequence) else [index(size)] * self.buckets
        if len(sizes) != self.buckets:
            raise ValueError(f"BucketBatcher: {len(sizes)} sizes for {self.buckets} buckets: {size}")
        if min(sizes) < 1:
            raise ValueError(f"BucketBatcher: size must be at least 1, not {size}")
        return sizes

    def of(self, group: Group, bucket: int) -> int:
        """The number of items of a batch. Raises ValueError for a group that has no size."""
        if self._of_group is not None:
            return self._sizes(self._of_group(group))[bucket]
        if not self._groups:
            return self._every[bucket]
        if group not in self._groups:
            known = ", ".join(map(repr, self._groups))
            raise ValueError(f"the group {group!r} has no size; there are sizes for {known}")
        return self._groups[group][bucket]


def plain_group(group: Any) -> Group:
    """A group as a state returns it. Raises ValueError unless it is an int, a str, None, or a tuple of these."""
    if group is None or isinstance(group, str):
        return group
    if isinstance(group, list | tuple):
        return tuple(plain_group(each) for each in group)
    try:
        return index(group)
    except TypeError:
        raise ValueError(f"a group is an int, a str, None, or a tuple of these, not {group!r}") from None
