"""Shared memory for batches from a worker to the trainer, one per segment.

    segment   flags u8 (64,), one per reader: free 0, in use 1, retired 2 │ buffer │ padding to 64 │ buffer │ …

A segment is a file in memory (memfd) without a path, passed by descriptor. So nothing remains when processes die.

    worker                                  trainer
    marks a free segment as in use
    writes a batch ─────── message ───────▶ views the tensors without a copy
                                            marks the segment as free when the last tensor is gone

The worker reuses the free segment that it used last, whose pages are in the processor's caches, and creates one if none
is free. It drops a segment if two were free at each of 32 batches in a row. `batch_memory` allocates in the segment of
the next batch, so tensors from there need no copy. A trainer that views 8 batches of a worker gets copies of further
ones. A segment that was viewed when the trainer forked is retired: it is never reused, because the child may still view
it.

Ranks that share batches read one segment, each with its own flag. The worker reuses it once all flags are free. Each
rank maps it privately: the system copies the pages that a rank writes to. These copies are dropped with the batch,
since they would hide the next one. Other pages stay mapped, because mapping them again takes longer than reading them.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.run.transport.batch_pickle import Buffer
from savable_pipeline.run.transport.status_page import anonymous_file

Span: TypeAlias = tuple[int, int]  # offset and length in bytes

ALIGN = 64  # alignment of buffers in bytes; also the number of flags, and so the most readers of a segment
_FIRST_BUFFER = ALIGN  # offset of the first buffer, after the flags
MOST_VIEWED = 8  # batches of one worker that the trainer may view at a time; it gets copies of further ones
_ROUND_BYTES = 1 << 16  # the size of a segment is a multiple of this
_SPARE_BATCHES = 32  # batches in a row with a spare segment, after which it is dropped
_FREE, _IN_USE, _RETIRED = 0, 1, 2
_ALL_FREE = bytes(ALIGN)
# Index of the highest byte of a page-table entry, and its values for a page that is not present or is one of the file.
_TOP_BYTE, _PAGES_OF_FILE = (7 if sys.byteorder == "little" else 0), b"\x00\xa0\xa1"


class WrittenBatch(NamedTuple):
    """Location of a written batch.

    `fd`: the segment's descriptor if the segment is new, else None. `dropped`: the numbers of segments that no longer
    exist. `spans`: the offset and length of each buffer.
    """

    segment: int
    fd: int | None
    dropped: tuple[int, ...]
    spans: list[Span]


def _map_whole(fd: int, size: int) -> mmap.mmap:
    """Map a memfd with all its pages at once, because separate page faults would take far longer."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


@dataclass(slots=True)
class _NextBatch:
    """Segment in use for the next batch, in which parts of the batch may be allocated already."""

    number: int
    fd: int | None  # the segment's descriptor if the trainer does not have it yet
    dropped: tuple[int, ...]  # segments that this one replaces
    address: int  # of the segment in this process
    end_offset: int = _FIRST_BUFFER  # of the allocated part


