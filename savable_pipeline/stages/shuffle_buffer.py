"""`ShuffleBuffer`: yields samples or items in random order from a buffer whose state is refs alone."""

from __future__ import annotations

from functools import cached_property
from typing import Any, overload

import msgspec
import numpy as np

from savable_pipeline.core.keyed_random import below, word, words
from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.data.dataset.ref import REF, RefArray
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.held_items import HeldItems, known_refs
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage, State, parse_state
from savable_pipeline.stages.stage_bases import TakesItems, TakesRefs
from savable_pipeline.stages.task_encoder import Skip

_NONE = np.empty(0, REF)
_MAX_HELD_BYTES = 1 << 30


class ShuffleBuffer(Stage):
    """Yields samples in random order: a random one of `size` held refs, which the source's next one replaces.

    At the end of a finite source the rest of the buffer follows in random order. Draw n is word n of a key of the lane,
    one draw per ref, so that the order does not depend on how many refs are taken at a time. A held ref takes 12 bytes,
    in memory and in a state. After `Encode` it shuffles items, such as the consecutive pieces of one document.

    Args:
        source: A stage of samples, or of items.
        size: Refs held in the buffer.
        max_held_bytes: Only for items: most bytes of items in all buffers and open packs of a process; items beyond
            that, or after a restore, are made again. None: 1 GiB.

    Raises:
        ValueError: `size` is below 1, or `max_held_bytes` is given for samples.

    Example:
        >>> samples = sp.ShuffleBuffer(sp.TarShardReader("shards/", sp.Lane(seed=7), epochs=1), size=100)
        >>> len({sample.key for sample in samples})  # each of the 400 samples once
        400
        >>> len(samples.save_state()["refs"])  # the buffer is empty at the end
        0
    """

    ref: ItemRef = ()
    size: int
    one_for_one = True
    max_held_bytes: int = 0
    """Of items, in a process; a buffer of samples holds none."""

    @overload
    def __new__(cls, source: SampleStage, *, size: int, max_held_bytes: None = ...) -> _BufferOfSamples: ...
    @overload
    def __new__(cls, source: ItemStage, *, size: int, max_held_bytes: int | None = ...) -> _BufferOfItems: ...
    def __new__(cls, source: SampleStage | ItemStage, *, size: int, max_held_bytes: int | None = None) -> ShuffleBuffer:
        """A buffer of samples or of items, by what the source gives."""
        if isinstance(source, ItemStage):
            return super().__new__(_BufferOfItems)
        if max_held_bytes is not None:
            raise ValueError("max_held_bytes is for a buffer after Encode: one of samples holds only their refs")
        return super().__new__(_BufferOfSamples)

    def _begin(self, source: Stage, size: int) -> None:
        if size < 1:
            raise ValueError(f"ShuffleBuffer: size must be at least 1, not {size}")
        super().__init__(source)
        self.size = size
        self._draws = 0

    @cached_property
    def _key(self) -> int:
        return self.info.key("shuffle")

    def settings(self) -> dict[str, Any]:
        """`size`, the only setting that changes the order."""
        return {"size": self.size}

    def _count_kept(self, n: int) -> None:
        """Add `n` to the refs that the lane knows to be in the buffer: they are not wasted."""
        if self.lane.unused is not None:
            self.lane.unused -= n


class _BufferState(msgspec.Struct):
    refs: bytes
    draws: SavedCount
    source: dict[str, Any]


