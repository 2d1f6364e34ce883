"""Descriptors are bounded over all datasets of a process, and running out of them is never a fault of the data."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.core.files import close_down_to, with_handles
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def limited(more: int) -> Iterator[int]:
    """Permits this process `more` descriptors than it has; yields the limit."""
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, hard))
    try:
        yield highest + 1 + more
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def taken(left: int) -> Iterator[None]:
    """Takes all descriptors but `left` of those that are free."""
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(held.pop())
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


class Ids(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        return int(sample.json()["id"])


def test_many_datasets_together_keep_half_of_the_descriptor_limit_open(make_shards: Any) -> None:
    roots = [make_shards([2] * 60, folder=f"shards{i}") for i in range(5)]
    with limited(100) as limit:
        before = open_files()
        lane = sp.Lane()
        readers = [sp.TarShardReader(root, lane, epochs=1, on_error="skip") for root in roots]
        blend = sp.Blend({f"s{i}": r for i, r in enumerate(readers)}, weights={f"s{i}": 1 for i in range(5)})
        encode = sp.Encode(blend, Ids(), on_error="skip")
        assert sorted(encode) == sorted([*range(120)] * 5)
        assert not encode.counts.get("skipped/unreadable shard")
        assert open_files() - before <= limit // 2 + 5  # and the indexes


def test_process_out_of_descriptors_closes_those_of_datasets_and_retries(make_shards: Any) -> None:
    root = make_shards([1] * 20)
    dataset = open_any(root, on_error="skip")
    samples = dataset.open_samples(np.array([(i, 0) for i in range(20)], REF))
    with limited(60):
        assert [sample.json()["id"] for sample in samples[:10]] == list(range(10))
        with taken(left=0):
            assert [sample.json()["id"] for sample in samples] == list(range(20))
            assert open_any(root).count == 20


def test_running_out_of_descriptors_is_never_skipped(make_shards: Any) -> None:
    root = make_shards([4, 4])
    new = make_shards([3], folder="new")
    encode = sp.Encode(sp.TarShardReader(root, sp.Lane(), epochs=1, on_error="skip"), Ids(), on_error="skip")
    with limited(30), taken(left=0), pytest.raises(sp.SavableError, match=r"raise `ulimit -n`"):
        next(encode)
    assert len(list(encode)) == 8
    with limited(30), taken(left=0), pytest.raises(sp.SavableError, match=r"raise `ulimit -n`"):
        sp.TarShardReader(new, sp.Lane(), on_error="skip")


def test_an_encoder_that_runs_out_of_descriptors_is_not_skipped(make_shards: Any) -> None:
    class Opening(Ids):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

    encode = sp.Encode(sp.TarShardReader(make_shards([4]), sp.Lane(), epochs=1), Opening(), on_error="skip")
    with pytest.raises(sp.EncodeError, match="Too many open files"):
        next(encode)


def test_read_is_right_although_another_thread_closes_the_shard(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = make_shards([9]), make_shards([50, 9], folder="other") / "0001.tar"
    dataset = open_any(mine)
    samples, closed, real = dataset.open_samples(np.array([(i, 0) for i in range(9)], REF)), [], os.pread

    def meanwhile(descriptor: int, size: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", real)
        close_down_to(0)
        closed.append(os.open(other, os.O_RDONLY))  # which has the lowest number that is free
        return real(descriptor, size, offset)

    samples[0]["json"]
    monkeypatch.setattr(os, "pread", meanwhile)
    assert samples[5].json()["id"] == 5
    os.close(*closed)


def in_threads(call: Callable[[int], None]) -> None:
    """Call with each number 0 … 7 in a thread of its own, all at the same time; they take turns as often as can be."""
    interval, start_batch = sys.getswitchinterval(), threading.Barrier(8)

    def run(number: int) -> None:
        start_batch.wait()
        call(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


def test_threads_with_few_descriptors_read_each_sample_correctly(make_shards: Any) -> None:
    root, found = make_shards([2] * 60), dict[int, list[int]]()

    def read(number: int) -> None:
        dataset, order = open_any(root), np.random.default_rng(number).integers(0, 120, 1000)
        samples = dataset.open_samples(np.array([(i, 0) for i in order], REF))
        wrong = [i for i, sample in zip(order, samples, strict=True) if sample.json()["id"] != i]
        dataset.verify(number)
        found[number] = wrong

    with limited(80):
        in_threads(read)
    assert found == {number: [] for number in range(8)}


def test_opening_is_retried_if_another_thread_has_just_closed_descriptors() -> None:
    answers = iter([OSError(errno.EMFILE, "Too many open files"), None])

    def act() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "done"

    assert with_handles(act) == "done"
