"""`BucketBatcher`: batches of items of similar length or one group.

It is for models that pad instead of packing.

With `same_bucket`, `StepRule` chooses the bucket of the next batch, the same one in all lanes. The cost of a batch is
the number of its bucket. A lane without a batch of the chosen bucket mostly yields a batch of a shorter bucket, so that
other ranks seldom wait for this lane.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any, ClassVar, TypeAlias

import msgspec

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.batcher import EncoderBatches
from savable_pipeline.stages.chunked_stage import chunked, value_of
from savable_pipeline.stages.item_buffer import ItemBuffer
from savable_pipeline.stages.item_ref import Element, ItemRef
from savable_pipeline.stages.skipped_samples import SourceCounts
from savable_pipeline.stages.stage import ItemStage, State, parse_state
from savable_pipeline.stages.stage_settings import SettingRule, check_function, function_settings
from savable_pipeline.stages.step_rule import StepRule
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

Group: TypeAlias = Any  # an int, a str, None, or a tuple of these
BucketKey: TypeAlias = tuple[Group, int]  # a group, and the number of a bucket of this group
BatchSize: TypeAlias = int | Sequence[int]  # items per batch: one number for all buckets, or one for each


class BucketSizes:
    """The sizes of batches of a `BucketBatcher`.

    Without `bounds`, each group has one bucket, for items of any length. Raises ValueError for invalid arguments.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        size: BatchSize | Mapping[Group, BatchSize] | Callable[[Group], int] | None,
        max_tokens: int | None,
        *,
        grouped: bool,
    ) -> None:
        self._size_argument, self._max_tokens, self._grouped = size, max_tokens, grouped
        self.bounds = [index(bound) for bound in bounds]
        if any(lower >= upper for lower, upper in pairwise([0, *self.bounds])) or not (self.bounds or grouped):
            raise ValueError(f"BucketBatcher: bounds must be positive lengths in ascending order, not {bounds}")
        if (size is None) == (max_tokens is None):
            raise ValueError("BucketBatcher: pass size or max_tokens, not both")
        if (isinstance(size, Mapping) or callable(size)) and not grouped:
            raise ValueError("BucketBatcher: a size per group needs group=")
        self.buckets = len(self.bounds) or 1
        self._sizes_by_group: dict[Group, list[int]] = {}
        self._common_sizes: list[int] = []  # the size for each bucket, if all groups have the same
        if max_tokens is not None:
            self._common_sizes = self._sizes_by_tokens(max_tokens)
        elif isinstance(size, Mapping):
            self._sizes_by_group = {plain_group(group): self._per_bucket(of_group) for group, of_group in size.items()}
        elif size is not None and not callable(size):
            self._common_sizes = self._per_bucket(size)

    def _sizes_by_tokens(self, max_tokens: int) -> list[int]:
        """Return for each bucket how many items of its greatest length fit into `max_tokens`."""
        if not self.bounds:
            raise ValueError("BucketBatcher: max_tokens needs bounds")
        if max_tokens < self.bounds[-1]:
            raise ValueError(
                f"BucketBatcher: max_tokens={max_tokens} must be at least the last bound, {self.bounds[-1]}"
            )
        return [max_tokens // bound for bound in self.bounds]

    def _per_bucket(self, size: BatchSize) -> list[int]:
        """Return the size of a batch for each bucket. Raises ValueError for an invalid `size`."""
        sizes = [index(each) for each in size] if isinstance(size, Sequence) else [index(size)] * self.buckets
        if len(sizes) != self.buckets:
            raise ValueError(f"BucketBatcher: pass one size per bucket, {self.buckets}, not {len(sizes)}: {size}")
        if min(sizes) < 1:
            raise ValueError(f"BucketBatcher: size must be at least 1, not {size}")
        return sizes

    def of(self, group: Group, bucket: int) -> int:
        """Return the number of items in a batch of this bucket.

        Raises ValueError for a group without a size.
        """
        if self._common_sizes:
            return self._common_sizes[bucket]
        if callable(self._size_argument):
            return self._per_bucket(self._size_argument(group))[bucket]
        if group not in self._sizes_by_group:
            known = ", ".join(map(repr, self._sizes_by_group))
            raise ValueError(f"group {group!r} has no size. Add one. Sizes exist for {known}.")
        return self._sizes_by_group[group][bucket]

    def checked_group(self, group: Any) -> Group:
        """Return a group as the plain value that a state has.

        Raises ValueError if it is not a group, or has no size.
        """
        plain = plain_group(group)
        self.of(plain, 0)
        return plain

    def settings(self) -> dict[str, Any]:
        """Return the arguments as settings of the stage."""
        size: Any = self._size_argument
        if callable(size):
            return {"bounds": self.bounds, "max_tokens": None, **function_settings("size", size)}
        # sorted, because the order does not matter; a list, because keys need not be strings
        if isinstance(size, Mapping):
            size = sorted(([plain_group(group), each] for group, each in size.items()), key=repr)
        return {"bounds": self.bounds, "size": size, "max_tokens": self._max_tokens}

    def saved(self, keys: Sequence[tuple[Any, int]] | None, count: int) -> list[BucketKey]:
        """Return the keys of the `count` buckets of a state.

        Raises `CheckpointMismatchError` if this stage has other buckets.
        """
        if not self._grouped and keys is None and count == self.buckets:
            return [(None, number) for number in range(count)]
        if not self._grouped or keys is None or len(keys) != count:
            raise CheckpointMismatchError(
                f"BucketBatcher: the state has {count} buckets. Use the group= and bounds= of the saved run."
            )
        return [self.saved_bucket(group, number) for group, number in keys]

    def saved_bucket(self, group: Any, number: int) -> BucketKey:
        """Return the key of a bucket of a state.

        Raises `CheckpointMismatchError` if this stage has no such bucket.
        """
        problem = f"BucketBatcher(bounds={self.bounds}): the state has a bucket {number}"
        try:
            plain = self.checked_group(group)
        except ValueError as error:
            raise CheckpointMismatchError(f"{problem}, and {error}") from error
        if not 0 <= number < self.buckets:
            raise CheckpointMismatchError(f"{problem}. Use the bounds= of the saved run.")
        return plain, number


def plain_group(group: Any) -> Group:
    """Return a group as a plain value.

    Raises ValueError unless it is an int, a str, None, or a tuple of these.
    """
    if group is None:
        return None
    if isinstance(group, str):
        # an enum of str becomes a plain str, because groups must sort in the same order after a restore
        return str.__str__(group)
    if isinstance(group, list | tuple):
        return tuple(plain_group(each) for each in group)
    try:
        return index(group)
    except TypeError:
        raise ValueError(f"a group must be an int, a str, None, or a tuple of these, not {group!r}") from None


class _BucketState(msgspec.Struct):
    buckets: list[list[Any]]
    taken: Any
    count: SavedCount
    source: dict[str, Any]
    keys: list[tuple[Any, int]] | None = None
    first: Any = None
    past: bytes = b""


class BucketBatcher(EncoderBatches):
    """Batches of items of similar length, or of one group.

    A batch is `encoder.batch(items, rng)` of one bucket's items.

    A bucket with enough items yields a batch. At the end of a finite source each bucket yields its remaining items, the
    shortest bucket first. With `SavableLoader(tail="pad")` a batch has as many rows as a full one of its bucket and, in
    addition to the encoder's keys, "valid": bool (rows,), False for padding rows. Padding rows repeat an item.

    With `same_bucket` the ranks of a step mostly get batches of the same bucket, without communication. Each lane holds
    full batches, and a random number that is equal in all lanes chooses the bucket. If the lane has no full batch of
    this bucket, it mostly yields one of the nearest shorter bucket that has one.

    Args:
        source: A stage of items.
        bounds: The greatest length of each bucket, in tokens, ascending: [64, 256] makes buckets of 0 … 64 and 65 …
            256. Longer items are dropped and counted. Without bounds there is one bucket for items of any length.
        size: The number of items of a batch; or a list with a size for each bucket; or a mapping from each group to
            either; or a function of the group.
        max_tokens: Instead of `size`: as many items as fit when each is padded to the bucket's bound.
        group: Only items of one group share a batch. It is a function of an item, or the name of a method of the
            encoder, which returns an int, a str, None or a tuple of these, and depends only on the item. The
            fingerprint has the function's name, or the `settings()` of a callable object.
        drop_last: Drop the remaining items at the end. None: False.
        same_bucket: Whether the ranks of a step should get batches of the same bucket. Default: False.
        candidates: The full batches that a lane holds for `same_bucket`: 4 at first, then one more each batch.
        encoder: Measures and combines items. None: the encoder upstream.

    Raises:
        ValueError: A setting is wrong, or the stage has `same_bucket` and is in a branch of a `Blend`.
        EncodeError: `encoder.length`, `encoder.batch` or `group` raised, a group has no size, or very many items in a
            row were dropped.
        CheckpointMismatchError: An item that is rebuilt after a resume belongs to another bucket.

    Example:
        >>> class Captions(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return "a" * (sample.json()["id"] % 4)
        ...     def odd(self, item):
        ...         return len(item) % 2
        ...     def batch(self, items, rng):
        ...         return items
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Captions())
        >>> batches = custom.BucketBatcher(items, bounds=[1, 3], size=2)
        >>> next(batches), next(batches)
        (['', 'a'], ['aa', 'aaa'])
        >>> batches = custom.BucketBatcher(items, group="odd", size={0: 2, 1: 3})
        >>> next(batches), next(batches)
        (['', 'aa'], ['a', 'aaa', 'a'])
    """

    setting_rules: ClassVar[Mapping[str, SettingRule]] = {"candidates": SettingRule(may_differ_with=("same_bucket",))}

    def __init__(
        self,
        source: ItemStage,
        *,
        bounds: Sequence[int] = (),
        size: BatchSize | Mapping[Group, BatchSize] | Callable[[Group], int] | None = None,
        max_tokens: int | None = None,
        group: Callable[[Any], Group] | str | None = None,
        drop_last: bool | None = None,
        same_bucket: bool = False,
        candidates: int = 32,
        encoder: TaskEncoder | None = None,
    ) -> None:
        self._check_source(source, ItemStage)
        super().__init__(source, drop_last=drop_last, encoder=encoder)
        self._sizes = BucketSizes(bounds, source.lane.own(size), max_tokens, grouped=group is not None)
        self.bounds = self._sizes.bounds
        self.size, self.max_tokens = size, max_tokens
        self.group = source.lane.own(group)
        if isinstance(group, str) and not callable(getattr(self._calls.encoder, group, None)):
            raise ValueError(
                f"BucketBatcher: {self._calls.encoder_name} has no method {group!r}. Add it, or change group=."
            )
        if group is not None and not isinstance(group, str):
            check_function("BucketBatcher", "group", group)
        # buckets with items, in the order in which they got their first item
        self._buckets: dict[BucketKey, ItemBuffer] = {}
        self._taken = ItemBuffer(self)  # at most one item, which was taken from the source and is in no bucket yet
        self._by_source = SourceCounts(self.counts)
        self.same_bucket, self.candidates = same_bucket, candidates
        self.in_step = "BucketBatcher(same_bucket=True)" if same_bucket else ""
        rule = StepRule("BucketBatcher", self.lane, candidates=candidates, weight=1, costlier=16)  # checks `candidates`
        self._rule = rule if same_bucket else None

    def _due(self) -> tuple[list[Any], list[ItemRef], int] | None:
        if (key := self._next_bucket()) is None:
            return None
        buffer, size = self._buckets[key], self._size(key)
        refs, self._due_key = buffer.refs(size), key
        self._note_first(refs[0])
        return buffer.values(size, skips=self.lane.skips), refs, size

    def _rows_of(self, item: Any) -> int:
        group, bucket = self._key(Element((), item))
        return 0 if bucket == self._sizes.buckets else self._size((group, bucket))

    def _next_bucket(self) -> BucketKey | None:
        """Return the bucket of the next batch after building its items, or None at the end."""
        while (key := self._fill_buckets()) is not None:
            if self._build_missing(key):
                return key
        return None

    def _build_missing(self, key: BucketKey) -> bool:
        """Build the missing items of a bucket's next batch.

        Returns False as soon as an item is lost or moves to another bucket, because another item then follows.
        """
        buffer = self._buckets[key]
        due = range(min(self._size(key), len(buffer)))
        return buffer.built == len(buffer) or all(self._is_skipped(buffer[i]) or self._build_item(key, i) for i in due)

    def _is_skipped(self, element: Element) -> bool:
        """Return whether an element need not be built, because the lane skips its batch and the element is not lost."""
        return self.lane.skips and chunked(self.source).is_certain(element.ref)

    def _count_yielded(self, refs: list[ItemRef]) -> None:
        """Count a yielded batch, drop its items, and move its bucket behind the others."""
        super()._count_yielded(refs)
        if refs:
            if self._rule is not None:
                self._rule.count_yielded(_cost(self._due_key))
            buffer = self._buckets.pop(self._due_key)
            buffer.drop(len(refs))
            if buffer:
                self._buckets[self._due_key] = buffer

    def more(self) -> bool:
        """Return whether another batch follows. To find out, this fills a bucket."""
        return self._next_bucket() is not None

    def _fill_buckets(self) -> BucketKey | None:
        """Take items until enough batches are full. Returns the bucket of the next batch, or None at the end."""
        wanted = 1 if self._rule is None else self._rule.room  # number of full batches
        full = {key: batches for key, buffer in self._buckets.items() if (batches := len(buffer) // self._size(key))}
        count = sum(full.values())
        while count < wanted and (self._taken or self._taken.fill(1)):
            if (key := self._put_taken()) is not None and len(self._buckets[key]) % self._size(key) == 0:
                full[key] = full.get(key, 0) + 1
                count += 1
        if full and self._rule is not None:
            keys = sorted([key for key, batches in full.items() for _ in range(batches)], key=_cost)
            return keys[self._rule.choose(list(map(_cost, keys)), [self._rule.count] * len(keys))]
        due = full or ([] if self.drop_last else self._buckets)
        return min(due, key=lambda key: key[1], default=None)  # by number: the shortest bucket

    def _size(self, key: BucketKey) -> int:
        return self._sizes.of(*key)

    def _put_taken(self) -> BucketKey | None:
        """Put the taken item into its bucket, and return the bucket, or None if the item is dropped."""
        element = self._taken[0]
        if (key := self._key_unbuilt(element)) is None:
            is_lost = type(value_of(self.source, element)) is Skip  # a stage upstream has counted it
            key = None if is_lost else self._key(element)
        if key is not None and key[1] == self._sizes.buckets:  # no bucket has this number: the item is too long
            self._count_too_long(element.ref)
            key = None
        elif key is not None:
            self._by_source.count_item(element.ref)
            self._put(key, element.value, element.ref)
        self._taken.drop(1)
        return key

    def _key_unbuilt(self, element: Element) -> BucketKey | None:
        """Return the bucket of an element that the lane skips, or None if it must be built to know the bucket."""
        if self.group is not None or element.is_built or not self._is_skipped(element):
            return None
        if not self.bounds:
            return None, 0
        if element.sizes is None or type(element.ref[1]) is not int:
            return None
        return None, bisect_left(self.bounds, element.sizes[0][0])

    def _key(self, element: Element) -> BucketKey:
        """Return the bucket of a built item. If it is too long, the number is that after the last bucket.

        Raises `EncodeError` if the encoder or `group` raises, or if the group has no size.
        """
        bucket = bisect_left(self.bounds, self._calls.length(element, least=0)) if self.bounds else 0
        group = None if self.group is None else self._calls.value(self.group, element.value, self._sizes.checked_group)
        return group, bucket

    def _count_too_long(self, ref: ItemRef) -> None:
        """Count an item that is too long. Raises `EncodeError` for very many in a row."""
        row = self._by_source.count_dropped("longer than the last bound", ref)
        if row >= self.info.max_empty:
            raise EncodeError(
                f"BucketBatcher: {row:,} items in a row were longer than the last bound, {self.bounds[-1]}. Raise it."
            )

    def _build_item(self, key: BucketKey, i: int) -> bool:
        """Build item `i` of a bucket. Returns False if it is lost, or is a pack that lost items and moved away."""
        buffer = self._buckets[key]
        element = buffer[i]
        if element.is_built:
            return True
        copy = Element(element.ref, sizes=element.sizes)
        chunked(self.source).make([copy])
        item, ref = copy.value, copy.ref
        new_key = None if type(item) is Skip else self._key(copy)  # a `Skip` was counted upstream
        if new_key == key:
            element.value, element.ref, element.sizes = item, ref, copy.sizes
            return True
        if new_key is not None and not isinstance(ref[-1], tuple):
            raise CheckpointMismatchError(
                f"BucketBatcher: an item moved from {_shown(key)} to {_shown(new_key)} since the state was saved. "
                f"Use the saved data and {self._calls.encoder_name}, which must depend on the sample and `rng` alone."
                f"\n  item {ref} of {self.lane}"
            )
        buffer.remove(i)
        if not buffer:
            del self._buckets[key]
        if new_key is not None:
            self._put(new_key, item, ref)
        return False

    def _put(self, key: BucketKey, item: Any, ref: ItemRef) -> None:
        """Append an item to a bucket."""
        if key not in self._buckets:
            self._buckets[key] = ItemBuffer(self)
        self._buckets[key].add([Element(ref, item)])

    def save_state(self) -> State:
        """Return the position.

        `buckets` has refs and sizes of the items in each bucket, and `count` is the number of yielded batches.

        `taken` has ref and sizes of an item that is in no bucket because of an error. If there are groups, `keys` has
        (group, number) of each bucket. If batches are padded, `first` is the ref of the lane's first item. With
        `same_bucket`, `past` has the buckets of the last batches, 8 bytes each.
        """
        keys: list[BucketKey] = [(None, number) for number in range(self._sizes.buckets)]
        if self.group is not None:
            keys = list(self._buckets)
        state: State = {
            "buckets": [self._buckets[key].save() if key in self._buckets else [] for key in keys],
            "taken": self._taken.save(),
            "count": self._count,
            "source": self.source.save_state(),
        }
        if self._first is not None:
            state["first"] = self._first
        if self._rule is not None:
            state["past"] = self._rule.past.tobytes()
        return state if self.group is None else {**state, "keys": keys}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`.

        Buffered items are rebuilt when they are needed.
        """
        saved = parse_state(self, state, _BucketState)
        keys = self._sizes.saved(saved.keys, len(saved.buckets))
        self._restore_first(saved.first)
        self.source.restore_state(saved.source)
        self._buckets = {}
        for key, elements in zip(keys, saved.buckets, strict=True):
            buffer = ItemBuffer(self)
            buffer.restore(elements)
            if buffer:
                self._buckets[key] = buffer
        self._taken.restore(saved.taken)
        self._count = saved.count
        if self._rule is not None:
            self._rule.restore(saved.count, saved.past)

    def settings(self) -> dict[str, Any]:
        """Return every argument, and the encoder if it is not the one upstream."""
        own = self._sizes.settings()
        if self.same_bucket:
            own |= {"same_bucket": True, "candidates": self.candidates}
        if isinstance(self.group, str):
            own["group"] = self.group
        elif self.group is not None:
            own |= function_settings("group", self.group)
        return {**own, **super().settings()}


@lru_cache(maxsize=4096)
def _cost(key: BucketKey) -> int:
    """Return the cost of a batch for `StepRule`: the number of the bucket, then a hash of the group."""
    group, bucket = key
    return bucket << 32 | derive_key("group", repr(group)) >> 32


def _shown(key: BucketKey) -> str:
    """Describe a bucket in messages."""
    group, bucket = key
    return f"bucket {bucket}" if group is None else f"bucket {bucket} of the group {group!r}"
