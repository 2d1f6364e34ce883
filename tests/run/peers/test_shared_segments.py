"""A segment with two readers: it is reused once both flags are free, and each reader's writes stay its own."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from savable_pipeline.run.transport import segments
from savable_pipeline.run.transport.segments import SegmentReader, SegmentWriter


@pytest.fixture
def shared() -> tuple[SegmentWriter, SegmentReader, SegmentReader]:
    """A writer, and two readers of its first segment, which has the bytes "aaa"."""
    writer, first, second = SegmentWriter(), SegmentReader(0, private=True), SegmentReader(1, private=True)
    written = writer.write([memoryview(b"a" * 3)])
    assert written.fd is not None
    for reader in (first, second):
        reader.add(1, os.dup(written.fd))
    os.close(written.fd)
    first.lend(1, 1)
    return writer, first, second


def test_segment_is_reused_once_both_readers_are_free(
    shared: tuple[SegmentWriter, SegmentReader, SegmentReader],
) -> None:
    writer, first, second = shared
    views = [np.frombuffer(reader.read(1, [(64, 3)])[0], np.uint8) for reader in (first, second)]
    del views[0]
    assert writer.write([memoryview(b"b" * 3)]).segment == 2
    assert bytes(views[0]) == b"aaa"
    views.clear()
    assert 1 in (writer.write([memoryview(b"c" * 3)]).segment, writer.write([memoryview(b"d" * 3)]).segment)


def test_writes_to_a_batch_are_private_and_dropped_with_it(
    shared: tuple[SegmentWriter, SegmentReader, SegmentReader],
) -> None:
    writer, first, second = shared
    mine, other = (np.frombuffer(reader.read(1, [(64, 3)])[0], np.uint8) for reader in (first, second))
    mine[:] = 7
    assert bytes(other) == b"aaa"
    del mine, other
    assert writer.write([memoryview(b"b" * 3)]).segment == 1
    assert bytes(first.read(1, [(64, 3)])[0]) == b"bbb"


def test_unwritten_pages_of_a_segment_stay_mapped(shared: tuple[SegmentWriter, SegmentReader, SegmentReader]) -> None:
    _, first, _ = shared
    data = first._segments[1].data
    mine = np.frombuffer(first.read(1, [(64, 8192)])[0], np.uint8)
    assert mine.sum() == 3 * ord("a")
    del mine
    assert (pages_of(data) > 0).all()
    mine = np.frombuffer(first.read(1, [(64, 8192)])[0], np.uint8)
    mine[5000] = 7
    del mine
    assert (pages_of(data) == 0).all()


def pages_of(data: Any) -> Any:
    """The entries of the first three pages in the system's table of pages; 0 for one that is not mapped."""
    address = np.frombuffer(data, np.uint8).ctypes.data
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        return np.frombuffer(os.pread(file.fileno(), 24, address // mmap.PAGESIZE * 8), np.uint64)


def test_writes_to_a_batch_are_dropped_if_the_system_cannot_list_written_pages(
    shared: tuple[SegmentWriter, SegmentReader, SegmentReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError

    monkeypatch.setattr(segments.os, "pread", fail)
    test_writes_to_a_batch_are_private_and_dropped_with_it(shared)


def test_segment_of_a_lost_reader_is_free(shared: tuple[SegmentWriter, SegmentReader, SegmentReader]) -> None:
    writer, first, _ = shared
    first.read(1, [(64, 3)])
    assert writer.write([memoryview(b"b" * 3)]).segment == 2
    first.release(1)
    assert writer.write([memoryview(b"c" * 3)]).segment == 1


def test_segment_viewed_in_a_fork_of_a_reader_is_never_reused(
    shared: tuple[SegmentWriter, SegmentReader, SegmentReader],
) -> None:
    writer, first, second = shared
    first.read(1, [(64, 3)])
    view = np.frombuffer(second.read(1, [(64, 3)])[0], np.uint8)
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    del view
    second.release(1)
    assert [writer.write([memoryview(b"b" * 3)]).segment for _ in range(3)] == [2, 3, 4]