class SegmentWriter:
    """Segments of a worker, and the memory that it allocates in them."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}  # by number, the last used at the end
        self._created_count = 0  # number of segments created so far
        self._spare_count = 0  # number of batches in a row for which several segments were free
        self._expected_bytes = 0  # size of the next batch, estimated from earlier ones
        self._missing_bytes = 0  # size of the allocations for the next batch that had no room in its segment
        self._next_batch: _NextBatch | None = None
        # views of this process, by segment
        self._views: WeakValueDictionary[int, NDArray[np.uint8]] = WeakValueDictionary()

    def allocate(self, size: int) -> memoryview | None:
        """Return `size` bytes for a part of the next batch, or None if there is no room.

        There is no room before the first batches, because their size is unknown.
        """
        if self._next_batch is None:
            if size > self._expected_bytes:
                return None
            self._next_batch = self._take_segment(self._expected_bytes)
        batch = self._next_batch
        whole = self._view(batch.number)
        start = batch.end_offset
        if start + size > len(whole):
            self._missing_bytes += _aligned(size)
            return None
        batch.end_offset = _aligned(start + size)
        return memoryview(whole)[start : start + size]  # type: ignore[arg-type]

    def allocated(self, address: int, size: int) -> memoryview | None:
        """Return the `size` bytes at an address if the next batch has them, else None."""
        batch = self._next_batch
        if batch is None or not _FIRST_BUFFER <= (start := address - batch.address) <= batch.end_offset - size:
            return None
        return memoryview(self._view(batch.number))[start : start + size]  # type: ignore[arg-type]

    def _view(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of a segment: uint8 (segment size,).

        The segment is not reused while this process views a part of them.
        """
        if (view := self._views.get(number)) is None:
            view = self._views[number] = np.frombuffer(self._segments[number], np.uint8)
        return view

    def start_batch(self) -> None:
        """Start a batch.

        If the last batch failed, reuse the memory allocated for it, unless that is still viewed.
        """
        if self._next_batch is not None and self._next_batch.number not in self._views:
            self._next_batch.end_offset = _FIRST_BUFFER

    def write(self, views: Sequence[memoryview], pieces: Sequence[Buffer] = ()) -> WrittenBatch:
        """Write the bytes of one-dimensional views to a segment.

        Views of memory from `allocate` are in the segment already. The `pieces` are written end to end, as one more
        buffer: the last of the spans.
        """
        batch, self._next_batch = self._next_batch, None
        spans, end = _layout(views, batch)
        piece_bytes = sum(map(len, pieces))
        dropped: tuple[int, ...] = ()
        if batch is not None and end + piece_bytes > len(self._segments[batch.number]):
            dropped = self._discard(batch)
            batch = None
            spans, end = _layout(views, None)
        self._expected_bytes = max(_aligned(end + piece_bytes) + self._missing_bytes, self._expected_bytes * 7 // 8)
        self._missing_bytes = 0
        if batch is None:
            batch = self._take_segment(end + piece_bytes)
        segment = self._segments[batch.number]
        for (offset, length, in_segment), view in zip(spans, views, strict=True):
            if not in_segment:
                segment[offset : offset + length] = view
        written = [(offset, length) for offset, length, _ in spans]
        if pieces:
            written.append((end, piece_bytes))
        for piece in pieces:
            segment[end : end + len(piece)] = piece
            end += len(piece)
        return WrittenBatch(batch.number, batch.fd, dropped + batch.dropped, written)

    def _discard(self, batch: _NextBatch) -> tuple[int, ...]:
        """Free the segment of a batch, which is too small for it. Return the numbers of the segments it replaced."""
        if batch.fd is None:
            self._segments[batch.number][0] = _FREE  # the trainer's flag
        else:  # the trainer does not know the segment yet
            os.close(batch.fd)
            del self._segments[batch.number]
        return batch.dropped

    def _take_segment(self, size: int) -> _NextBatch:
        """Take a free segment of at least this size, or create one, and mark it as in use."""
        retired = [number for number, segment in self._segments.items() if _RETIRED in segment[:ALIGN]]
        free = [number for number, segment in self._segments.items() if self._is_free(number, segment)]
        large_enough = [number for number in free if len(self._segments[number]) >= size]
        fd, dropped = None, (retired + free)[:1]
        if large_enough:
            self._spare_count = self._spare_count % _SPARE_BATCHES + 1 if len(large_enough) > 1 else 0
            dropped = large_enough[:1] if self._spare_count == _SPARE_BATCHES else []
            number = large_enough[-1]
            self._segments[number] = self._segments.pop(number)  # move it to the end, as the last used
        else:
            size = -(-size // _ROUND_BYTES) * _ROUND_BYTES
            fd = anonymous_file("savable_pipeline batch", size)
            try:
                mapped = _map_whole(fd, size)
            except OSError:
                os.close(fd)
                raise
            self._created_count += 1
            number = self._created_count
            self._segments[number] = mapped
        for unused in dropped:
            del self._segments[unused]  # unmapped when this process no longer views it
        self._segments[number][0] = _IN_USE
        return _NextBatch(number, fd, tuple(dropped), self._view(number).ctypes.data)

    def _is_free(self, number: int, segment: mmap.mmap) -> bool:
        return segment[:ALIGN] == _ALL_FREE and number not in self._views


def _layout(views: Sequence[memoryview], batch: _NextBatch | None) -> tuple[list[tuple[int, int, bool]], int]:
    """Return (offset, length, whether it is in the segment already) for each view, and the offset after all views.

    `batch` is the batch to write if parts of it are allocated, else None.
    """
    spans = []
    end = _FIRST_BUFFER if batch is None else batch.end_offset
    for view in views:
        offset = end
        in_segment = False
        if batch is not None:
            start = np.frombuffer(view, np.uint8).ctypes.data - batch.address
            in_segment = start >= _FIRST_BUFFER and start + len(view) <= batch.end_offset
            offset = start if in_segment else end
        spans.append((offset, len(view), in_segment))
        end = max(end, _aligned(offset + len(view)))
    return spans, end


class SegmentReader:
    """A process's views of one worker's segments.

    `flag` is the index of the process's flag in each segment. If `private`, other processes do not see what this one
    writes.
    """

    def __init__(self, flag: int = 0, *, private: bool = False) -> None:
        self._flag, self._private = flag, private
        self._segments: dict[Hashable, _MappedSegment] = {}
        self._viewed = [0]  # number of viewed batches, in a list because finalizers change it

    def add(self, number: Hashable, fd: int) -> None:
        """Map a new segment, and close its descriptor."""
        try:
            flags = mmap.mmap(fd, ALIGN) if self._private else _map_whole(fd, 0)
            data = mmap.mmap(fd, 0, mmap.MAP_PRIVATE) if self._private else flags
            self._segments[number] = _MappedSegment(flags, data)
        finally:
            os.close(fd)

    def drop(self, number: Hashable) -> None:
        """Drop a segment. It is unmapped once no tensor views it."""
        del self._segments[number]

    def lend(self, number: Hashable, flag: int) -> None:
        """Mark a segment as in use by the reader with another `flag`.

        This is done before that reader knows of the segment.
        """
        self._segments[number].flags[flag] = _IN_USE

    def release(self, flag: int) -> None:
        """Clear the in-use flags of the ended reader with this `flag` on all segments.

        Retired segments stay so, because a forked child of the reader may view them.
        """
        for segment in self._segments.values():
            if segment.flags[flag] == _IN_USE:
                segment.flags[flag] = _FREE

    def read(self, number: Hashable, spans: list[Span]) -> list[memoryview]:
        """Return the bytes at these spans of a segment, as writable views.

        If 8 batches are viewed already, they are copies.
        """
        segment = self._segments[number]
        if self._viewed[0] >= MOST_VIEWED:
            end = sum(spans[-1])  # the offset plus the length of the last span
            view = memoryview(bytearray(segment.data[:end]))
            segment.flags[self._flag] = _FREE
        else:
            whole = np.frombuffer(segment.data, np.uint8)
            self._viewed[0] += 1
            _free_after(whole, segment, self._flag, self._viewed)
            view = memoryview(whole)  # type: ignore[arg-type]
        return [view[offset : offset + length] for offset, length in spans]

    @property
    def viewed_batches(self) -> int:
        """Number of batches that this process views."""
        return self._viewed[0]


class _MappedSegment(NamedTuple):
    """A segment as mapped by a reader.

    `flags` and `data` are the same mapping unless `data` is private.
    """

    flags: mmap.mmap
    data: mmap.mmap


# Descriptor of this process's page table. A forked child opens its own.
_open_pagemap = functools.cache(lambda process: os.open("/proc/self/pagemap", os.O_RDONLY))
_forks = [0]  # number of times that this process has forked


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(before=_count_fork)


def _free_after(whole: NDArray[np.uint8], segment: _MappedSegment, flag: int, viewed: list[int]) -> None:
    """Mark the segment as free when `whole`, of which all views are parts, is no longer used.

    If the process has forked in the meantime, mark the segment as retired instead.
    """
    owner, forks = os.getpid(), _forks[0]

    def free_segment() -> None:
        if os.getpid() != owner:
            return
        viewed[0] -= 1
        if segment.data is not segment.flags and forks == _forks[0] and _has_own_pages(segment.data):
            segment.data.madvise(mmap.MADV_DONTNEED)
        segment.flags[flag] = _FREE if forks == _forks[0] else _RETIRED

    weakref.finalize(whole, free_segment).atexit = False


def _has_own_pages(data: mmap.mmap) -> bool:
    """Return whether this process has written to a private mapping; True if unknown."""
    address, page = np.frombuffer(data, np.uint8).ctypes.data, mmap.PAGESIZE
    try:
        raw = os.pread(_open_pagemap(os.getpid()), len(data) // page * 8, address // page * 8)
    except OSError:
        return True
    return len(raw) < len(data) // page * 8 or bool(raw[_TOP_BYTE::8].translate(None, _PAGES_OF_FILE))
