"""`ShuffleBuffer`: samples or items in random order.

Its state has only refs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import below, word, words
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.advice import check_count
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked, value_of
from savable_pipeline.stages.filters import Filter
from savable_pipeline.stages.item_buffer import ItemBuffer, RefBuffer, known_refs
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage, State, parse_state, saved_refs

_MAX_BUFFER_BYTES = 1 << 30
_DRAWS_AT_ONCE = 1024  # number of draws computed at once, in a tenth of the time of single draws


class ShuffleBuffer(ChunkedStage, SampleStage, ItemStage):
    """Samples in random order, from a buffer of `size` refs.

    The source's next ref replaces the yielded one.

    The buffer has at most as many refs as the lane reads in the first epoch, so that it does not mix many epochs of
    small data. This limit stays the same for the run. A buffer after a blend, packs or an encoder without `one_to_one`
    does not have it.

    At the end of a finite source the rest of the buffer follows in random order. There is one draw per ref, and draw n
    is random word n of a key of the lane, so that the order does not depend on how many refs are taken at a time. A ref
    takes 12 bytes, in memory and in a state. After `Encode` the stage shuffles items, such as the consecutive pieces of
    one document.

    Args:
        source: A stage of samples, or of items.
        size: The most refs in the buffer.
        max_buffer_bytes: Only for items: the most bytes of items in all buffers and open packs of a process. Items
            beyond that, or after a restore, are rebuilt. None: 1 GiB.

    Raises:
        ValueError: `size` is below 1, or `max_buffer_bytes` is passed for samples.

    Example:
        >>> samples = sp.ShuffleBuffer(sp.TarShardReader("shards/", sp.Lane(seed=7), epochs=1), size=100)
        >>> len({sample.key for sample in samples})  # each of the 400 samples once
        400
        >>> len(samples.save_state()["refs"])  # the buffer is empty at the end
        0
    """

    one_to_one = True

    def __init__(self, source: SampleStage | ItemStage, *, size: int, max_buffer_bytes: int | None = None) -> None:
        check_count("ShuffleBuffer", "size", size)
        Stage.__init__(self, source)
        self.size, self.yields = size, source.yields
        self.max_buffer_bytes = 0
        """The most bytes of items in a process; 0 for samples, which are not held in memory."""
        self._buffer: RefBuffer | ItemBuffer = RefBuffer(np.empty(0, REF))
        if source.yields != "samples":
            self.max_buffer_bytes = _MAX_BUFFER_BYTES if max_buffer_bytes is None else max_buffer_bytes
            self._buffer = ItemBuffer(self, max_bytes=self.max_buffer_bytes)
        elif max_buffer_bytes is not None:
            raise ValueError("max_buffer_bytes applies only after Encode. Remove it.")
        self._draws = 0
        # number of the first draw that is computed in advance, and the slots of this and later draws
        self._computed_slots = 0, np.empty(0, np.int64)

    @cached_property
    def _key(self) -> int:
        """Return the key of the random numbers."""
        return self.info.key("shuffle")

    @property
    def capacity(self) -> int:
        """Return the number of refs in a full buffer.

        It is at most the number of samples that the lane has in the first epoch.
        """
        return min(self.size, self._epoch_limit or self.size)

    @cached_property
    def _epoch_limit(self) -> int:
        """Return the most samples that the lane may have in the first epoch, or 0 if unknown.

        It is unknown if a sample may become several items.
        """
        reader, *steps = upstream(self.source)
        countable = all(chunked(step).one_to_one or isinstance(step, Filter) for step in steps)
        if not isinstance(reader, RecordReader) or not countable:
            return 0
        return -(-reader.samples.of(0).count // self.lane.count)

    def _fill(self) -> None:
        """Take elements until the buffer is full or the source ends."""
        buffer, capacity = self._buffer, self.capacity
        while len(buffer) < capacity and len(more := chunked(self.source).take(capacity - len(buffer))):
            buffer.add(more)
            if self.lane.unused is not None:
                self.lane.unused -= len(more)  # samples in the buffer do not count as read without a batch

    def _slot(self) -> int:
        """Return the slot of the next element to yield, also of a buffer that is not full."""
        return (word(self._key, self._draws) >> 32) * len(self._buffer) >> 32

    def _slots(self, n: int) -> NDArray[np.int64]:
        """Return the slots of the next `n` elements of a full buffer: int64 (n,). Many are computed in advance."""
        first_draw, slots = self._computed_slots
        start = self._draws - first_draw
        if start < 0 or start + n > len(slots):
            slots = below(words(self._key, self._draws, max(n, _DRAWS_AT_ONCE)), self.capacity)
            self._computed_slots, start = (self._draws, slots), 0
        return slots[start : start + n]

    def take(self, n: int) -> Any:
        """Return the next 1 to `n` random elements.

        Each is replaced by the next element of the source, or by the last one of the buffer if the source has ended.
        """
        buffer, capacity = self._buffer, self.capacity
        self._fill()
        if isinstance(buffer, ItemBuffer):
            buffer.rebuild_parts()
            if self._makes and buffer:
                value_of(self.source, buffer[self._slot()])
        replacements: Any = chunked(self.source).take(n) if len(buffer) == capacity else ()
        if len(replacements):
            slots = self._slots(len(replacements))
            self._draws += len(replacements)
            return buffer.exchange(slots, replacements)
        drawn = []
        for _ in range(min(n, len(buffer))):
            drawn.append(buffer.remove(self._slot(), last_fills=True))
            self._draws += 1
        return drawn if isinstance(buffer, ItemBuffer) else np.asarray(drawn, REF)

    def save_state(self) -> State:
        """Return the position.

        `refs` has the buffer's refs of samples, 12 bytes each (index uint64, epoch uint32), or refs of items with
        sizes. `draws` is the number of draws so far, and `most` the limit of the buffer; 0 if it is `size`.
        """
        saved = {"refs": self._buffer.save(), "draws": self._draws, "most": self._epoch_limit}
        return {**saved, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`.

        Nothing is read or built, but downloads of remote samples start.
        """
        saved = parse_state(self, state, _BufferState)
        self.source.restore_state(saved.source)
        if isinstance(self._buffer, ItemBuffer):
            self._buffer.restore(saved.refs)
        else:
            self._buffer = RefBuffer(known_refs(self, saved_refs(self, saved.refs)).copy())
        self._epoch_limit = saved.most
        if len(self._buffer) > self.capacity:
            raise CheckpointMismatchError(
                f"ShuffleBuffer(size={self.capacity}): the state has {len(self._buffer)} samples. Use another copy "
                "of the checkpoint."
            )
        self._draws, self._computed_slots = saved.draws, (0, np.empty(0, np.int64))
        if isinstance(self._buffer, RefBuffer) and len(self._buffer):
            self.source.prefetch(self._buffer.array)

    def settings(self) -> dict[str, Any]:
        """Return `size`, the only setting that changes the order."""
        return {"size": self.size}


class _BufferState(msgspec.Struct):
    refs: bytes | list[Any]
    draws: SavedCount
    source: dict[str, Any]
    most: SavedCount