class _BufferOfSamples(ShuffleBuffer, TakesRefs):
    """A buffer before Encode: takes refs, several at a time."""

    source: SampleStage

    def __init__(self, source: SampleStage, *, size: int, max_held_bytes: None = None) -> None:
        self._begin(source, size)
        self._slots = _NONE
        self._filled = 0

    def take_refs(self, n: int) -> RefArray:
        """The refs of the next samples, 1 to `n` of them: REF (any,); empty only at the end of a finite source."""
        if self._filled < self.size:
            self._fill()
        fresh = self.source.take_refs(n) if self._filled == self.size else _NONE
        return self._exchange(fresh) if len(fresh) else self._drain(n)

    def _fill(self) -> None:
        if not self._filled:
            self._slots = np.empty(self.size, REF)
        while len(fresh := self.source.take_refs(self.size - self._filled)):
            self._slots[self._filled : self._filled + len(fresh)] = fresh
            self._filled += len(fresh)
            self._count_kept(len(fresh))

    def _exchange(self, fresh: RefArray) -> RefArray:
        """Put each ref of `fresh` in turn into a random slot and return the refs that were there.

        A slot drawn twice yields, the second time, the ref that the first draw put there. Sorting the draws brings
        equal
        slots side by side: draws 5 2 5 yield the ref in slot 5, the one in slot 2, and the first of `fresh`.
        """
        slots = below(words(self._key, self._draws, len(fresh)), self.size)
        self._draws += len(fresh)
        given = self._slots[slots]
        order = np.argsort(slots, kind="stable")
        again = slots[order[1:]] == slots[order[:-1]]
        given[order[1:][again]] = fresh[order[:-1][again]]
        last = np.append(~again, True)
        self._slots[slots[order[last]]] = fresh[order[last]]
        return given

    def _drain(self, n: int) -> RefArray:
        """Return up to `n` of the remaining refs: a random slot each time, into which the last filled one moves."""
        given = np.empty(min(n, self._filled), REF)
        for i in range(len(given)):
            slot = (word(self._key, self._draws) >> 32) * self._filled >> 32
            self._draws += 1
            self._filled -= 1
            given[i] = self._slots[slot]
            self._slots[slot] = self._slots[self._filled]
        return given

    def save_state(self) -> State:
        """`refs`: the buffer's refs in order, 12 bytes each (index uint64, epoch uint32); `draws`: draws so far."""
        return {
            "refs": self._slots[: self._filled].tobytes(),
            "draws": self._draws,
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no sample is read, but downloads of remote ones begin."""
        saved: _BufferState = parse_state(self, state, _BufferState)
        if len(saved.refs) % REF.itemsize or len(saved.refs) // REF.itemsize > self.size:
            raise CheckpointMismatchError(
                f"ShuffleBuffer(size={self.size}): the state holds {len(saved.refs) // REF.itemsize} refs"
            )
        self.source.restore_state(saved.source)
        refs = known_refs(self, np.frombuffer(saved.refs, REF))
        self._slots = np.empty(self.size, REF)
        self._slots[: len(refs)] = refs
        self._filled = len(refs)
        self._draws = saved.draws
        if len(refs):
            self.source.prefetch(refs)


class _ItemBufferState(msgspec.Struct):
    refs: list[Any]
    draws: SavedCount
    source: dict[str, Any]


class _BufferOfItems(ShuffleBuffer, TakesItems):
    """A buffer after Encode: takes one item at a time."""

    def __init__(self, source: ItemStage, *, size: int, max_held_bytes: int | None = None) -> None:
        self._begin(source, size)
        self.max_held_bytes = _MAX_HELD_BYTES if max_held_bytes is None else max_held_bytes
        self._held = HeldItems(self, max_bytes=self.max_held_bytes)

    @property
    def held_items(self) -> int:
        """The number of items in the buffer that are in memory."""
        return self._held.made

    def take(self, n: int, *, deferred: bool = False) -> tuple[list[Any], list[ItemRef]]:
        """The next item and its ref; none only at the end. After an error of the source, the next call tries again."""
        while True:
            self._fill()
            if not self._held:
                return [], []
            slot = (word(self._key, self._draws) >> 32) * min(len(self._held), self.size) >> 32
            item, ref = self._held.take(slot, last_fills=True)
            self._draws += 1
            if type(item) is not Skip:  # else it cannot be made again, and was counted where that was found
                return [item], [ref]

    def _fill(self) -> None:
        """Take items until there are `size` and the one that takes the place of the next."""
        while len(self._held) <= self.size:
            items, refs = self.source.take(self.size + 1 - len(self._held))
            if not items:
                return
            self._held.add(items, refs)
            self._count_kept(len(items))

    def save_state(self) -> State:
        """`refs`: the buffer's refs in order; `draws`: draws so far."""
        return {"refs": self._held.refs(), "draws": self._draws, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; items are made again when they are given."""
        saved = parse_state(self, state, _ItemBufferState)
        if len(saved.refs) > self.size + 1:
            raise CheckpointMismatchError(f"ShuffleBuffer(size={self.size}): the state holds {len(saved.refs)} refs")
        self.source.restore_state(saved.source)
        self._held.restore(saved.refs)
        self._draws = saved.draws


for _kind in (_BufferOfSamples, _BufferOfItems):
    _kind.__name__ = _kind.__qualname__ = "ShuffleBuffer"  # states, counts and the printed tree know one stage
