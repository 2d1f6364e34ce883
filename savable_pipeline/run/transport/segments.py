"""Shared memory in which batches pass from a worker to the trainer: a few segments, each with one batch at a time.

    a segment   a flag for each of 64 readers, u8 (64,): free 0, in use 1, retired 2
                │ buffer │ padding to 64 │ buffer │ …

Segments are anonymous (memfd) and passed by descriptor, so that nothing is left in the system when a process dies. The
worker marks a segment as in use before it writes to it. The trainer's tensors view it without a copy, and when the last
of them is gone, the trainer marks the segment as free. The worker reuses the segment that it used last, whose pages are
in the processor's caches, and makes a new one if none is free. Memory from `batch_memory` is in the segment of the
next batch from the start, and is not copied. A trainer that keeps more than 8 batches of a worker gets copies. A
segment that was viewed when the trainer forked is retired, never freed: the child may still view it.

Several processes may read a segment, each with a flag of its own. The worker reuses it when all flags are free. Each
process then maps it privately: the system copies the pages that it writes to, and drops the copies with the batch.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.run.transport.batch_pickle import Buffer
from savable_pipeline.run.transport.status_page import anonymous_file

Span: TypeAlias = tuple[int, int]  # offset and length in bytes

ALIGN = 64  # bytes, and readers of a segment
KEPT = 8  # batches of one worker that the trainer may view at a time; beyond that it gets copies
_ROUND = 1 << 16
_FREE, _IN_USE, _RETIRED = 0, 1, 2
_ALL_FREE = bytes(ALIGN)


class WrittenBatch(NamedTuple):
    """The place of a written batch: `fd` is the segment's descriptor if the segment is new, else None.

    `dropped` are the numbers of segments that no longer exist; `spans` the offset and length of each buffer.
    """

    segment: int
    fd: int | None
    dropped: tuple[int, ...]
    spans: list[Span]


def _mapped(fd: int, size: int) -> mmap.mmap:
    """Map a memfd with all its pages at once: page faults one by one take far longer."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


@dataclass(slots=True)
class _Begun:
    """The segment of the next batch, which may hold parts of the batch already."""

    number: int
    fd: int | None  # set if the trainer does not have the segment yet
    dropped: tuple[int, ...]  # segments that were dropped in favour of this one
    address: int
    end: int = ALIGN  # the end of the allocated part


