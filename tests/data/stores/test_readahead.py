"""What is announced to the kernel: exactly the bytes of the samples that will be read, and nothing of small ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.stores import tar_store
from savable_pipeline.data.stores.tar_store import are_in_memory
from tests.conftest import write_tar


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Name of the shard, first byte and end of each announcement."""
    found: list[tuple[str, int, int]] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, offset + length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards, of 3 and 2 samples of 1,024 bytes each."""
    for shard, count in enumerate([3, 2]):
        write_tar(tmp_path / f"{shard}.tar", [(f"k{i}.txt", b"x" * 500) for i in range(count)])
    monkeypatch.setattr(tar_store, "SMALL", 100)
    monkeypatch.setattr(tar_store, "are_in_memory", lambda files, runs: False)
    return tmp_path


def test_each_run_of_samples_is_announced_in_one_call(shards: Path, told: list[tuple[str, int, int]]) -> None:
    open_any(shards).store.prefetch(np.array([1, 2, 3, 4, 0, 4, 2]))
    end = (shards / "0.tar").stat().st_size
    assert told == [
        ("0.tar", 1024, end),  # the last of a shard: to the shard's end
        ("1.tar", 0, (shards / "1.tar").stat().st_size),
        ("0.tar", 0, 1024),
        ("1.tar", 1024, (shards / "1.tar").stat().st_size),
        ("0.tar", 2048, end),
    ]


def test_reader_announces_samples_that_enter_the_buffer(shards: Path, told: list[tuple[str, int, int]]) -> None:
    next(sp.ShuffleBuffer(sp.TarShardReader(shards, sp.Lane(), shuffle=False, epochs=1), size=2))
    assert [name for name, _, _ in told] == ["0.tar", "1.tar"]


def test_restored_buffer_announces_nothing_for_local_shards(shards: Path, told: list[tuple[str, int, int]]) -> None:
    saved = sp.ShuffleBuffer(sp.TarShardReader(shards, sp.Lane()), size=3)
    next(saved)
    told.clear()
    sp.ShuffleBuffer(sp.TarShardReader(shards, sp.Lane()), size=3).restore_state(saved.save_state())
    assert told == []


def test_small_samples_and_shards_that_are_gone_are_not_announced(
    shards: Path, told: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_any(shards)
    (shards / "0.tar").unlink()
    dataset.store.prefetch(np.arange(5))
    assert [name for name, _, _ in told] == ["1.tar"]
    told.clear()
    monkeypatch.setattr(tar_store, "SMALL", 1_000_000)
    dataset.store.prefetch(np.arange(5))
    assert told == []


def test_samples_in_memory_are_not_announced(shards: Path, told: list[tuple[str, int, int]]) -> None:
    dataset = open_any(shards)
    runs = [(0, 0, 1024), (1, 1024, 2048)]
    dataset.read(0, 0, "txt")
    dataset.read(1, 3, "txt")
    assert are_in_memory(dataset.store.files, runs) == hasattr(os, "RWF_NOWAIT")
    assert not are_in_memory(dataset.store.files, [*runs, (1, 0, 1 << 30)])  # beyond the end there is nothing


def test_announced_blocks_on_disk_are_merged(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("k.txt", b"x" * (16 << 20))])
    dataset = open_any(tmp_path)
    descriptor = dataset.store.files[0]
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if are_in_memory(dataset.store.files, [(0, 0, 16 << 20)]):
        pytest.skip("this file system keeps files in memory")
    os.pread(descriptor, 4096, 0)
    assert are_in_memory(dataset.store.files, [(0, 0, 4096)])
    assert not are_in_memory(
        dataset.store.files, [(0, 0, 4096), (0, 4096, 8 << 20)]
    )  # a look may bring what it looks at


def test_long_samples_are_not_announced(
    shards: Path, told: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_store, "_LONG", 2048)
    write_tar(
        shards / "0.tar", [("a.txt", b"x" * 500), ("b.txt", b"x" * 2000), ("c.txt", b"x"), ("d.txt", b"x" * 9000)]
    )
    dataset = open_any(shards)
    dataset.store.prefetch(np.arange(4))
    assert told == [("0.tar", 0, 1024), ("0.tar", 1024 + 2560, 2 * 1024 + 2560)]
    dataset.store.prefetch(np.array([1]))
    assert len(told) == 2
