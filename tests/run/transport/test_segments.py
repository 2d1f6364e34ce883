"""Shared memory between a worker and the trainer: what is viewed stays, what is dropped is used again."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.transport.batch_pickle import Buffer
from savable_pipeline.run.transport.segments import MOST_VIEWED, SegmentReader, SegmentWriter


class Passing:
    """A writer and a reader in one process, joined as worker and trainer join them."""

    def __init__(self) -> None:
        self.writer, self.reader = SegmentWriter(), SegmentReader()
        self.made = 0

    def __call__(self, *parts: bytes | memoryview, pieces: Sequence[Buffer] = ()) -> list[memoryview]:
        written = self.writer.write([memoryview(part) for part in parts], pieces)
        self.spans = written.spans
        for number in written.dropped:
            self.reader.drop(number)
        if written.fd is not None:
            self.made += 1
            self.reader.add(written.segment, written.fd)
        return self.reader.read(written.segment, written.spans)


def test_bytes_arrive_at_their_offsets_and_are_writable() -> None:
    passed = Passing()(b"one", b"", b"x" * 100_000)
    assert [bytes(view) for view in passed] == [b"one", b"", b"x" * 100_000]
    passed[0][0] = 0
    assert bytes(passed[0]) == b"\0ne"


def test_pieces_are_contiguous_after_the_other_bytes() -> None:
    passing = Passing()
    passed = passing(b"one", pieces=[b"two", bytearray(b""), b"t" * 100_000, b"hree"])
    assert [bytes(view) for view in passed] == [b"one", b"two" + b"t" * 100_000 + b"hree"]
    begun = passing.writer.allocate(1000)
    assert begun is not None
    begun[:] = b"x" * 1000
    del passed
    large = [b"four", b"five" * 100_000]  # too large for the segment that was started
    assert [bytes(view) for view in passing(begun, pieces=large)] == [b"x" * 1000, b"".join(large)]


def test_segment_is_reused_only_after_its_last_view_is_gone() -> None:
    passing = Passing()
    first = torch.frombuffer(passing(b"a" * 5000)[0], dtype=torch.uint8)
    half = first[2500:]
    second = torch.frombuffer(passing(b"b" * 5000)[0], dtype=torch.uint8)
    assert passing.made == 2
    del first
    passing(b"c" * 5000)
    assert passing.made == 3 and int(half.sum()) == 2500 * ord("a")
    del half
    for _ in range(10):
        passing(b"d" * 5000)
    assert passing.made == 3 and int(second.sum()) == 5000 * ord("b")


def test_segment_is_dropped_once_another_was_free_for_many_batches() -> None:
    passing = Passing()
    first = passing(b"a" * 5000)
    for _ in range(100):
        passing(b"b" * 5000)
    assert len(passing.reader._segments) == 2, "the trainer views one while the next is written"
    first += passing(b"c" * 5000)
    passing(b"d" * 5000)
    del first
    assert len(passing.reader._segments) == 3
    for _ in range(100):
        passing(b"e" * 5000)
    assert len(passing.reader._segments) == 1 and passing.made == 3


def test_trainer_that_keeps_every_batch_gets_copies() -> None:
    passing = Passing()
    kept = [passing(bytes([i]) * 3000)[0] for i in range(40)]
    assert passing.made == MOST_VIEWED + 1
    assert [bytes(view) for view in kept] == [bytes([i]) * 3000 for i in range(40)]


def test_too_small_segments_are_replaced() -> None:
    passing = Passing()
    for size in (1000, 100_000, 300_000, 5_000_000, 10):
        assert bytes(passing(b"z" * size)[0]) == b"z" * size
    assert passing.made == 4 and len(passing.writer._segments) == len(passing.reader._segments) == 1


def test_a_forked_child_that_drops_its_views_frees_nothing() -> None:
    passing = Passing()
    view = np.frombuffer(passing(b"a" * 5000)[0], np.uint8)
    child = os.fork()
    if not child:
        del view
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    passing(b"b" * 5000)
    assert passing.made == 2 and bytes(view) == b"a" * 5000


def test_segment_viewed_during_a_fork_is_never_reused() -> None:
    """The child may view it still, long after the trainer has let go."""
    passing = Passing()
    view = np.frombuffer(passing(b"a" * 5000)[0], np.uint8)
    asked, answer = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(asked[0], 1)
        os.write(answer[1], bytes(view[:3]))
        os._exit(0)
    del view
    for _ in range(5):
        passing(b"b" * 5000)
    os.write(asked[1], b"?")
    os.waitpid(child, 0)
    assert os.read(answer[0], 3) == b"aaa" and passing.made == 2
    for descriptor in (*asked, *answer):
        os.close(descriptor)


# Parts that are made in the segment of the next batch.


def test_buffers_allocated_in_the_segment_are_not_copied_and_others_follow_them() -> None:
    passing = Passing()
    assert passing.writer.allocate(10) is None  # before the first batch no one knows how large they are
    passing(b"a" * 5000)
    part = passing.writer.allocate(3000)
    assert part is not None
    part[:] = b"b" * 3000
    where = np.frombuffer(part, np.uint8).ctypes.data
    views = passing(b"c" * 1000, part[100:2100], b"d" * 500)
    assert [bytes(view) for view in views] == [b"c" * 1000, b"b" * 2000, b"d" * 500]
    assert passing.made == 1 and passing.spans == [(3072, 1000), (164, 2000), (4096, 500)]
    part[100] = ord("x")  # it is the same memory
    assert bytes(views[1][:2]) == b"xb" and where % 64 == 0


def test_batch_that_outgrows_its_segment_is_moved() -> None:
    passing = Passing()
    passing(b"a" * 70_000)
    for size in (200_000, 400_000, 10, 10):
        passing.writer.start_batch()
        part = passing.writer.allocate(60_000)
        assert part is not None
        part[:] = b"p" * 60_000
        views = passing(part, b"q" * size)
        assert [bytes(view) for view in views] == [b"p" * 60_000, b"q" * size]
        assert passing.writer.allocate(1 << 30) is None
        del views
    assert len(passing.reader._segments) <= 2 and passing.writer._segments.keys() <= passing.reader._segments.keys()


def test_segment_with_memory_kept_by_the_worker_is_not_reused() -> None:
    """An encoder that keeps what it made, against the rules, spoils nothing that the trainer sees."""
    passing = Passing()
    passing(b"a" * 5000)
    kept = passing.writer.allocate(4000)
    assert kept is not None
    kept[:] = b"k" * 4000
    passing(kept)
    for _ in range(4):
        passing.writer.start_batch()
        part = passing.writer.allocate(4000)
        assert part is not None
        part[:] = b"z" * 4000
        assert bytes(passing(part)[0]) == b"z" * 4000
        del part
    assert bytes(kept) == b"k" * 4000


def test_memory_allocated_for_a_failed_batch_is_reused() -> None:
    passing = Passing()
    passing(b"a" * 5000)
    for _ in range(10):
        passing.writer.start_batch()
        part = passing.writer.allocate(4000)
        assert part is not None
        del part
    assert passing.made == 1


class Images(sp.TaskEncoder):
    """Batches of one large tensor and some small things."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return torch.full((3, 64, 64), sample.json()["id"], dtype=torch.int32)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        stacked = torch.stack(items)
        return {"image": stacked, "ids": stacked[:, 0, 0, 0].clone(), "array": np.ones((len(items), 5000))}


def images(shards: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Images()), size=4)


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(images, str(make_shards([60, 60])))


def test_batches_that_the_trainer_still_views_do_not_change(pipeline: Any) -> None:
    with sp.SavableLoader(pipeline, seed=1, lanes=6, num_workers=2) as loader:
        kept = [batch for _, batch in zip(range(60), loader, strict=False)]
    for batch in kept:  # workers and loader are gone
        assert (batch["image"] == batch["ids"].view(-1, 1, 1, 1)).all()
        batch["image"].zero_()


def test_memory_and_descriptors_do_not_grow(pipeline: Any) -> None:
    def open_files() -> int:
        """Without those of mapped segments, of which there may be more or fewer: Python keeps one for each."""
        names = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum("savable_pipeline batch" not in name for name in names)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:savable_pipeline")

    gc.collect()
    before, others = open_files(), mapped()
    with sp.SavableLoader(pipeline, seed=1, lanes=6, num_workers=2) as loader:
        for step, _ in enumerate(loader):
            if step == 20:
                files = open_files()
            if step == 200:
                break
        assert open_files() == files and 2 <= mapped() - others <= 2 * (MOST_VIEWED + 1)
    del loader, _
    gc.collect()
    assert (open_files(), mapped()) == (before, others)
