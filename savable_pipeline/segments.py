"""Shared memory in which a batch passes from a worker to the trainer: a few segments, each with one batch at a time.

    a segment   free 0, in use 1, retired 2: u8 │ padding to 64 │ buffer │ padding to 64 │ buffer │ …

Segments are anonymous (memfd) and passed by descriptor, so that nothing is left in the system whoever dies. The worker
marks a segment as in use before it writes; the trainer's tensors view it without a copy, and when the last of them is
gone the trainer marks it as free. The worker takes the segment that was freed last, whose pages are warm, and makes a
new one when none is free. A trainer that keeps many batches is given copies, so that a worker never runs out. A
segment that was viewed when the trainer forked is retired, not freed: the child may view it still.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.note import anonymous_file

Place: TypeAlias = tuple[int, int]  # offset and length in bytes

ALIGN = 64
KEPT = 8  # batches of one worker that the trainer may view at a time; of more it gets copies
_ROUND = 1 << 16
_FREE, _IN_USE, _RETIRED = 0, 1, 2


class Written(NamedTuple):
    """Where something was written: the segment, its descriptor if it is new, one that is no more, and the places."""

    segment: int
    fd: int | None
    dropped: int | None
    places: list[Place]


def _mapped(fd: int, size: int) -> mmap.mmap:
    """The whole of a memfd, every page of it at once: touching them one by one takes far longer."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


class SegmentWriter:
    """A worker's segments."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}  # by number, the one used last at the end
        self._made = 0

    def write(self, views: Sequence[memoryview]) -> Written:
        """Put bytes (one-dimensional views) into a free segment."""
        places = []
        end = ALIGN
        for view in views:
            places.append((end, len(view)))
            end = _aligned(end + len(view))
        number, fd, dropped = self._take(end)
        segment = self._segments[number]
        segment[0] = _IN_USE
        for (offset, length), view in zip(places, views, strict=True):
            segment[offset : offset + length] = view
        return Written(number, fd, dropped, places)

    def _take(self, size: int) -> tuple[int, int | None, int | None]:
        """A free segment of at least this size: its number, its descriptor if it is new, and one dropped for it."""
        retired = [number for number, segment in self._segments.items() if segment[0] == _RETIRED]
        free = [number for number, segment in self._segments.items() if segment[0] == _FREE]
        for number in reversed(free):
            if len(self._segments[number]) >= size:
                self._segments[number] = self._segments.pop(number)
                return number, None, None
        size = -(-size // _ROUND) * _ROUND
        fd = anonymous_file("savable_pipeline batch", size)
        try:
            mapped = _mapped(fd, size)
        except OSError:
            os.close(fd)
            raise
        self._made += 1
        self._segments[self._made] = mapped
        dropped = (retired + free)[:1]
        for number in dropped:
            self._segments.pop(number).close()
        return self._made, fd, dropped[0] if dropped else None


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
