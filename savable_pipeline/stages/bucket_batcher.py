"""`BucketBatcher`: batches of items of similar length or one group.

It is for models that pad instead of packing.

With `same_bucket`, all lanes give a batch of the same bucket at a time:

    all lanes share a rank for each batch      u = 0.42, 0.08, 0.91, …          drawn from the run's seed
    each divides 0 … 1 among its buckets       ├ short ┼── middle ──┼ long ┤    by the batches that came to each
    it gives a batch of the one u falls in     a bucket that holds more is a little wider

If that bucket is not full, the nearest shorter one that is takes its place, else the nearest longer one: so the other
ranks seldom wait for this one. All arithmetic is of integers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any, ClassVar, TypeAlias

import msgspec

from savable_pipeline.core.keyed_random import RANKS, SharedRanks, derive_key
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.advice import check_count
from savable_pipeline.stages.batcher import EncoderBatches
from savable_pipeline.stages.chunked_stage import is_certain, make_elements
from savable_pipeline.stages.item_buffer import ItemBuffer
from savable_pipeline.stages.item_ref import Element, ItemRef
from savable_pipeline.stages.skipped_samples import SourceCounts, max_empty_samples
from savable_pipeline.stages.stage import ItemStage, State, parse_state
from savable_pipeline.stages.stage_settings import SettingRule, check_function, function_settings
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

Group: TypeAlias = Any  # an int, a str, None, or a tuple of these
BucketKey: TypeAlias = tuple[Group, int]  # a group, and the number of the bucket in it
BatchSize: TypeAlias = int | Sequence[int]  # items of a batch: of every bucket, or of each

FIRST_FULL = 4  # full batches to buffer before the first one is yielded
STEPS = 32  # of the shared ranks
WIDER = 16  # times `candidates`: a bucket is wider by 1 / (WIDER · candidates) of all for each batch that it holds
COUNTED = 256  # times `candidates`: when so many batches have come, all counts are halved
_BATCH = 1 << 20  # parts of a batch, in which batches are counted


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
            raise ValueError(f"BucketBatcher: bounds must be positive lengths in ascending order, not {bounds}")
        if (size is None) == (max_tokens is None):
            raise ValueError("BucketBatcher: pass size or max_tokens, not both")
        if (isinstance(size, Mapping) or callable(size)) and not grouped:
            raise ValueError("BucketBatcher: a size per group needs group=")
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
            raise ValueError("BucketBatcher: max_tokens needs bounds")
        if max_tokens < self.bounds[-1]:
            raise ValueError(
                f"BucketBatcher: max_tokens={max_tokens} must be at least the last bound, {self.bounds[-1]}"
            )
        return [max_tokens // bound for bound in self.bounds]

    def _sizes(self, size: BatchSize) -> list[int]:
        sizes = [index(each) for each in size] if isinstance(size, Sequence) else [index(size)] * self.buckets
        if len(sizes) != self.buckets:
            raise ValueError(f"BucketBatcher: pass one size per bucket, {self.buckets}, not {len(sizes)}: {size}")
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
            raise ValueError(f"group {group!r} has no size. Add one. Sizes exist for {known}.")
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

    def saved(self, keys: Sequence[tuple[Any, int]] | None, count: int) -> list[BucketKey]:
        """Read the buckets of a state that has `count`.

        Raises `CheckpointMismatchError` if they are not ours.
        """
        if not self._grouped and keys is None and count == self.buckets:
            return [(None, number) for number in range(count)]
        if not self._grouped or keys is None or len(keys) != count:
            raise CheckpointMismatchError(
                f"BucketBatcher: the state has {count} buckets. Use the group= and bounds= of the saved run."
            )
        return [self.saved_bucket(group, number) for group, number in keys]

    def saved_bucket(self, group: Any, number: int) -> BucketKey:
        """A bucket of a state. Raises `CheckpointMismatchError` if it is not one of ours."""
        wrong = f"BucketBatcher(bounds={self.bounds}): the state has a bucket {number}"
        try:
            plain = self.checked_group(group)
        except ValueError as error:
            raise CheckpointMismatchError(f"{wrong}, and {error}") from error
        if not 0 <= number < self.buckets:
            raise CheckpointMismatchError(f"{wrong}. Use the bounds= of the saved run.")
        return plain, number


def plain_group(group: Any) -> Group:
    """Return a group as a state has it.

    Raises ValueError unless it is an int, a str, None, or a tuple of these.
    """
    if group is None:
        return None
    if isinstance(group, str):
        return str.__str__(group)  # of an enum, say, its value: what a state returns must sort alike
    if isinstance(group, list | tuple):
        return tuple(plain_group(each) for each in group)
    try:
        return index(group)
    except TypeError:
        raise ValueError(f"a group must be an int, a str, None, or a tuple of these, not {group!r}") from None


class BucketRule:
    """Choice of the next bucket in a lane with up to `candidates` full batches.

    `key` is the same in all lanes of a run.
    """

    def __init__(self, *, key: int, candidates: int, sizes: BucketSizes) -> None:
        self._ranks = SharedRanks(key=key, steps=STEPS)
        self._candidates, self._sizes = candidates, sizes
        self._came: dict[BucketKey, int] = {}  # items that came to each bucket
        self._total = 0  # parts of batches that these are

    def room(self, n: int) -> int:
        """Return how many full batches to buffer before batch n.

        They are few at first, so that the first batch does not wait long.
        """
        return min(self._candidates, FIRST_FULL + n)

    def came(self, bucket: BucketKey) -> None:
        """Count an item that came to a bucket."""
        self._came[bucket] = self._came.get(bucket, 0) + 1
        self._total += self._parts(bucket)
        if self._total >= COUNTED * self._candidates * _BATCH:
            self.restore([(bucket, count // 2) for bucket, count in self._came.items()])

    def _parts(self, bucket: BucketKey) -> int:
        """The parts of a batch that an item is."""
        return max(1, _BATCH // self._sizes.of(*bucket))

    def choose(self, n: int, held: Mapping[BucketKey, int], full: Collection[BucketKey]) -> BucketKey:
        """Choose the bucket of batch n among the nonempty `full`.

        `held` has the items of each bucket that has some.
        """
        widths = self._widths(held)
        wanted = self._ranks.rank(n) * sum(widths.values())
        begin, chosen = 0, None
        for bucket in sorted(widths, key=lambda bucket: (bucket[1], repr(bucket[0]))):
            if bucket in full and (chosen is None or begin * RANKS <= wanted):
                chosen = bucket
            begin += widths[bucket]
        assert chosen is not None, "a full bucket holds items"
        return chosen

    def _widths(self, held: Mapping[BucketKey, int]) -> dict[BucketKey, int]:
        """The share of each bucket that has or had items, of the sum."""
        scale = WIDER * self._candidates
        widths = {bucket: scale * count * self._parts(bucket) for bucket, count in self._came.items()}
        for bucket, count in held.items():
            widths[bucket] = widths.get(bucket, 0) + self._total * count // self._sizes.of(*bucket)
        return widths

    def counts(self) -> list[tuple[BucketKey, int]]:
        """The items that came to each bucket: for `restore`."""
        return list(self._came.items())

    def restore(self, counts: Sequence[tuple[BucketKey, int]]) -> None:
        """Continue after these."""
        self._came = {bucket: count for bucket, count in counts if count}
        self._total = sum(count * self._parts(bucket) for bucket, count in self._came.items())


class _BucketState(msgspec.Struct):
    buckets: list[list[Any]]
    taken: Any
    count: SavedCount
    source: dict[str, Any]
    keys: list[tuple[Any, int]] | None = None
    first: Any = None
    came: list[tuple[Any, int, SavedCount]] | None = None


class BucketBatcher(EncoderBatches):
    """Batches of items of similar length, or of one group.

    A batch is `encoder.batch(items, rng)` of one bucket's items.

    A bucket with enough items yields a batch; at the end of a finite source each bucket yields its rest, the shortest
    bucket first. With `SavableLoader(tail="pad")` a batch has all rows of its bucket and, beside the encoder's keys,
    "valid": bool (rows,), False for filler rows, which repeat an item.

    With `same_bucket` a step's ranks mostly take batches of the same bucket, without an exchange. Each lane holds full
    batches and gives one of the bucket that a random number, the same in all lanes, points at; where that has none,
    one of the nearest shorter bucket, else of the nearest longer one.

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
        same_bucket: Whether the ranks of a step take batches of the same bucket, as far as they have them.
        candidates: Full batches that a lane holds for that: 4 at first, then one more each batch.
        encoder: Measures items and makes the batches. None: the encoder upstream.

    Raises:
        ValueError: A setting is wrong, or the stage has `same_bucket` and is in a branch of a `Blend`.
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
        >>> batches = custom.BucketBatcher(items, bounds=[1, 3], size=2)
        >>> next(batches), next(batches)
        (['', 'a'], ['aa', 'aaa'])
        >>> batches = custom.BucketBatcher(items, group="odd", size={0: 2, 1: 3})
        >>> next(batches), next(batches)
        (['', 'aa'], ['a', 'aaa', 'a'])
    """

    setting_rules: ClassVar[Mapping[str, SettingRule]] = {"candidates": SettingRule(follows=("same_bucket",))}

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
        check_count("BucketBatcher", "candidates", candidates)
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
        self._buckets: dict[BucketKey, ItemBuffer] = {}  # those that hold items, in the order in which they began
        self._taken = ItemBuffer(self)  # an item of the source that is in no bucket yet
        self._by_source = SourceCounts(self.counts)
        self.same_bucket, self.candidates = same_bucket, candidates
        self.in_step = "BucketBatcher(same_bucket=True)" if same_bucket else ""
        key = derive_key(self.lane.seed, "same bucket", self.lane.epoch)  # of all lanes
        self._rule = BucketRule(key=key, candidates=candidates, sizes=self._sizes) if same_bucket else None

    def _due(self) -> tuple[list[Any], list[ItemRef], int] | None:
        key = self._next_bucket()
        if key is None:
            return None
        held, size = self._buckets[key], self._size(key)
        refs, self._due_key = held.refs(size), key
        self._note_first(refs[0])
        return held.values(size, skips=self.lane.skips), refs, size

    def _rows_of(self, item: Any) -> int:
        key = self._key(Element((), item))
        return 0 if key[1] == self._sizes.buckets else self._size(key)

    def _next_bucket(self) -> BucketKey | None:
        while (key := self._fill()) is not None:
            if self._make_items(key):
                return key
        return None

    def _make_items(self, key: BucketKey) -> bool:
        """Make the missing items of a bucket's next batch; False if one is in the bucket no more."""
        held = self._buckets[key]
        due = range(min(self._size(key), len(held)))
        return held.made == len(held) or all(self._is_skipped(held[i]) or self._make(key, i) for i in due)

    def _is_skipped(self, element: Element) -> bool:
        """Whether an element need not be made, since its batch is skipped and it cannot be lost."""
        return self.lane.skips and is_certain(self.source, element.ref)

    def _gave(self, refs: list[ItemRef]) -> None:
        """Drop the items of the batch, too, and move its bucket to the end."""
        super()._gave(refs)
        if refs:
            held = self._buckets.pop(self._due_key)
            held.drop(len(refs))
            if held:
                self._buckets[self._due_key] = held

    def more(self) -> bool:
        """Whether another batch will come, found by filling a bucket."""
        return self._next_bucket() is not None

    def _fill(self) -> BucketKey | None:
        """The bucket of the next batch; None at the end."""
        room = 1 if self._rule is None else self._rule.room(self._count)
        full = {key: each for key, held in self._buckets.items() if (each := len(held) // self._size(key))}
        count = sum(full.values())
        while count < room and (self._taken or self._taken.fill(1)):
            key = self._put_taken()
            if key is not None and len(self._buckets[key]) % self._size(key) == 0:
                full[key] = 1
                count += 1
        if full and self._rule is not None:
            held_items = {key: len(held) for key, held in self._buckets.items()}
            return self._rule.choose(self._count, held_items, full)
        return min(full or ([] if self.drop_last else self._buckets), key=lambda key: key[1], default=None)

    def _size(self, key: BucketKey) -> int:
        return self._sizes.of(*key)

    def _put_taken(self) -> BucketKey | None:
        """Put the item that was taken into its bucket, and return the bucket; None if the item is left out."""
        element = self._taken[0]
        key = self._key_unmade(element)
        if key is None:
            if not element.is_made:
                make_elements(self.source, [element])
            key = None if type(element.value) is Skip else self._key(element)  # a `Skip` was counted upstream
        if key is not None and key[1] == self._sizes.buckets:
            self._skipped(element.ref)
            key = None
        elif key is not None:
            self._by_source.kept_one(element.ref)
            self._put(key, element.value, element.ref)
            if self._rule is not None:
                self._rule.came(key)
        self._taken.drop(1)
        return key

    def _key_unmade(self, element: Element) -> BucketKey | None:
        """The bucket of an element that is skipped, if it is known without making it."""
        if self.group is not None or element.is_made or not self._is_skipped(element):
            return None
        if not self.bounds:
            return None, 0
        if element.sizes is None or type(element.ref[1]) is not int:
            return None
        return None, bisect_left(self.bounds, element.sizes[0][0])

    def _key(self, element: Element) -> BucketKey:
        """The group and bucket of a built item; the bucket `len(self.bounds)` if it is too long.

        Raises `EncodeError` if the encoder or `group` does, or the group has no size.
        """
        bucket = bisect_left(self.bounds, self._calls.length(element, least=0)) if self.bounds else 0
        group = None if self.group is None else self._calls.value(self.group, element.value, self._sizes.checked_group)
        return group, bucket

    def _skipped(self, ref: ItemRef) -> None:
        _, row = self._by_source.left_out("longer than the last bound", ref)
        if row >= max_empty_samples(self.info.population):
            raise EncodeError(
                f"BucketBatcher: {row:,} items in a row were longer than the last bound, {self.bounds[-1]}. Raise it."
            )

    def _make(self, key: BucketKey, i: int) -> bool:
        """Make the item `i` of a bucket; False if it is lost, or a pack that lost an item and is of another bucket."""
        held = self._buckets[key]
        element = held[i]
        if element.is_made:
            return True
        copy = Element(element.ref, sizes=element.sizes)
        make_elements(self.source, [copy])
        item, ref = copy.value, copy.ref
        found = None if type(item) is Skip else self._key(copy)  # a `Skip` was counted upstream
        if found == key:
            element.value, element.ref, element.sizes = item, ref, copy.sizes
            return True
        if found is not None and not isinstance(ref[-1], tuple):
            raise CheckpointMismatchError(
                f"BucketBatcher: an item moved from {_shown(key)} to {_shown(found)} since the state was saved. "
                f"Use the saved data and {self._calls.encoder_name}, which must depend on the sample and `rng` alone."
                f"\n  item {ref} of {self.lane}"
            )
        held.remove(i)
        if not held:
            del self._buckets[key]
        if found is not None:
            self._put(found, item, ref)
        return False

    def _put(self, key: BucketKey, item: Any, ref: ItemRef) -> None:
        self._buckets.setdefault(key, ItemBuffer(self)).add([Element(ref, item)])

    def save_state(self) -> State:
        """Return the position.

        `buckets` has refs and sizes of the items in each bucket, `count` the number of yielded batches.

        `taken`: the same of an item that an error kept from its bucket, if there is one. With groups `keys`: group and
        number of each bucket; where batches are padded `first`: the ref of the first item. With `same_bucket` `came`:
        group and number of each bucket, and the items that came to it.
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
            state["came"] = [(*key, count) for key, count in self._rule.counts()]
        return state if self.group is None else {**state, "keys": keys}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`.

        Buffered items are rebuilt when they are needed.
        """
        saved = parse_state(self, state, _BucketState)
        keys = self._sizes.saved(saved.keys, len(saved.buckets))
        came = [(self._sizes.saved_bucket(group, number), count) for group, number, count in saved.came or ()]
        self._restore_first(saved.first)
        self.source.restore_state(saved.source)
        self._buckets = {}
        for key, elements in zip(keys, saved.buckets, strict=True):
            held = ItemBuffer(self)
            held.restore(elements)
            if held:
                self._buckets[key] = held
        self._taken.restore(saved.taken)
        self._count = saved.count
        if self._rule is not None:
            self._rule.restore(came)

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        own = self._sizes.settings()
        if self.same_bucket:
            own |= {"same_bucket": True, "candidates": self.candidates}
        if isinstance(self.group, str):
            own["group"] = self.group
        elif self.group is not None:
            own |= function_settings("group", self.group)
        return {**own, **super().settings()}


def _shown(key: BucketKey) -> str:
    return f"bucket {key[1]}" if key[0] is None else f"bucket {key[1]} of the group {key[0]!r}"
