"""`ShuffleBuffer`: yields samples or items in random order from a buffer whose state is refs alone."""

from __future__ import annotations

from functools import cached_property
from typing import Any, overload

import msgspec
import numpy as np

from savable_pipeline.core.keyed_random import below, word, words
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.ref import REF, RefArray
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.advice import check_count
from savable_pipeline.stages.item_buffer import HeldRefs, ItemBuffer
from savable_pipeline.stages.item_ref import Element, ItemRef
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage, State, TakesItems, TakesRefs, make, parse_state

_MAX_HELD_BYTES = 1 << 30


class ShuffleBuffer(Stage):
    """Yields samples in random order: a random one of `size` held refs, which the source's next one replaces.

    At the end of a finite source the rest of the buffer follows in random order. Draw n is word n of a key of the lane,
    one draw per ref, so that the order does not depend on how many refs are taken at a time. A held ref takes 12 bytes,
    in memory and in a state. After `Encode` it shuffles items, such as the consecutive pieces of one document.

    Args:
        source: A stage of samples, or of items.
        size: Refs held in the buffer.
        max_buffer_bytes: Only for items: most bytes of items in all buffers and open packs of a process; items beyond
            that, or after a restore, are made again. None: 1 GiB.

    Raises:
        ValueError: `size` is below 1, or `max_buffer_bytes` is given for samples.

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
    max_buffer_bytes: int = 0
    """Of items, in a process; a buffer of samples holds none."""

    @overload
    def __new__(cls, source: SampleStage, *, size: int, max_buffer_bytes: None = ...) -> _BufferOfSamples: ...
    @overload
    def __new__(cls, source: ItemStage, *, size: int, max_buffer_bytes: int | None = ...) -> _BufferOfItems: ...
    def __new__(
        cls, source: SampleStage | ItemStage, *, size: int, max_buffer_bytes: int | None = None
    ) -> ShuffleBuffer:
        """A buffer of samples or of items, by what the source gives."""
        if isinstance(source, ItemStage):
            return super().__new__(_BufferOfItems)
        if max_buffer_bytes is not None:
            raise ValueError("max_buffer_bytes applies only after Encode. Remove it.")
        return super().__new__(_BufferOfSamples)

    def _begin(self, source: Stage, size: int) -> None:
        check_count("ShuffleBuffer", "size", size)
        super().__init__(source)
        self.size = size
        self._draws = 0

    _held: HeldRefs | ItemBuffer

    @cached_property
    def _key(self) -> int:
        return self.info.key("shuffle")

    def _taken(self, n: int) -> Any:
        """The next elements of the source, an array of refs or a list: 1 to `n` of them; none for 0, or at the end."""
        raise NotImplementedError

    def _fill(self) -> None:
        """Take elements until the buffer is full or the source ends."""
        held = self._held
        while len(held) < self.size and len(more := self._taken(self.size - len(held))):
            held.add(more)
            if self.lane.unused is not None:
                self.lane.unused -= len(more)  # what the lane knows to be in the buffer is not wasted

    def _slot(self) -> int:
        """The place of the next element to give, whether or not another follows into it."""
        return (word(self._key, self._draws) >> 32) * len(self._held) >> 32

    def _next(self, n: int) -> Any:
        """The next 1 to `n` elements, as `_taken`: random ones, each replaced by the source's next, or the last."""
        held = self._held
        self._fill()
        fresh = self._taken(n if len(held) == self.size else 0)
        if len(fresh):
            slots = below(words(self._key, self._draws, len(fresh)), self.size)
            self._draws += len(fresh)
            return held.exchange(slots, fresh)
        last = []
        for _ in range(min(n, len(held))):
            last.append(held.remove(self._slot(), last_fills=True))
            self._draws += 1
        return last

    def save_state(self) -> State:
        """`refs`: those of samples in order, 12 bytes each (index uint64, epoch uint32); of items, with their sizes.

        `draws`: draws so far.
        """
        return {"refs": self._held.save(), "draws": self._draws, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; nothing is read or made, but downloads of remote samples begin."""
        saved = parse_state(self, state, _BufferState)
        self.source.restore_state(saved.source)
        self._held.restore(saved.refs)
        if len(self._held) > self.size:
            raise CheckpointMismatchError(
                f"ShuffleBuffer(size={self.size}): the state has {len(self._held)} samples. Use another copy "
                "of the checkpoint."
            )
        self._draws = saved.draws

    def settings(self) -> dict[str, Any]:
        """`size`, the only setting that changes the order."""
        return {"size": self.size}


class _BufferState(msgspec.Struct):
    refs: bytes | list[Any]
    draws: SavedCount
    source: dict[str, Any]


class _BufferOfSamples(ShuffleBuffer, TakesRefs):
    """A buffer before Encode, of refs."""

    source: SampleStage
    _held: HeldRefs

    def __init__(self, source: SampleStage, *, size: int, max_buffer_bytes: None = None) -> None:
        self._begin(source, size)
        self._held = HeldRefs(self)

    def _taken(self, n: int) -> RefArray:
        return self.source.take_refs(n)

    def take_refs(self, n: int) -> RefArray:
        """The refs of the next samples, 1 to `n` of them: REF (any,); empty only at the end of a finite source."""
        return np.asarray(self._next(n), REF)

    def restore_state(self, state: State) -> None:
        super().restore_state(state)
        if len(self._held):
            self.source.prefetch(self._held.array)


class _BufferOfItems(ShuffleBuffer, TakesItems):
    """A buffer after Encode, of items as far as memory allows."""

    _held: ItemBuffer

    def __init__(self, source: ItemStage, *, size: int, max_buffer_bytes: int | None = None) -> None:
        self._begin(source, size)
        self.max_buffer_bytes = _MAX_HELD_BYTES if max_buffer_bytes is None else max_buffer_bytes
        self._held = ItemBuffer(self, max_bytes=self.max_buffer_bytes)

    @property
    def held_items(self) -> int:
        """The number of items in the buffer that are in memory."""
        return self._held.made

    def _taken(self, n: int) -> list[Element]:
        return self.source.take(n) if n else []

    def take(self, n: int) -> list[Element]:
        """The next items, 1 to `n` of them; none only at the end of a finite source."""
        if self._makes:
            self._fill()
            if len(self._held):
                make(self._held[self._slot()], self.source)
        elements: list[Element] = self._next(n)
        return elements


for _kind in (_BufferOfSamples, _BufferOfItems):
    _kind.__name__ = _kind.__qualname__ = "ShuffleBuffer"  # states, counts and the printed tree know one stage
