"""`ItemBuffer`: elements that a stage has taken and not yet yielded.

refs     r3  r7  r8  r9     saved in a state
sizes    s3  s7  ·   ·      also saved if known, because later stages may depend on them
values   a   ·   b   ·      in memory, or · UNBUILT: rebuilt from the ref when it is needed
bytes    40  0   52  0      of values in memory, counted for the whole process if there is a limit

If an element can no longer be built, because its sample is now excluded or missing, its value is a `Skip`. The stage
upstream has counted it as skipped, and the caller must drop it.

The limit applies to the bytes of all values in the buffers of a process, over all lanes. A value that exceeds it is
dropped, and rebuilt when it is needed.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.containers import named_parts
from savable_pipeline.core.named_object import imported
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT, RefArray, skip_counters, tag_of
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.chunked_stage import chunked, take_elements, value_of
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.item_ref import UNBUILT, Element, ItemRef, as_ref, remaining_sizes, sample_indices
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.stage_info import REASON
from savable_pipeline.stages.task_encoder import Skip

RefsT = TypeVar("RefsT", RefArray, list[ItemRef])
_LEAVES = {int, float, str, bytes, bool, type(None)}  # types without parts
_NUMBERS = {int, float, bool}
_MEASURED_PARTS = 16  # number of parts to measure of a longer list, to estimate its size


class MemoryBudget:
    """Bytes in the buffers of all lanes of a process, over all threads."""

    def __init__(self) -> None:
        self.used = 0
        self.lock = threading.RLock()  # reentrant, because `__del__` below may run at any moment in any thread


class StageBuffer:
    """Base of buffers of elements that a stage has taken and not yet yielded.

    It has only a weak reference to the stage. A stage that is no longer used therefore frees its items, and the files
    of its source, at once. If there is a limit, the bytes of the items count in the memory budget of the process, until
    the buffer is garbage-collected.
    """

    _bytes = 0  # number of counted bytes; a class attribute, because Ctrl-C may end `__init__` before its first line
    counted = 0  # number of elements in the buffer whose bytes are counted

    def __init__(self, stage: Stage, max_bytes: int | None = None) -> None:
        self._stage, self._max_bytes = weakref.ref(stage), max_bytes
        vars(stage).setdefault("_buffers", weakref.WeakSet()).add(self)
        if max_bytes is not None:
            self._budget = stage.source.lane.shared("held items", MemoryBudget, by_threads=True)

    @property
    def _owner(self) -> Stage:
        """Return the stage that owns the buffer."""
        stage = self._stage()
        assert stage is not None, "a stage that calls its buffer is alive"
        return stage

    def count_bytes(self, elements: Sequence[Element]) -> None:
        """Count the bytes of built elements, or drop values that would exceed the limit."""
        if (limit := self._max_bytes) is None:
            return
        built = [element for element in elements if element.value is not UNBUILT]
        sizes = [size_of(element.value) or 1 for element in built]
        with self._budget.lock:
            for element, size in zip(built, sizes, strict=True):
                if self._budget.used + size > limit:
                    element.value, element.measured = UNBUILT, None
                    continue
                self._budget.used += size
                self._bytes += size
                self.counted += 1
                element.counted_bytes = size

    def release_bytes(self, elements: Iterable[Element]) -> None:
        """Subtract the bytes of these elements."""
        size = 0
        for element in elements if self._bytes else ():
            if element.counted_bytes:
                size += element.counted_bytes
                self.counted -= 1
                element.counted_bytes = 0
        if size:
            with self._budget.lock:
                self._budget.used -= size
            self._bytes -= size

    def __del__(self) -> None:
        if self._bytes:
            with self._budget.lock:
                self._budget.used -= self._bytes


class ItemBuffer(StageBuffer):
    """List of elements of `stage.source`, whose refs `stage` saves.

    The elements are items, packs or samples.

    Args:
        stage: The stage that buffers the elements. Its source rebuilds them.
        max_bytes: The most bytes of items in all such lists of a process. The value of an item beyond it is dropped,
            and rebuilt when the item is popped. Default: no limit.

    Example:
        >>> class Swapped(custom.ItemStage):  # yields items in pairs, the second one first
        ...     ref = ()
        ...     def __init__(self, source):
        ...         super().__init__(source)
        ...         self.held = custom.ItemBuffer(self)
        ...     def __next__(self):
        ...         while self.held or self.held.fill(2):
        ...             item, self.ref = self.held.pop(-1)
        ...             if type(item) is not sp.Skip:
        ...                 return item
        ...         raise StopIteration
        ...     def save_state(self):
        ...         return {"held": self.held.save(), **super().save_state()}
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
        super().__init__(stage, max_bytes)
        self._elements: list[Element] = []
        self._is_restored = False  # whether a state was restored, and `rebuild_parts` was not called since

    def __len__(self) -> int:
        return len(self._elements)

    def __getitem__(self, at: int) -> Element:
        """Return the element at a position, built or not."""
        return self._elements[at]

    @property
    def built(self) -> int:
        """Return the number of elements with values in memory."""
        return sum([1 for element in self._elements if element.value is not UNBUILT])

    def refs(self, n: int | None = None) -> list[ItemRef]:
        """Return the refs, in order.

        Args:
            n: The most refs to return, the first ones. None: all.
        """
        return [element.ref for element in self._elements[:n]]

    def save(self) -> list[tuple[ItemRef, tuple[Size, ...] | None]]:
        """Return ref and sizes of each element, in order, for `save_state`."""
        return saved_elements(self._elements)

    def restore(self, saved: Any) -> None:
        """Replace all elements by those of a saved state, without their values.

        Elements of a source that was removed in the meantime are dropped and counted.

        Args:
            saved: The result of `save()`.

        Raises:
            CheckpointMismatchError: It is not a result of `save()`.
        """
        self.drop(len(self._elements))
        self.add(restored_elements(self._owner, saved))
        self._is_restored = True

    def rebuild_parts(self) -> None:
        """After a restore, rebuild the parts of samples that fan out.

        They are rebuilt in their order, so that a sample is encoded only once for all of its parts in the buffer.
        """
        if not self._is_restored or self._owner.lane.skips:
            return
        self._is_restored = False
        # a number above 0 at the end of a ref is that of a later part of a sample
        missing = [each for each in self._elements if not each.is_built and type(each.ref[-1]) is int and each.ref[-1]]
        for element in sorted(missing, key=attrgetter("ref")):
            if type(value_of(self._owner.source, element)) is Skip:
                element.value = UNBUILT  # the `Skip` is returned again when the element is taken
                continue
            self.count_bytes([element])
            if not element.is_built:
                break

    def add(self, elements: Sequence[Element]) -> None:
        """Append elements.

        Args:
            elements: Elements that `take` of a stage returned, with or without values.
        """
        self._elements += elements
        self.count_bytes(elements)

    def fill(self, n: int) -> int:
        """Take elements from the source until `n` are buffered or it ends.

        Args:
            n: The number of elements to buffer.

        Returns:
            The number of elements taken.
        """
        source, before = self._owner.source, len(self._elements)
        while len(self._elements) < n:
            elements = take_elements(source, n - len(self._elements))
            if not elements:
                break
            self.add(elements)
        return len(self._elements) - before

    def pop(self, at: int) -> tuple[Any, ItemRef]:
        """Remove an element, and return it with its ref.

        If the source raises while it rebuilds the element, the element stays in the buffer.

        Args:
            at: The position of the element, from 0, or -1 for the last.

        Returns:
            (value, ref). A missing value is rebuilt, or is a `Skip` if that is no longer possible. The ref of a pack
            that lost items has only the remaining ones.
        """
        element = self._elements[at]
        value = value_of(self._owner.source, element)
        self.remove(at)
        return value, element.ref

    def remove(self, at: int, *, last_fills: bool = False) -> Element:
        """Remove an element and return it, built or not.

        Args:
            at: The position of the element, from 0, or -1 for the last.
            last_fills: Whether the last element takes this position. Otherwise all later ones move forward by one.
        """
        element = self._elements[at]
        if last_fills:
            self._elements[at] = self._elements[-1]
        del self._elements[-1 if last_fills else at]
        self.release_bytes([element])  # its bytes of the memory budget
        return element

    def exchange(self, slots: NDArray[np.int64], fresh: list[Element]) -> list[Element]:
        """Put fresh elements into slots in turn, and return the replaced elements.

        Args:
            slots: The positions, int64 (n,), which may repeat.
            fresh: The n new elements.
        """
        elements, removed = self._elements, []
        for slot, element in zip(slots.tolist(), fresh, strict=True):
            removed.append(elements[slot])
            elements[slot] = element
        self.release_bytes(removed)
        removed_ids = set(map(id, removed))  # if a slot repeats, `removed` also has fresh elements
        self.count_bytes([element for element in fresh if id(element) not in removed_ids])
        return removed

    def values(self, n: int, *, skips: bool = False) -> list[Any]:
        """Build the first elements together, and return their values.

        Elements that can no longer be built are removed, and later ones are built instead.

        Args:
            n: The number of values, or fewer if the buffer has fewer elements.
            skips: Whether the lane skips the batch of these values; elements that cannot be lost then remain unbuilt.
        """
        while True:
            due, source = self._elements[:n], chunked(self._owner.source)
            missing = [each for each in due if each.value is UNBUILT and not (skips and source.is_certain(each.ref))]
            source.make(missing)
            lost = {id(element) for element in due if type(element.value) is Skip}  # also found before an interruption
            if not lost:
                return [element.value for element in due]
            self._elements = [element for element in self._elements if id(element) not in lost]

    def copies(self, n: int) -> list[Element]:
        """Return built copies of the first elements. The value of a lost one is a `Skip`.

        The buffer is not changed.

        Args:
            n: The number of elements.
        """
        copies = [Element(each.ref, each.value, each.sizes, measured=each.measured) for each in self._elements[:n]]
        chunked(self._owner.source).make([each for each in copies if not each.is_built])
        return copies

    def drop(self, n: int) -> None:
        """Remove the first elements.

        Args:
            n: The number of elements.
        """
        self.release_bytes(self._elements[:n])
        del self._elements[:n]


