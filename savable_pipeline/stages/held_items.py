"""`HeldItems`: the elements that a stage has taken from its source and not yet returned, each held by its ref.

refs     r3  r7  r8  r9     all that a state keeps of them
items    a   ·   b   ·      in memory, or · MISSING: made again from the ref when it is needed
bytes    40  0   52  0      of those in memory, counted for the whole process, where there is a limit

An element that can no longer be made, since its sample is now excluded or gone, is returned as a `Skip`, which the
stage upstream has counted: leave it out.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

from savable_pipeline.data.dataset.ref import TAG_SHIFT, RefArray, skip_counters, tag_of
from savable_pipeline.stages.capabilities import LosesParts
from savable_pipeline.stages.excluded_samples import REASON
from savable_pipeline.stages.item_ref import MISSING, ItemRef, as_ref, sample_indices
from savable_pipeline.stages.memory_budget import BudgetShare, MemoryBudget, size_of
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.task_encoder import Skip

RefsT = TypeVar("RefsT", RefArray, list[ItemRef])


class HeldItems:
    """A list of elements of `stage.source`: items, packs or samples, whose refs `stage` saves.

    Args:
        stage: The stage that holds them; its source makes them again.
        max_bytes: Limit in bytes on the items that all such lists of a process hold together. An item beyond it is not
            kept, but made again when it is taken. Default: no limit.

    Example:
        >>> class Swapped(custom.ItemStage):  # yields items in pairs, the second one first
        ...     ref = ()
        ...     def __init__(self, source):
        ...         super().__init__(source)
        ...         self.held = custom.HeldItems(self)
        ...     def __next__(self):
        ...         while self.held or self.held.fill(2):
        ...             item, self.ref = self.held.take(-1)
        ...             if type(item) is not sp.Skip:
        ...                 return item
        ...         raise StopIteration
        ...     def save_state(self):
        ...         return {"held": self.held.refs(), **super().save_state()}
        ...     def restore_state(self, state):
        ...         super().restore_state(state)
        ...         self.held.restore(state["held"])
        >>> class Ids(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> swapped = Swapped(sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Ids()))
        >>> [next(swapped) for _ in range(4)]
        [1, 0, 3, 2]
    """

    def __init__(self, stage: Stage, *, max_bytes: int | None = None) -> None:
        # Weak: a stage that is let go of frees its items and its source's files at once.
        self._stage = weakref.ref(stage)
        self._items: list[Any] = []
        self._refs: list[ItemRef] = []
        self._bytes: list[int] = []  # of those in memory, where there is a limit
        self._made = 0
        self._share: BudgetShare | None = None
        if max_bytes is not None:
            budget = stage.source.lane.shared("held items", MemoryBudget, by_threads=True)
            self._share = BudgetShare(budget, max_bytes=max_bytes)

    @property
    def _holder(self) -> Stage:
        stage = self._stage()
        assert stage is not None, "a stage lives as long as it asks"
        return stage

    @property
    def _source(self) -> Stage:
        return self._holder.source

    def __len__(self) -> int:
        return len(self._refs)

    @property
    def made(self) -> int:
        """The number of elements in memory."""
        return self._made

    def refs(self) -> list[ItemRef]:
        """Return the refs, in order: for `save_state`."""
        return list(self._refs)

    def restore(self, refs: Sequence[Any]) -> None:
        """Hold the elements of a saved state, none of them made, and no others.

        Elements of a source that was removed since are left out, and counted.

        Args:
            refs: What `refs()` returned.
        """
        self.drop(len(self._refs))
        self.hold_refs(known_refs(self._holder, list(map(as_ref, refs))))

    def hold_refs(self, refs: Sequence[ItemRef]) -> None:
        """Hold more elements, made when they are needed.

        Args:
            refs: Their refs.
        """
        self.add([MISSING] * len(refs), refs)

    def add(self, items: Sequence[Any], refs: Sequence[ItemRef]) -> None:
        """Hold more elements, behind the others.

        Args:
            items: The elements; one may be `MISSING`.
            refs: The ref of each.
        """
        self._refs += refs
        for item in items:
            self._items.append(MISSING)
            self._bytes.append(0)
            if item is not MISSING:
                self._keep(-1, item)

    def _add_made(self, items: Sequence[Any], refs: Sequence[ItemRef]) -> None:
        """The same with items that are all there: without a limit in few steps, as a batch of many needs."""
        if self._share is not None:
            self.add(items, refs)
            return
        self._refs += refs
        self._items += items
        self._bytes += [0] * len(items)
        self._made += len(items)

    def fill(self, n: int) -> int:
        """Take elements from the source until `n` are held or it ends.

        Args:
            n: How many to hold.

        Returns:
            The number of elements taken.
        """
        before = len(self._refs)
        while len(self._refs) < n:
            items, refs = self._source.take(n - len(self._refs))
            if not items:
                break
            self._add_made(items, refs)
        return len(self._refs) - before

    def look(self, at: int) -> tuple[Any, ItemRef]:
        """Return an element and its ref, without changing what is held.

        Args:
            at: Its place, from 0, or -1 for the last.

        Returns:
            The element, made if it is missing, or a `Skip` if it can no longer be made; and its ref, of the parts that
            are left: a pack may have lost items.
        """
        item, ref = self._items[at], self._refs[at]
        return left_of(self._source, ref) if item is MISSING else (item, ref)

    def take(self, at: int, *, last_fills: bool = False) -> tuple[Any, ItemRef]:
        """Return an element and its ref, as `look`, and remove it. If the source raises, it is still held.

        Args:
            at: Its place, from 0, or -1 for the last.
            last_fills: Put the last element in its place, instead of moving up those behind it.
        """
        found = self.look(at)
        self.remove(at, last_fills=last_fills)
        return found

    def remove(self, at: int, *, last_fills: bool = False) -> None:
        """Remove an element.

        Args:
            at: Its place, from 0, or -1 for the last.
            last_fills: Put the last element in its place, instead of moving up those behind it.
        """
        self._let_go(at, at + 1 if at != -1 else None)
        columns: tuple[list[Any], ...] = (self._items, self._refs, self._bytes)
        for column in columns:
            if last_fills:
                column[at] = column[-1]
            del column[-1 if last_fills else at]

    def _let_go(self, begin: int, end: int | None) -> None:
        """Subtract these elements from the count of those in memory."""
        if self._share is None and self._made == len(self._items):
            self._made -= len(self._items[begin:end])
            return
        for place, item in enumerate(self._items[begin:end]):
            if item is not MISSING:
                self._made -= 1
                if self._share is not None:
                    self._share.release(self._bytes[begin + place])

    def ready(self, n: int) -> list[Any]:
        """Return the first items, made; elements that can no longer be made are removed.

        Args:
            n: How many; fewer are returned if fewer are held.
        """
        if self._made == len(self._refs):
            return self._items[:n]
        made: list[Any] = []
        while (at := len(made)) < min(n, len(self._refs)):
            item, ref = self.look(at)
            if type(item) is Skip:
                self.remove(at)
                continue
            self.keep(at, item, ref)
            made.append(item)
        return made

    def keep(self, at: int, item: Any, ref: ItemRef) -> None:
        """Keep an element that `look` has made, in its place, as far as the limit allows it.

        Args:
            at: Its place.
            item: The element.
            ref: Its ref, as `look` returned it.
        """
        if self._items[at] is MISSING:
            self._refs[at] = ref
            self._keep(at, item)

    def _keep(self, at: int, item: Any) -> None:
        if self._share is not None:
            item_bytes = size_of(item)
            if not self._share.hold(item_bytes):
                return
            self._bytes[at] = item_bytes
        self._items[at] = item
        self._made += 1

    def drop(self, n: int) -> None:
        """Remove the first elements.

        Args:
            n: How many.
        """
        self._let_go(0, n)
        del self._items[:n], self._refs[:n], self._bytes[:n]


def left_of(stage: Stage, ref: ItemRef) -> tuple[Any, ItemRef]:
    """The element of `stage.fetch(ref)`, and the ref of its parts: a pack may have lost items that cannot be made."""
    if hasattr(stage, "fetch_left"):
        return cast(LosesParts, stage).fetch_left(ref)
    if stage.__class__.fetch is Stage.fetch:  # by `__class__`, which sees through what times a stage
        return left_of(stage.source, ref)
    return stage.fetch(ref), ref


def known_refs(stage: Stage, refs: RefsT) -> RefsT:
    """The saved refs whose source is still upstream of the stage, which counts the others as dropped.

    Of items and packs, excluded samples are removed too; samples are left out where they are encoded.
    """
    tags = stage.info.tags
    if isinstance(refs, np.ndarray):
        known = np.isin((refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64), list(tags))
        kept: Any = refs if known.all() else refs[known]
    else:
        kept = [ref for ref in refs if all(tag_of(index) in tags for index in sample_indices(ref))]
    if len(kept) < len(refs):
        stage.counts["dropped/source removed"] += len(refs) - len(kept)
    excluded = stage.info.excluded
    if excluded and not isinstance(refs, np.ndarray):
        for index in [index for ref in kept for index in sample_indices(ref) if index in excluded]:
            stage.counts.update(skip_counters(REASON, index))
        kept = [left for left in map(excluded.left_of, kept) if left is not None]
    return kept  # type: ignore[no-any-return]


def is_whole(stage: Stage, ref: ItemRef) -> bool:
    """Whether nothing of what a saved ref names is lost, as `known_refs` says; else all of it is counted as dropped."""
    left = known_refs(stage, [ref])
    if left and left != [ref]:
        stage.counts["dropped/beside an excluded one"] += sum(1 for _ in sample_indices(left[0]))
    return left == [ref]
