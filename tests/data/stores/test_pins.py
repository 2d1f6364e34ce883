"""A shard that changes under a run is an error within a second, and no batch of it is given after that."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core import files as open_files
from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.stores import shard_files
from tests.conftest import write_numbered_shards, write_tar


class Ids(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        return int(sample.json()["id"])


def overwrite(shard: Path) -> None:
    """Other bytes of the same size in place, as `cp` and `rsync --inplace` write them."""
    raw = shard.read_bytes().replace(b'{"id": ', b'{"id":-')
    time.sleep(0.02)  # a tick of the clock that stamps files
    with shard.open("r+b") as file:
        file.write(raw)


class Pipeline:
    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, lane: Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(self.root, lane, shuffle=False), Ids()), size=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_read_from_an_overwritten_shard_is_never_yielded(
    make_shards: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_CHECK_S", 0.0)
    monkeypatch.setattr(shard_files, "_CHECK_MULTIPLE", 0)  # workers are forked
    root = make_shards([400])
    with sp.SavableLoader(
        Pipeline(root), seed=0, lanes=2, num_workers=workers, workers=sp.Workers(start_method="fork")
    ) as loader:
        batches = iter(loader)
        given = [next(batches) for _ in range(5)]
        overwrite(root / "0000.tar")
        with pytest.raises(
            sp.ShardError, match=r"0000\.tar: it was overwritten while .*\nThe slots [\d, ]+ may have bytes"
        ):
            given += [next(batches) for _ in range(100)]
        assert all(number >= 0 for batch in given for number in batch)
        if not workers:  # new workers open the shards again
            with pytest.raises(sp.ShardError, match="it was overwritten while this run read it"):
                next(batches)


def test_shards_are_checked_once_a_second_and_before_closing(make_shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(shard_files.time, "monotonic", lambda: now)
    root = make_shards([2, 2, 2])
    files = open_any(root).store.files  # type: ignore[attr-defined]
    files[0], files[1]
    files.verify(5)
    overwrite(root / "0000.tar")
    files.verify(6)
    now = 100.9
    files.verify(7)
    now = 101.1
    with pytest.raises(sp.ShardError, match=r"0000.*\nThe slots 6, 7, 8 may have bytes of both, but slot 8"):
        files.verify(8)

    files = open_any(root).store.files  # type: ignore[attr-defined]
    monkeypatch.setattr(shard_files, "OPEN_SHARDS", 1)
    files.verify(1)
    files[0]
    overwrite_back = (root / "0000.tar").read_bytes()
    time.sleep(0.02)
    (root / "0000.tar").write_bytes(overwrite_back)
    files[1]
    with pytest.raises(sp.ShardError, match="it was overwritten"):
        files.verify(2)
    with pytest.raises(sp.ShardError, match="it was replaced while this run read it"):
        files[0]


def test_shard_of_equal_size_with_another_layout_is_detected_at_opening(tmp_path: Path) -> None:
    def write(names: list[str]) -> None:
        write_tar(tmp_path / "a.tar", [(name, json.dumps(name).encode()) for name in names])

    names = [f"k{i}.json" for i in range(9)]
    for change in ({0: "k0.text"}, {4: "k4.text"}, {8: "k8.text"}):
        write(names)
        dataset = open_any(tmp_path)
        stat = (tmp_path / "a.tar").stat()
        write([change.get(i, name) for i, name in enumerate(names)])
        os.utime(tmp_path / "a.tar", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as rsync -t leaves it
        with pytest.raises(sp.ShardError, match="the shard was rewritten since it was indexed, at the same size"):
            dataset.open_samples(np.array([(1, 0)], REF))[0]["json"]
        (tmp_path / ".nv-meta/savable.index").unlink()


def test_moved_or_touched_shard_is_read(tmp_path: Path) -> None:
    write_numbered_shards(tmp_path / "shards", [3])
    dataset = open_any(tmp_path / "shards")
    os.utime(tmp_path / "shards/0000.tar", (1, 1))
    (sample,) = dataset.open_samples(np.array([(1, 0)], REF))
    assert sample.json()["id"] == 1
    dataset.verify(0)


def test_only_unexplained_inode_changes_are_examined(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_files, "_CHECK_S", 0.0)
    monkeypatch.setattr(shard_files, "_CHECK_MULTIPLE", 0)
    shard = make_shards([9, 9]) / "0000.tar"
    files = open_any(shard.parent).store.files  # type: ignore[attr-defined]
    files[0]
    stat = shard.stat()
    changes = [
        lambda: shard.chmod(0o600),
        lambda: os.link(shard, shard.with_suffix(".again")),
        shard.with_suffix(".again").unlink,
        lambda: shard.rename(shard.with_suffix(".moved")),
    ]
    for slot, change in enumerate(changes):
        time.sleep(0.02)
        change()
        files.verify(slot)
        assert bool(caplog.records) == (slot == 3)  # moved: no reason is seen, but the headers are equal
    shard.with_suffix(".moved").rename(shard)
    with shard.open("r+b") as file:
        file.write(b"other")  # the name of the first member
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(sp.ShardError, match=r"0000\.tar: it was overwritten while this run read it"):
        files.verify(9)
    assert len(caplog.records) == 1


def test_threads_may_close_shards_and_yield_batches_during_a_check(
    make_shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_shards([2, 2])
    files = open_any(root).store.files  # type: ignore[attr-defined]
    first = int(files[0]), int(files[1])
    (tmp_path / "other").touch()
    others, real = [], os.fstat

    def meanwhile(descriptor: int) -> os.stat_result:
        monkeypatch.setattr(shard_files.os, "fstat", real)
        if descriptor == first[0]:
            files.close_oldest()
            others.append(os.open(tmp_path / "other", os.O_RDONLY))
            assert others != [first[0]], "its number must not be reused while it is looked at"
            files.verify(4)
        return real(descriptor)

    files.verify(2)  # looks
    files.verify(3)
    monkeypatch.setattr(shard_files.os, "fstat", meanwhile)
    files.verify_yielded()
    overwrite(root / "0001.tar")
    with pytest.raises(sp.ShardError, match=r"0001\.tar: .* Restore it, .*\nThe slots 4 may have bytes of both$"):
        files.verify_yielded()
    for descriptor in others:
        os.close(descriptor)


def test_files_are_closed_at_interpreter_exit(make_shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_any(make_shards([2])).store.files  # type: ignore[attr-defined]
    descriptor, ignored = int(files[0]), []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(open_files, "os", None)
    del files
    gc.collect()
    monkeypatch.undo()
    assert not ignored
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_run_resumes_without_a_deleted_shard_as_the_error_suggests(make_shards: Any) -> None:
    root = make_shards([40, 40, 40])

    def run(on_error: Any, state: Any = None) -> tuple[Any, list[int]]:
        pipeline = sp.read(root, on_error=on_error).encode(Ids()).batch(1)
        with sp.SavableLoader(pipeline, seed=0, lanes=1) as loader:
            if state is not None:
                loader.load_state_dict(state)
            begun = [next(loader).item() for _ in range(5)]
            return loader.state_dict(), begun + [next(loader).item() for _ in range(50)]

    state, _ = run("raise")
    _, expected = run("raise", state)
    (root / "0001.tar").unlink()
    with pytest.raises(sp.ShardError, match=r'pass on_error="skip"'):
        run("raise", state)
    kept = [number for number in expected if not 40 <= number < 80]
    assert len(kept) < len(expected) and run("skip", state)[1][: len(kept)] == kept