def built_items(stage: Stage) -> int:
    """Return the number of built elements in all buffers of a stage.

    They must be rebuilt if the lane moves to another worker.
    """
    return sum([buffer.built for buffer in vars(stage).get("_buffers", ())])


def known_refs(stage: Stage, refs: RefsT) -> RefsT:
    """Return the saved refs whose source is still upstream of the stage.

    The other refs are counted as dropped. Excluded samples are removed from the refs of items and packs. They remain in
    an array of samples' refs, because they are dropped when they are encoded.
    """
    tags = stage.info.tags
    if isinstance(refs, np.ndarray):
        known = np.isin((refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64), list(tags))
        present: Any = refs if known.all() else refs[known]
    else:
        present = [ref for ref in refs if all(tag_of(index) in tags for index in sample_indices(ref))]
    if len(present) < len(refs):
        stage.counts["dropped/source removed"] += len(refs) - len(present)
    excluded = stage.info.excluded
    if excluded and not isinstance(refs, np.ndarray):
        for index in [index for ref in present for index in sample_indices(ref) if index in excluded]:
            stage.counts.update(skip_counters(REASON, index))
        present = [rest for rest in map(excluded.remaining, present) if rest is not None]
    return present  # type: ignore[no-any-return]


def saved_elements(elements: Iterable[Element]) -> list[tuple[ItemRef, tuple[Size, ...] | None]]:
    """Return ref and sizes of elements for a state.

    An element whose sizes are unknown is measured by a later stage.
    """
    return [(element.ref, element.sizes) for element in elements]


