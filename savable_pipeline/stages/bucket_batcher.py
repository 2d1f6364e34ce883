"""`BucketBatcher`: batches of items of similar length, or of one group, for models that pad instead of packing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.data.dataset.sample import skip_counters
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.bucket_sizes import BatchSize, BucketSizes, Group, plain_group
from savable_pipeline.stages.encoder_batches import EncoderBatches
from savable_pipeline.stages.held_items import HeldItems
from savable_pipeline.stages.item_ref import ItemRef, sample_indices
from savable_pipeline.stages.setting_rules import check_function, function_settings
from savable_pipeline.stages.skipped_samples import max_empty_samples
from savable_pipeline.stages.stage import ItemStage, State, parse_state
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

_Key: TypeAlias = tuple[Group, int]  # a group, and the number of the bucket in it


class _BucketState(msgspec.Struct):
    buckets: list[list[Any]]
    taken: Any
    count: SavedCount
    source: dict[str, Any]
    keys: list[tuple[Any, int]] | None = None
    first: Any = None


class BucketBatcher(EncoderBatches):
    """Yields batches of items of similar length, or of one group: `encoder.batch(items, rng)` of one bucket's items.

    A bucket with enough items yields a batch; at the end of a finite source each bucket yields its rest, the shortest
    bucket first. With `SavableLoader(tail="pad")` a batch has all rows of its bucket and, beside the encoder's keys,
    "valid": bool (rows,), False for filler rows, which repeat an item.

    Args:
        source: A stage of items.
        bounds: The greatest length of each bucket, in tokens, ascending: [64, 256] makes buckets of 0 … 64 and 65 …
            256. Longer items are left out and counted. Without bounds there is one bucket, of any length.
        size: Items of a batch; or a list with one size for each bucket; or a mapping from each group to either; or a
            function of the group.
        max_tokens: In place of `size`: as many items as fit when each is padded to the bucket's bound.
        group: Only items of one group share a batch: a function of an item, or the name of a method of the encoder,
            that returns an int, a str, None or a tuple of these, and depends on the item alone. The fingerprint keeps
            the function's name, and `settings()` of an object.
        drop_last: Drop these rests. None: False.
        encoder: Measures items and makes the batches. None: the encoder upstream.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: `encoder.length`, `encoder.batch` or `group` raised, a group has no size, or very many items in a
            row were left out.
        CheckpointMismatchError: An item made again after a resume belongs to another bucket.

    Example:
        >>> class Captions(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return "a" * (sample.json()["id"] % 4)
        ...     def odd(self, item):
        ...         return len(item) % 2
        ...     def batch(self, items, rng):
        ...         return items
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Captions())
        >>> batches = sp.BucketBatcher(items, bounds=[1, 3], size=2)
        >>> next(batches), next(batches)
        (['', 'a'], ['aa', 'aaa'])
        >>> batches = sp.BucketBatcher(items, group="odd", size={0: 2, 1: 3})
        >>> next(batches), next(batches)
        (['', 'aa'], ['a', 'aaa', 'a'])
    """

    def __init__(
        self,
        source: ItemStage,
        *,
        bounds: Sequence[int] = (),
        size: BatchSize | Mapping[Group, BatchSize] | Callable[[Group], int] | None = None,
        max_tokens: int | None = None,
        group: Callable[[Any], Group] | str | None = None,
        drop_last: bool | None = None,
        encoder: TaskEncoder | None = None,
    ) -> None:
        self._sizes = BucketSizes(bounds, size, max_tokens, grouped=group is not None)
        self._check_source(source, ItemStage)
        super().__init__(source, drop_last=drop_last, encoder=encoder)
        self.bounds = self._sizes.bounds
        self.size = size
        self.max_tokens = max_tokens
        self.group = group
        self._check_group(group)
        self._buckets: dict[_Key, HeldItems] = {}  # those that hold items, in the order in which they began
        self._taken = HeldItems(self)  # an item of the source that is in no bucket yet
        self._row_of_skips = 0

    def _check_group(self, group: Callable[[Any], Group] | str | None) -> None:
        if isinstance(group, str) and not callable(getattr(self._calls.encoder, group, None)):
            raise ValueError(f"BucketBatcher: {self._calls.encoder_name} has no method {group!r}, which group= names")
        if group is not None and not isinstance(group, str):
            check_function("BucketBatcher", "group", group)

    @property
    def held_items(self) -> int:
        """Made items that wait for their batch."""
        return sum(held.made for held in self._buckets.values())

    def __next__(self) -> Any:
        key = self._due()
        held, size = self._buckets[key], self._size(key)
        batch = self._given(held.ready(size), held.refs()[:size], size)
        self._let_go(key)
        return batch

    def pass_over(self) -> None:
        """Skip the next batch without calling `encoder.batch`. Raises StopIteration at the end."""
        self._let_go(self._due())

    def _due(self) -> _Key:
        """The bucket of the next batch, whose items are made. Raises StopIteration if there is none."""
        key = self._next_bucket()
        if key is None:
            raise StopIteration
        self._note_first(self._buckets[key].refs()[0])
        return key

    def _rows_of(self, item: Any) -> int:
        key = self._key(item)
        return 0 if key[1] == self._sizes.buckets else self._size(key)

    def _next_bucket(self) -> _Key | None:
        while (key := self._fill()) is not None:
            if self._make_items(key):
                return key
        return None

    def _make_items(self, key: _Key) -> bool:
        """Make the missing items of a bucket's next batch; False if one is in the bucket no more."""
        held = self._buckets[key]
        due = range(min(self._size(key), len(held)))
        return held.made == len(held) or all(self._make(key, i) for i in due)

    def _let_go(self, key: _Key) -> None:
        held, size = self._buckets.pop(key), self._size(key)
        self._gave(held.refs()[:size])
        held.drop(size)
        if held:  # of a state that was saved with a larger size
            self._buckets[key] = held

    def more(self) -> bool:
        """Whether another batch will come, found by filling a bucket."""
        return self._next_bucket() is not None

    def _fill(self) -> _Key | None:
        """The bucket of the next batch; None at the end."""
        full = [key for key, held in self._buckets.items() if len(held) >= self._size(key)]
        if full:
            return min(full, key=_number)
        while self._taken or self._taken.fill(1):
            placed = self._place()
            if placed is not None and len(self._buckets[placed]) >= self._size(placed):
                return placed
        return None if self.drop_last else min(self._buckets, key=_number, default=None)

    def _size(self, key: _Key) -> int:
        return self._sizes.of(*key)

    def _place(self) -> _Key | None:
        """Put the item that was taken into its bucket, and return the bucket; None if the item is left out."""
        item, ref = self._taken.look(0)
        key = None if type(item) is Skip else self._key(item)  # the stage upstream has counted a `Skip`
        if key is not None and key[1] == self._sizes.buckets:
            self._skipped(ref)
            key = None
        elif key is not None:
            self._row_of_skips = 0
            self._put(key, item, ref)
        self._taken.drop(1)
        return key

    def _key(self, item: Any) -> _Key:
        """The group and bucket of an item; the bucket `len(self.bounds)` if it is too long.

        Raises `EncodeError` if the encoder or `group` does, or the group has no size.
        """
        bucket = bisect_left(self.bounds, self._calls.length(item, least=0)) if self.bounds else 0
        group = None if self.group is None else self._calls.value(self.group, item, self._checked_group)
        return group, bucket

    def _checked_group(self, group: Any) -> Group:
        plain = plain_group(group)
        self._sizes.of(plain, 0)
        return plain

    def _skipped(self, ref: ItemRef) -> None:
        self.counts.update(skip_counters("longer than the last bound", next(sample_indices(ref))))
        self._row_of_skips += 1
        if self._row_of_skips >= max_empty_samples(self.info.population):
            raise EncodeError(
                f"BucketBatcher(bounds={self.bounds}): {self._row_of_skips} items in a row were longer than the last; "
                "this data will never make a batch"
            )

    def _make(self, key: _Key, i: int) -> bool:
        """Make the item `i` of a bucket; False if it is lost, or a pack that lost an item and is of another bucket."""
        held = self._buckets[key]
        item, ref = held.look(i)
        found = None if type(item) is Skip else self._key(item)  # the stage upstream has counted a `Skip`
        if found == key:
            held.keep(i, item, ref)
            return True
        if found is not None and not isinstance(ref[-1], tuple):
            raise CheckpointMismatchError(
                f"BucketBatcher of {self.lane}: the item {ref} was in {_shown(key)}; made again it belongs to "
                f"{_shown(found)}: {self._calls.encoder_name} or the data changed since the state was saved, or its "
                "result depends on more than the sample and `rng`"
            )
        held.remove(i)
        if not held:
            del self._buckets[key]
        if found is not None:
            self._put(found, item, ref)
        return False

    def _put(self, key: _Key, item: Any, ref: ItemRef) -> None:
        self._buckets.setdefault(key, HeldItems(self)).add([item], [ref])

    def save_state(self) -> State:
        """`buckets`: the refs of the items in each bucket; `count`: batches given so far.

        `taken`: the ref of an item that an error kept from its bucket; else None. With groups `keys`: group and number
        of each bucket; where batches are padded `first`: the ref of the first item.
        """
        keys: list[_Key] = [(None, number) for number in range(self._sizes.buckets)]
        if self.group is not None:
            keys = list(self._buckets)
        state: State = {
            "buckets": [self._buckets[key].refs() if key in self._buckets else [] for key in keys],
            "taken": next(iter(self._taken.refs()), None),
            "count": self._count,
            "source": self.source.save_state(),
        }
        if self._first is not None:
            state["first"] = self._first
        return state if self.group is None else {**state, "keys": keys}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; held items are made again when they are needed."""
        saved = parse_state(self, state, _BucketState)
        keys = self._saved_keys(saved)
        self._restore_first(saved.first)
        self.source.restore_state(saved.source)
        self._buckets = {}
        for key, refs in zip(keys, saved.buckets, strict=True):
            held = HeldItems(self)
            held.restore(refs)
            if held:
                self._buckets[key] = held
        self._taken.restore([] if saved.taken is None else [saved.taken])
        self._count = saved.count

    def _saved_keys(self, saved: _BucketState) -> list[_Key]:
        """The group and the number of each bucket of a state. Raises `CheckpointMismatchError` if they are not ours."""
        wrong = f"BucketBatcher(bounds={self.bounds}): the state has {len(saved.buckets)} buckets"
        if self.group is None and saved.keys is None and len(saved.buckets) == self._sizes.buckets:
            return [(None, number) for number in range(self._sizes.buckets)]
        if self.group is None or saved.keys is None or len(saved.keys) != len(saved.buckets):
            raise CheckpointMismatchError(f"{wrong}; was it saved with another group=?")
        try:
            keys = [(self._checked_group(group), number) for group, number in saved.keys]
        except ValueError as error:
            raise CheckpointMismatchError(f"{wrong}, and {error}") from error
        if any(not 0 <= number < self._sizes.buckets for _, number in keys):
            raise CheckpointMismatchError(f"{wrong} with other bounds")
        return keys

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        size = self.size
        own: dict[str, Any] = {"bounds": self.bounds, "size": size, "max_tokens": self.max_tokens}
        if isinstance(size, Mapping):  # whose order does not matter, and whose keys need not be texts
            own["size"] = sorted(([plain_group(group), each] for group, each in size.items()), key=repr)
        elif callable(size):
            del own["size"]
            own |= function_settings("size", size)
        if isinstance(self.group, str):
            own["group"] = self.group
        elif self.group is not None:
            own |= function_settings("group", self.group)
        return {**own, **super().settings()}


def _number(key: _Key) -> int:
    return key[1]


def _shown(key: _Key) -> str:
    return f"bucket {key[1]}" if key[0] is None else f"bucket {key[1]} of the group {key[0]!r}"
