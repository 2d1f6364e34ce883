"""Shared memory between a worker and the trainer: what is viewed stays, what is dropped is used again."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.segments import KEPT, SegmentReader, SegmentWriter


class Passing:
    """A writer and a reader in one process, joined as worker and trainer join them."""

    def __init__(self) -> None:
        self.writer, self.reader = SegmentWriter(), SegmentReader()
        self.made = 0

    def __call__(self, *parts: bytes) -> list[memoryview]:
        written = self.writer.write([memoryview(part) for part in parts])
        if written.dropped is not None:
            self.reader.drop(written.dropped)
        if written.fd is not None:
            self.made += 1
            self.reader.add(written.segment, written.fd)
        return self.reader.read(written.segment, written.places)


def test_bytes_arrive_in_their_places_and_can_be_written_to() -> None:
    passed = Passing()(b"one", b"", b"x" * 100_000)
    assert [bytes(view) for view in passed] == [b"one", b"", b"x" * 100_000]
    passed[0][0] = 0
    assert bytes(passed[0]) == b"\0ne"


def test_a_segment_is_used_again_when_the_last_view_of_it_is_gone_and_not_before() -> None:
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


def test_a_consumer_that_keeps_everything_is_given_copies_and_the_worker_never_runs_out() -> None:
    passing = Passing()
    kept = [passing(bytes([i]) * 3000)[0] for i in range(40)]
    assert passing.made == KEPT + 1
    assert [bytes(view) for view in kept] == [bytes([i]) * 3000 for i in range(40)]


def test_larger_bytes_take_the_place_of_segments_that_are_too_small() -> None:
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


class Images(sp.TaskEncoder):
    """Batches of one large tensor and some small things."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return torch.full((3, 64, 64), sample.json()["id"], dtype=torch.int32)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        stacked = torch.stack(items)
        return {"image": stacked, "ids": stacked[:, 0, 0, 0].clone(), "array": np.ones((len(items), 5000))}


def images(shards: str, lane: sp.Lane) -> sp.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Images()), size=4)


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(images, str(make_shards([60, 60])))


def test_batches_that_are_kept_keep_their_content_while_others_come(pipeline: Any) -> None:
    with sp.SavableLoader(pipeline, seed=1, lanes=6, num_workers=2) as loader:
        kept = [batch for _, batch in zip(range(60), loader, strict=False)]
    for batch in kept:  # workers and loader are gone
        assert (batch["image"] == batch["ids"].view(-1, 1, 1, 1)).all()
        batch["image"].zero_()


def test_memory_and_descriptors_do_not_grow(pipeline: Any) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

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
        assert open_files() == files and 2 <= mapped() - others <= 2 * (KEPT + 1)
    del loader, _
    gc.collect()
    assert (open_files(), mapped()) == (before, others)
