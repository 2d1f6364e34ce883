"""Shared memory in which a batch passes from a worker to the trainer: a few segments, each with one batch at a time.

    a segment   free 0, in use 1, retired 2: u8 │ padding to 64 │ buffer │ padding to 64 │ buffer │ …

Segments are anonymous (memfd) and passed by descriptor, so that nothing is left in the system whoever dies. The worker
marks a segment as in use before it writes; the trainer's tensors view it without a copy, and when the last of them is
gone the trainer marks it as free. The worker takes the segment that was freed last, whose pages are warm, and makes a
new one when none is free. What `batch_memory` gives out lies in
the segment of the next batch from the start, and is not copied. A trainer that keeps many batches is given copies, so
that a worker never runs out. A segment that was viewed when the trainer forked is retired, not freed: the child may
view it still.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.note import anonymous_file
from savable_pipeline.wire import Buffer

Place: TypeAlias = tuple[int, int]  # offset and length in bytes

ALIGN = 64
KEPT = 8  # batches of one worker that the trainer may view at a time; of more it gets copies
_ROUND = 1 << 16
_FREE, _IN_USE, _RETIRED = 0, 1, 2


class Written(NamedTuple):
    """Where something was written: the segment, its descriptor if it is new, those that are no more, and the places."""

    segment: int
    fd: int | None
    dropped: tuple[int, ...]
    places: list[Place]


def _mapped(fd: int, size: int) -> mmap.mmap:
    """The whole of a memfd, every page of it at once: touching them one by one takes far longer."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


@dataclass(slots=True)
class _Begun:
    """A segment in which a batch is put, maybe with parts that were made in it."""

    number: int
    fd: int | None  # if the trainer does not have it yet
    dropped: tuple[int, ...]  # for it
    address: int
    end: int = ALIGN  # of what has been given away