def restored_elements(stage: Stage, saved: Any) -> list[Element]:
    """Return the elements of a state that `known_refs` does not drop, without values.

    Raises `CheckpointMismatchError` if `saved` is damaged.
    """
    try:
        pairs = msgspec.convert(saved, list[tuple[Any, tuple[tuple[SavedCount, SavedCount], ...] | None]])
    except msgspec.ValidationError as error:
        raise CheckpointMismatchError(
            f"{type(stage).__name__}: the state has damaged elements ({error}). Use another copy of the checkpoint, "
            "or save with `ItemBuffer.save()`."
        ) from error
    elements = [(as_ref(ref), sizes) for ref, sizes in pairs]
    return [
        Element(rest, sizes=remaining_sizes(sizes, ref, rest))
        for ref, sizes in elements
        for rest in known_refs(stage, [ref])
    ]


def is_whole(stage: Stage, ref: ItemRef) -> bool:
    """Return whether `known_refs` returns a saved ref unchanged.

    Otherwise all samples of the ref are counted as dropped.
    """
    remaining = known_refs(stage, [ref])
    if remaining and remaining != [ref]:
        stage.counts["dropped/beside an excluded one"] += sum(1 for _ in sample_indices(remaining[0]))
    return remaining == [ref]


class RefBuffer:
    """Array of refs of samples that a stage has taken and not yet yielded."""

    def __init__(self, refs: RefArray) -> None:
        self._slots, self._filled = refs, len(refs)

    def __len__(self) -> int:
        return self._filled

    @property
    def array(self) -> RefArray:
        """Return the buffered refs in order: REF (any,)."""
        return self._slots[: self._filled]

    def save(self) -> bytes:
        """Return the refs as bytes, for `save_state`."""
        return self.array.tobytes()

    def add(self, fresh: RefArray) -> None:
        """Append refs."""
        if self._filled + len(fresh) > len(self._slots):
            more_slots = np.empty(max(len(fresh), self._filled), REF)
            self._slots = np.concatenate([self.array, more_slots])
        self._slots[self._filled : self._filled + len(fresh)] = fresh
        self._filled += len(fresh)

    def exchange(self, slots: NDArray[np.int64], fresh: RefArray) -> RefArray:
        """Put refs into slots one after the other, and return the replaced refs: REF (n,).

        If a slot repeats, the ref that was put into it first is replaced later. Slots 5 2 5 return the ref in slot 5,
        the ref in slot 2, and the first of `fresh`.
        """
        replaced, order = self._slots.take(slots), slots.argsort(kind="stable")
        ordered = slots.take(order)
        repeats = (ordered[1:] == ordered[:-1]).nonzero()[0]
        if len(repeats):
            replaced.put(order[repeats + 1], fresh.take(order[repeats]))
        self._slots.put(slots, fresh)  # of a repeated slot, NumPy keeps the last ref
        return replaced

    def remove(self, at: int, *, last_fills: bool) -> Any:
        """Remove a ref and return it. The last ref takes its position."""
        assert last_fills
        removed = self._slots[at].copy()
        self._filled -= 1
        self._slots[at] = self._slots[self._filled]
        return removed


