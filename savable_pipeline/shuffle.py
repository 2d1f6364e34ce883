"""`ShuffleBuffer`: holds many refs and gives them in random order; never holds a byte of a sample."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.keys import below, word, words
from savable_pipeline.sample import REF, RefArray, Sample
from savable_pipeline.stage import ItemRef, Stage, State, parse_state

_NONE = np.empty(0, REF)


class _BufferState(msgspec.Struct):
    refs: bytes
    draws: int
    source: dict[str, Any]


class ShuffleBuffer(Stage):
    """Gives a random one of `size` refs and puts the next of its source in the free place.

    When a finite source is dry, what is left comes in random order. The draws are words 0, 1, 2, … of a key of the
    lane, one a ref, so that how many are taken at a time changes nothing. 12 bytes a slot, in memory and in a state.
    """

    def __init__(self, source: Stage, *, size: int) -> None:
        if size < 1:
            raise ValueError(f"ShuffleBuffer: size must be at least 1, not {size}")
        super().__init__(source)
        if source.encoder is not None:
            raise ValueError("ShuffleBuffer takes samples, unread: put it before Encode")
        self.size = size
        self._draws = 0
        self._slots = _NONE
        self._filled = 0
        self._ref: ItemRef = ()

    @cached_property
    def _key(self) -> int:
        return self.stage_key("shuffle")

    def __next__(self) -> Sample:
        refs = self.take_refs(1)
        if not len(refs):
            raise StopIteration
        self._ref = (int(refs["index"][0]), int(refs["epoch"][0]), 0)
        return self.samples(refs)[0]

    @property
    def ref(self) -> ItemRef:
        """The ref of the sample that `next` gave last."""
        return self._ref

    def take_refs(self, n: int) -> RefArray:
        """The refs of some samples, at most `n`: REF (any,); none only at the end of a finite source."""
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

    def _exchange(self, fresh: RefArray) -> RefArray:
        """Each of `fresh` in turn takes the place of a random slot, whose ref is given.

        Within one call a slot may be drawn again: then it gives the ref that the draw before put there. Sorting the
        draws brings those side by side: draws 5 2 5 give slot 5, slot 2, and the first of `fresh`.
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
        """Give what is left: a random slot, then the last one takes its place."""
        given = np.empty(min(n, self._filled), REF)
        for i in range(len(given)):
            slot = (word(self._key, self._draws) >> 32) * self._filled >> 32
            self._draws += 1
            self._filled -= 1
            given[i] = self._slots[slot]
            self._slots[slot] = self._slots[self._filled]
        return given

    def count_of(self, lane: int, epoch: int) -> int | None:
        """As many as its source."""
        return self.source.count_of(lane, epoch)

    def save_state(self) -> State:
        """`refs`: the buffer's refs in order, 12 bytes each (index uint64, epoch uint32); `draws`: how many so far."""
        return {
            "refs": self._slots[: self._filled].tobytes(),
            "draws": self._draws,
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Hold the refs of `state` again; nothing is read, but what lies behind a URL begins to come."""
        saved: _BufferState = parse_state(self, state, _BufferState)
        if len(saved.refs) % REF.itemsize or len(saved.refs) // REF.itemsize > self.size:
            raise CheckpointMismatchError(
                f"ShuffleBuffer(size={self.size}): the state holds {len(saved.refs) // REF.itemsize} refs"
            )
        self.source.restore_state(saved.source)
        refs = self.known(np.frombuffer(saved.refs, REF))
        self._slots = np.empty(self.size, REF)
        self._slots[: len(refs)] = refs
        self._filled = len(refs)
        self._draws = saved.draws
        if len(refs):
            self.source.announce(refs)

    def settings(self) -> dict[str, Any]:
        """The size."""
        return {"size": self.size}