class SegmentWriter:
    """A worker's segments."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}  # by number, the one used last at the end
        self._made = 0
        self._usual = 0  # about the size of the batches before: what is got ready for the next
        self._missing = 0  # bytes of the next batch for which there was no room
        self._begun: _Begun | None = None
        self._lent: dict[int, weakref.ref[NDArray[np.uint8]]] = {}  # what views a segment in this process

    def allocate(self, size: int) -> memoryview | None:
        """Room for a part of the next batch; None if there is none, and until it is known how large batches are."""
        if self._begun is None:
            if size > self._usual:
                return None
            self._begun = self._take(self._usual)
        begun = self._begun
        whole = self._view(begun.number)
        start = begun.end
        if start + size > len(whole):
            self._missing += _aligned(size)
            return None
        begun.end = _aligned(start + size)
        return memoryview(whole)[start : start + size]  # type: ignore[arg-type]

    def given(self, address: int, size: int) -> memoryview | None:
        """These bytes of this process's memory, if all of them were allocated for the next batch."""
        begun = self._begun
        if begun is None or not ALIGN <= address - begun.address <= begun.end - size:
            return None
        start = address - begun.address
        return memoryview(self._view(begun.number))[start : start + size]  # type: ignore[arg-type]

    def _view(self, number: int) -> NDArray[np.uint8]:
        """The bytes of a segment; it is not free as long as anyone here holds a part of them."""
        lent = self._lent.get(number, _nothing)()
        if lent is None:
            lent = np.frombuffer(self._segments[number], np.uint8)
            self._lent[number] = weakref.ref(lent)
        return lent

    def begin(self) -> None:
        """Another batch is begun: what was made for one that failed is gone."""
        if self._begun is not None and self._lent[self._begun.number]() is None:
            self._begun.end = ALIGN

    def write(self, views: Sequence[memoryview], pieces: Sequence[Buffer] = ()) -> Written:
        """Put bytes (one-dimensional views) into a free segment; what `allocate` gave is there already.

        `pieces` are to lie end to end, and are the last of the places.
        """
        begun, self._begun = self._begun, None
        places, end = _laid_out(views, begun)
        room = sum(map(len, pieces))
        dropped: tuple[int, ...] = ()
        if begun is not None and end + room > len(self._segments[begun.number]):
            dropped = self._put_back(begun)
            begun = None
            places, end = _laid_out(views, None)
        self._usual = max(_aligned(end + room) + self._missing, self._usual * 7 // 8)
        self._missing = 0
        if begun is None:
            begun = self._take(end + room)
        segment = self._segments[begun.number]
        for (offset, length, is_there), view in zip(places, views, strict=True):
            if not is_there:
                segment[offset : offset + length] = view
        where = [(offset, length) for offset, length, _ in places]
        if pieces:
            where.append((end, room))
        for piece in pieces:
            segment[end : end + len(piece)] = piece
            end += len(piece)
        return Written(begun.number, begun.fd, dropped + begun.dropped, where)

    def _put_back(self, begun: _Begun) -> tuple[int, ...]:
        """Give up a segment that is too small; gives what was dropped for it."""
        if begun.fd is None:
            self._segments[begun.number][0] = _FREE
        else:
            os.close(begun.fd)
            del self._segments[begun.number]
        return begun.dropped

    def _take(self, size: int) -> _Begun:
        """A free segment of at least this size, from now on in use."""
        retired = [number for number, segment in self._segments.items() if segment[0] == _RETIRED]
        free = [number for number, segment in self._segments.items() if self._is_free(number, segment)]
        fits = [number for number in free if len(self._segments[number]) >= size]
        fd, dropped = None, (retired + free)[:1]
        if fits:
            number, dropped = fits[-1], []
            self._segments[number] = self._segments.pop(number)
        else:
            size = -(-size // _ROUND) * _ROUND
            fd = anonymous_file("savable_pipeline batch", size)
            try:
                mapped = _mapped(fd, size)
            except OSError:
                os.close(fd)
                raise
            self._made += 1
            number = self._made
            self._segments[number] = mapped
        for gone in dropped:
            del self._segments[gone]  # unmapped when no one here views it any more
        self._segments[number][0] = _IN_USE
        return _Begun(number, fd, tuple(dropped), self._view(number).ctypes.data)

    def _is_free(self, number: int, segment: mmap.mmap) -> bool:
        return segment[0] == _FREE and self._lent.get(number, _nothing)() is None


def _laid_out(views: Sequence[memoryview], begun: _Begun | None) -> tuple[list[tuple[int, int, bool]], int]:
    """Where each view goes, its length, and whether it is there already; and where all ends."""
    places = []
    end = ALIGN if begun is None else begun.end
    for view in views:
        offset = end
        is_there = False
        if begun is not None:
            found = np.frombuffer(view, np.uint8).ctypes.data - begun.address
            is_there = found >= ALIGN and found + len(view) <= begun.end
            offset = found if is_there else end
        places.append((offset, len(view), is_there))
        end = max(end, _aligned(offset + len(view)))
    return places, end


def _nothing() -> None:
    return None


class SegmentReader:
    """The trainer's views of one worker's segments."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}
        self._viewed = [0]

    def add(self, number: int, fd: int) -> None:
        """Map a new segment, and close its descriptor."""
        try:
            self._segments[number] = _mapped(fd, 0)
        finally:
            os.close(fd)

    def drop(self, number: int) -> None:
        """Forget a segment; it is unmapped when no tensor views it any more."""
        del self._segments[number]

    def read(self, number: int, places: list[Place]) -> list[memoryview]:
        """The bytes in a segment: writable views, or copies if the trainer views many batches already."""
        segment = self._segments[number]
        if self._viewed[0] >= KEPT:
            view = memoryview(bytearray(segment[: sum(places[-1])]))
            segment[0] = _FREE
        else:
            whole = np.frombuffer(segment, np.uint8)
            self._viewed[0] += 1
            _when_gone(whole, segment, self._viewed)
            view = memoryview(whole)  # type: ignore[arg-type]
        return [view[offset : offset + length] for offset, length in places]

    @property
    def viewed(self) -> int:
        """How many batches the trainer views."""
        return self._viewed[0]


_views: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
_forks = [0]  # of this process so far


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(before=_count_fork)


def _when_gone(whole: NDArray[np.uint8], segment: mmap.mmap, viewed: list[int]) -> None:
    """Mark the segment as free when the last view of it is gone, except in a process that was forked since."""
    key, owner, forks = id(whole), os.getpid(), _forks[0]

    def gone(_: object) -> None:
        del _views[key]
        if os.getpid() == owner:
            viewed[0] -= 1
            segment[0] = _FREE if forks == _forks[0] else _RETIRED

    _views[key] = weakref.ref(whole, gone)
