"""A dataset: every part as `tarfile` reads it, and clear errors when the shards are no longer what was indexed."""

from __future__ import annotations

import gc
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores import shard_files
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.check.dataset_check import check_dataset
from tests.conftest import write_tar


def all_samples(dataset: Dataset, epoch: int = 0) -> list[Sample]:
    return dataset.open_samples(np.array([(i, epoch) for i in range(dataset.count)], REF))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of 2, 0 and 3 samples, of other layouts."""
    root = tmp_path / "shards"
    write_tar(root / "a/0.tar", [("x.json", b"{}"), ("x.txt", b"one"), ("y.txt", b"t" * 1000)])
    write_tar(root / "b.tar", [("README", b"")])
    write_tar(
        root / "c.tar",
        [("p/k0.bin", b""), ("p/k1.bin", bytes(range(256)) * 40), ("p/k2.JPG", b"j"), ("p/k2.txt", b"z")],
    )
    return root


def test_every_part_has_the_bytes_that_tarfile_reads(shards: Path) -> None:
    expected = []
    for name in ("a/0.tar", "c.tar"):
        with tarfile.open(shards / name) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                expected.append((name, member.name, file.read()))
    samples = all_samples(open_any(shards))
    found = [(s.shard, f"{s.key}.{extension}", data) for s in samples for extension, data in s.items()]
    assert found == expected


def test_samples_are_counted_through_all_shards_sorted_by_name(shards: Path) -> None:
    dataset = open_any(shards)
    samples = all_samples(dataset, epoch=3)
    assert [(s.key, s.shard, s.offset) for s in samples] == [
        ("x", "a/0.tar", 0),
        ("y", "a/0.tar", 2048),
        ("p/k0", "c.tar", 0),
        ("p/k1", "c.tar", 512),
        ("p/k2", "c.tar", 512 + 512 + 10240),
    ]
    assert [tuple(s.ref) for s in samples] == [(dataset.source, 3, i, 0) for i in range(5)]
    assert dataset.firsts.tolist() == [0, 2, 2, 5]
    assert [entry[:2] for entry in dataset.manifest()] == [["a/0.tar", 2], ["b.tar", 0], ["c.tar", 3]]


def test_refs_in_any_order_and_repeated_name_their_samples(shards: Path) -> None:
    samples = open_any(shards).open_samples(np.array([(4, 0), (1, 7), (4, 1)], REF))
    assert [(s.key, s.ref.epoch, s.ref.index) for s in samples] == [("p/k2", 0, 4), ("y", 7, 1), ("p/k2", 1, 4)]


def test_subset_of_the_shards_is_a_separate_dataset(shards: Path) -> None:
    open_any(shards)
    alone = open_any(shards / "c.tar")
    assert [sample.key for sample in all_samples(alone)] == ["p/k0", "p/k1", "p/k2"]
    assert all_samples(alone)[1]["bin"] == bytes(range(256)) * 40


def test_source_is_a_hash_of_its_name_not_of_its_path(shards: Path) -> None:
    def of_source(name: str) -> Dataset:
        return open_any(shards, source=name)

    assert open_any(shards).source == open_any(shards / "c.tar").source == of_source("").source
    assert of_source("web").source != open_any(shards).source


@pytest.mark.parametrize("change", ["longer", "shorter", "gone", "a folder"])
def test_a_shard_that_changed_since_it_was_indexed_is_an_error_when_it_is_opened(shards: Path, change: str) -> None:
    samples = all_samples(open_any(shards))
    path = shards / "c.tar"
    if change == "longer":
        path.write_bytes(path.read_bytes() + bytes(512))
    elif change == "shorter":
        os.truncate(path, 2048)
    else:
        path.unlink()
        if change == "a folder":
            path.mkdir()
    with pytest.raises(ShardError, match=r"c\.tar: .*indexed"):
        samples[3]["bin"]
    assert samples[0]["txt"] == b"one"  # the others are not touched by it


def test_shard_truncated_while_open_is_an_error(shards: Path) -> None:
    samples = all_samples(open_any(shards))
    assert samples[4]["txt"] == b"z"
    os.truncate(shards / "c.tar", 2048)
    with pytest.raises(ShardError, match=r"c\.tar: 9216 bytes at byte 2048 are missing"):
        samples[3]["bin"]
    with pytest.raises(ShardError, match=r"c\.tar"):
        samples[4]["txt"]
    with pytest.raises(ShardError, match=r"c\.tar"):
        _ = samples[4].key


def test_short_read_is_continued(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = all_samples(open_any(shards))
    pread = os.pread
    assert samples[3]["bin"]  # opens the shard
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 100), offset))
    assert samples[3]["bin"] == bytes(range(256)) * 40


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def few_handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(shard_files, "OPEN_SHARDS", 3)
    gc.collect()
    yield open_files()


def test_more_shards_than_handles_are_read_and_closed(make_shards: Any, few_handles: int) -> None:
    dataset = open_any(make_shards([1] * 10))
    samples = all_samples(dataset)
    for _ in range(2):
        assert [sample.json()["id"] for sample in samples] == list(range(10))
        assert [int(sample.key[1:]) for sample in samples] == list(range(10))
        assert len(dataset.store.files) == 3
        assert open_files() <= few_handles + 3 + 1  # and the index
    del dataset, samples
    gc.collect()
    assert open_files() <= few_handles


def test_an_error_at_opening_leaves_no_file_open(shards: Path, few_handles: int) -> None:
    dataset = open_any(shards)
    os.truncate(shards / "c.tar", 2048)
    before = open_files()
    for _ in range(5):
        with pytest.raises(ShardError):
            all_samples(dataset)[3]["bin"]
    assert open_files() == before


def test_a_dataset_works_after_the_working_folder_changed(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards.parent)
    dataset = open_any("shards")
    monkeypatch.chdir("/")
    assert all_samples(dataset)[0]["txt"] == b"one"


def test_shards_of_another_owner_are_read_too(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & getattr(os, "O_NOATIME", 0):
            raise PermissionError(1, "not the owner")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    assert open_any(shards).read(0, 0, "json") == b"{}"


def test_shard_deleted_from_an_indexed_folder_is_an_error_until_reindexed(shards: Path) -> None:
    open_any(shards)
    (shards / "c.tar").unlink()
    with pytest.raises(ShardError, match=r"1 indexed shards are gone, such as c\.tar\. Restore them"):
        open_any(shards)
    assert open_any(shards, on_error="skip").count == 5  # to be counted as they are read
    index_files(shards, TARS)
    assert open_any(shards).count == 2


@pytest.mark.parametrize("filled", ["wholly", "from some point"])
def test_shard_of_zeros_is_an_error_or_a_counted_skip(make_shards: Any, filled: str) -> None:
    root = make_shards([100, 100])
    size = (root / "0001.tar").stat().st_size
    with (root / "0001.tar").open("r+b") as file:
        file.truncate(0 if filled == "wholly" else 21 * 1024)
        file.truncate(size)
    with pytest.raises(ShardError, match=r"0001\.tar: zeros at byte (0|21504), .* zero-filled"):
        open_any(root)
    (problem,) = check_dataset(root, processes=1).problems
    assert (problem.shard, problem.reason) == ("0001.tar", "damaged shard")
    reader = sp.TarShardReader(root, sp.Lane(), epochs=1, on_error="skip")
    assert len(list(reader)) == (100 if filled == "wholly" else 120)  # the last before the zeros may go on behind them
    assert reader.counts["skipped/rest of a damaged or missing shard"] == 1


def test_unlistable_folder_is_an_error_or_a_counted_skip(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path) == str(shards / "a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ShardError, match="a: Permission denied: this folder cannot be listed"):
        open_any(shards)
    reader = sp.TarShardReader(shards, sp.Lane(), epochs=1, on_error="skip")
    assert len(list(reader)) == 3
    assert reader.counts["skipped/rest of a damaged or missing shard"] == 1
    assert "unlistable folder" in {problem.reason for problem in check_dataset(shards, processes=1).problems}
    with pytest.raises(ShardError, match="cannot be listed"):
        sp.TarShardReader(shards, sp.Lane(), on_error=lambda error: False)


def test_reads_are_recorded_until_the_context_ends_also_after_an_error(shards: Path) -> None:
    dataset = open_any(shards)
    samples, noted = all_samples(dataset), list[tuple[int, int]]()
    with pytest.raises(KeyError), dataset.observe_reads(lambda size, taken_ns: noted.append((size, taken_ns))):
        assert samples[0]["txt"] == b"one" and samples[1].array("txt").nbytes == 1000
        assert samples[0]["jpg"]
    assert samples[0]["json"] == b"{}" and [size for size, _ in noted] == [3, 1000]
    assert all(taken_ns > 0 for _, taken_ns in noted)