class TakenAhead:
    """Samples or items that a stage has taken from its source, and their refs.

    For samples, `refs` is an array, REF (any,), and `opened` has the samples. For items, both are the same list of
    `Element`. `next` is the position of the first one that is not done.
    """

    def __init__(self, *, items: bool = False) -> None:
        self.refs: RefArray | list[Element] = [] if items else np.empty(0, REF)
        self.opened: list[Any] = []
        self.next = 0
        self._taken = 0

    def save(self) -> bytes | list[Any]:
        """Return the refs or elements that are not done, for `save_state`."""
        refs = self.refs[self.next :]
        return saved_elements(refs) if isinstance(refs, list) else refs.tobytes()

    @property
    def done(self) -> int:
        """Return how many samples or items are done since the lane started."""
        return self._taken - len(self.refs) + self.next

    def load(self, source: Stage, n: int, *, first: int) -> bool:
        """Take 1 to `n` samples or items from the source. Returns False at the end.

        Earlier ones before position `first` are dropped.
        """
        taken = chunked(source).take(n)
        if not len(taken):
            return False
        self._taken += len(taken)
        opened = _opened(source, taken)
        if first == len(self.refs):
            self.refs, self.opened, self.next = taken, opened, 0
        else:
            self.next -= first
            # samples only, because all items are done before more are taken
            self.refs = np.concatenate([self.refs[first:], taken])
            self.opened = self.opened[first:] + opened
        return True

    def restore(self, source: Stage, refs: RefArray | list[Element], done: int) -> None:
        """Restore `refs` that are not done, after `done` samples or items that are done."""
        self.refs, self.opened, self.next = refs, _opened(source, refs), 0
        self._taken = done + len(refs)


def _opened(source: Any, refs: RefArray | list[Element]) -> list[Any]:
    """Return the samples with these refs. Elements of items are returned themselves."""
    return refs if isinstance(refs, list) else source.open_samples(refs)


def size_of(item: Any) -> int:
    """Return an estimate of the memory that an item takes, in bytes.

    Of a long list, only some parts are measured.
    """
    kind = type(item)
    if kind in _LEAVES:  # most parts of an item are of these types, and the checks below take longer
        return sys.getsizeof(item)
    if kind is list:
        return 64 + _size_of_parts(item)
    if kind is dict:
        return 64 + 64 * len(item) + sum(map(size_of, item.values()))
    if isinstance(nbytes := getattr(item, "nbytes", None), int):  # a tensor, an array, a memoryview
        return nbytes
    if isinstance(item, Sample):
        return sys.getsizeof(item)  # parts are read on access, so they are not in memory
    if isinstance(item, list | tuple | set | frozenset):
        return 64 + _size_of_parts(list(item))
    if (fields := named_parts(item)) is not None:
        return size_of(dict(fields))
    pillow = imported("PIL.Image")  # if nothing has imported Pillow, no item is an image
    if pillow is not None and isinstance(item, pillow.Image):
        return int(item.width * item.height * len(item.getbands()))
    return 64 + size_of(vars(item)) if hasattr(item, "__dict__") else sys.getsizeof(item)


def _size_of_parts(parts: list[Any]) -> int:
    """Return an estimate of the bytes of all parts together."""
    kinds = {type(parts[0]), type(parts[-1]), type(parts[len(parts) // 2])} if parts else _NUMBERS
    if kinds <= _NUMBERS:
        return 32 * len(parts)  # an estimate for any number, including its pointer
    step = len(parts) // _MEASURED_PARTS
    chosen = parts[: step * _MEASURED_PARTS : step] if step > 1 else parts
    measure = sys.getsizeof if _LEAVES.issuperset(map(type, chosen)) else size_of
    return sum(map(measure, chosen)) * len(parts) // max(1, len(chosen))
