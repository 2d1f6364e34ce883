"""`BucketSizes`: how many items a batch of a bucket has, by the item's group and the bucket's bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any, TypeAlias

from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.setting_rules import function_settings

Group: TypeAlias = Any  # an int, a str, None, or a tuple of these
Bucket: TypeAlias = tuple[Group, int]  # a group, and the number of the bucket in it
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
        self._given, self._max_tokens, self._grouped = size, max_tokens, grouped
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

    def checked_group(self, group: Any) -> Group:
        """A group as a state returns it. Raises ValueError if it is none, or has no size."""
        plain = plain_group(group)
        self.of(plain, 0)
        return plain

    def settings(self) -> dict[str, Any]:
        """What sets the sizes, for a fingerprint."""
        size: Any = self._given
        if self._of_group is not None:
            return {"bounds": self.bounds, "max_tokens": None, **function_settings("size", self._of_group)}
        if isinstance(size, Mapping):  # whose order does not matter, and whose keys need not be texts
            size = sorted(([plain_group(group), each] for group, each in size.items()), key=repr)
        return {"bounds": self.bounds, "size": size, "max_tokens": self._max_tokens}

    def saved(self, keys: Sequence[tuple[Any, int]] | None, count: int) -> list[Bucket]:
        """The buckets of a state that has `count`. Raises `CheckpointMismatchError` if they are not ours."""
        if not self._grouped and keys is None and count == self.buckets:
            return [(None, number) for number in range(count)]
        if not self._grouped or keys is None or len(keys) != count:
            raise CheckpointMismatchError(
                f"BucketBatcher(bounds={self.bounds}): the state has {count} buckets; was it saved with another group=?"
            )
        return [self.saved_bucket(group, number) for group, number in keys]

    def saved_bucket(self, group: Any, number: int) -> Bucket:
        """A bucket of a state. Raises `CheckpointMismatchError` if it is not one of ours."""
        wrong = f"BucketBatcher(bounds={self.bounds}): the state has a bucket {number}"
        try:
            plain = self.checked_group(group)
        except ValueError as error:
            raise CheckpointMismatchError(f"{wrong}, and {error}") from error
        if not 0 <= number < self.buckets:
            raise CheckpointMismatchError(f"{wrong}; was it saved with other bounds?")
        return plain, number


def plain_group(group: Any) -> Group:
    """A group as a state returns it. Raises ValueError unless it is an int, a str, None, or a tuple of these."""
    if group is None:
        return None
    if isinstance(group, str):
        return str.__str__(group)  # of an enum, say, its value: what a state returns must sort alike
    if isinstance(group, list | tuple):
        return tuple(plain_group(each) for each in group)
    try:
        return index(group)
    except TypeError:
        raise ValueError(f"a group is an int, a str, None, or a tuple of these, not {group!r}") from None