class SegmentWriter:
    """A worker's segments, and the memory it allocates in them."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}  # by number, the one used last at the end
        self._made = 0
        self._usual = 0  # the expected size of the next batch, by the batches before
        self._missing = 0  # bytes of the next batch for which the segment had no room
        self._begun: _Begun | None = None
        self._lent: dict[int, weakref.ref[NDArray[np.uint8]]] = {}  # the array that views a segment in this process

    def allocate(self, size: int) -> memoryview | None:
        """`size` bytes for a part of the next batch; None if the segment is full, or before the first batches."""
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

    def allocated(self, address: int, size: int) -> memoryview | None:
        """The bytes at an address of this process, if all of them were allocated for the next batch; else None."""
        begun = self._begun
        if begun is None or not ALIGN <= address - begun.address <= begun.end - size:
            return None
        start = address - begun.address
        return memoryview(self._view(begun.number))[start : start + size]  # type: ignore[arg-type]

    def _view(self, number: int) -> NDArray[np.uint8]:
        """The bytes of a segment, uint8 (any,); the segment is not reused while this process views a part of them."""
        lent = self._lent.get(number, _nothing)()
        if lent is None:
            lent = np.frombuffer(self._segments[number], np.uint8)
            self._lent[number] = weakref.ref(lent)
        return lent

    def begin(self) -> None:
        """Start a batch: reuse the memory that was allocated for a batch that failed, unless it is still viewed."""
        if self._begun is not None and self._lent[self._begun.number]() is None:
            self._begun.end = ALIGN

    def write(self, views: Sequence[memoryview], pieces: Sequence[Buffer] = ()) -> WrittenBatch:
        """Write bytes (one-dimensional views) to a segment; views of memory from `allocate` are there already.

        `pieces` are written end to end, as the last of the spans.
        """
        begun, self._begun = self._begun, None
        spans, end = _laid_out(views, begun)
        room = sum(map(len, pieces))
        dropped: tuple[int, ...] = ()
        if begun is not None and end + room > len(self._segments[begun.number]):
            dropped = self._put_back(begun)
            begun = None
            spans, end = _laid_out(views, None)
        self._usual = max(_aligned(end + room) + self._missing, self._usual * 7 // 8)
        self._missing = 0
        if begun is None:
            begun = self._take(end + room)
        segment = self._segments[begun.number]
        for (offset, length, is_there), view in zip(spans, views, strict=True):
            if not is_there:
                segment[offset : offset + length] = view
        where = [(offset, length) for offset, length, _ in spans]
        if pieces:
            where.append((end, room))
        for piece in pieces:
            segment[end : end + len(piece)] = piece
            end += len(piece)
        return WrittenBatch(begun.number, begun.fd, dropped + begun.dropped, where)

    def _put_back(self, begun: _Begun) -> tuple[int, ...]:
        """Free a segment that is too small; return the segments that had been dropped in favour of it."""
        if begun.fd is None:
            self._segments[begun.number][0] = _FREE
        else:
            os.close(begun.fd)
            del self._segments[begun.number]
        return begun.dropped

    def _take(self, size: int) -> _Begun:
        """Mark a free segment of at least this size as in use, or make one."""
        retired = [number for number, segment in self._segments.items() if _RETIRED in segment[:ALIGN]]
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
            del self._segments[gone]  # unmapped when this process no longer views it
        self._segments[number][0] = _IN_USE
        return _Begun(number, fd, tuple(dropped), self._view(number).ctypes.data)

    def _is_free(self, number: int, segment: mmap.mmap) -> bool:
        return segment[:ALIGN] == _ALL_FREE and self._lent.get(number, _nothing)() is None


def _laid_out(views: Sequence[memoryview], begun: _Begun | None) -> tuple[list[tuple[int, int, bool]], int]:
    """For each view its offset, its length, and whether it is already there; and the offset after all views."""
    spans = []
    end = ALIGN if begun is None else begun.end
    for view in views:
        offset = end
        is_there = False
        if begun is not None:
            found = np.frombuffer(view, np.uint8).ctypes.data - begun.address
            is_there = found >= ALIGN and found + len(view) <= begun.end
            offset = found if is_there else end
        spans.append((offset, len(view), is_there))
        end = max(end, _aligned(offset + len(view)))
    return spans, end


def _nothing() -> None:
    return None


class SegmentReader:
    """One process's views of one worker's segments.

    `flag` is the number of its flag. With `private`, what it writes to them stays its own.
    """

    def __init__(self, flag: int = 0, *, private: bool = False) -> None:
        self._flag, self._private = flag, private
        self._segments: dict[int, _Mapped] = {}
        self._viewed = [0]

    def add(self, number: int, fd: int) -> None:
        """Map a new segment, and close its descriptor."""
        try:
            flags = mmap.mmap(fd, ALIGN) if self._private else _mapped(fd, 0)
            data = mmap.mmap(fd, 0, mmap.MAP_PRIVATE) if self._private else flags
            self._segments[number] = _Mapped(flags, data)
        finally:
            os.close(fd)

    def drop(self, number: int) -> None:
        """Drop a segment; it is unmapped when no tensor views it any more."""
        self._segments.pop(number, None)

    def lend(self, number: int, flags: Iterable[int]) -> None:
        """Mark a segment as in use by other readers, too, before they know of it."""
        for flag in flags:
            self._segments[number].flags[flag] = _IN_USE

    def release(self, flag: int, number: int | None = None) -> None:
        """Mark a segment, or all, as free for a reader that has ended, unless a child of it may view them."""
        for each, segment in self._segments.items():
            if number in (None, each) and segment.flags[flag] == _IN_USE:
                segment.flags[flag] = _FREE

    def read(self, number: int, spans: list[Span]) -> list[memoryview]:
        """The bytes at some spans of a segment: writable views, or copies if 8 batches are viewed already."""
        segment = self._segments[number]
        if self._viewed[0] >= KEPT:
            view = memoryview(bytearray(segment.data[: sum(spans[-1])]))
            segment.flags[self._flag] = _FREE
        else:
            whole = np.frombuffer(segment.data, np.uint8)
            self._viewed[0] += 1
            _when_gone(whole, segment, self._flag, self._viewed)
            view = memoryview(whole)  # type: ignore[arg-type]
        return [view[offset : offset + length] for offset, length in spans]

    @property
    def viewed(self) -> int:
        """The number of batches that this process views."""
        return self._viewed[0]


class _Mapped(NamedTuple):
    """A segment in a reader; `flags` and `data` are one mapping unless `data` is private."""

    flags: mmap.mmap
    data: mmap.mmap


_views: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
_forks = [0]  # the number of times that this process has forked


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(before=_count_fork)


def _when_gone(whole: NDArray[np.uint8], segment: _Mapped, flag: int, viewed: list[int]) -> None:
    """Mark the segment as free when its last view is gone; as retired if the process has forked in the meantime."""
    key, owner, forks = id(whole), os.getpid(), _forks[0]

    def gone(_: object) -> None:
        del _views[key]
        if os.getpid() != owner:
            return
        viewed[0] -= 1
        if forks != _forks[0]:
            segment.flags[flag] = _RETIRED
            return
        if segment.data is not segment.flags:
            segment.data.madvise(mmap.MADV_DONTNEED)  # private copies of pages would hide the next batch
        segment.flags[flag] = _FREE

    _views[key] = weakref.ref(whole, gone)
