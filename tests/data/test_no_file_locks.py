"""Data on a file system without `flock`, as Lustre is where it is mounted without `-o flock`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.stores.opening import index_any
from tests.conftest import write_tar
from tests.support.toy_server import serving_a_machine


@pytest.fixture(autouse=True)
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for shard in range(2):
        members = [(f"{shard}{number}.txt", b"bad" if number == 3 else b"good") for number in range(6)]
        write_tar(tmp_path / "shards" / f"{shard}.tar", members)
    return tmp_path / "shards"


def read(sample: sp.Sample) -> str:
    if sample.text("txt") == "bad":
        raise ValueError("bad text")
    return sample.key


def test_shards_are_indexed_opened_and_found_by_key(shards: Path) -> None:
    path, faults = index_any(str(shards))
    assert path.is_relative_to(shards)
    assert not faults
    samples = sp.open_dataset(shards)
    assert len(samples) == 12
    assert samples["14"].key == "14"
    assert not [*shards.rglob("*.owner")]


def test_a_run_writes_its_ledger_and_its_quarantine_file(shards: Path, tmp_path: Path) -> None:
    pipeline = (
        sp.read(str(shards), on_error="skip", quarantine=tmp_path / "bad.jsonl", epochs=1)
        .map(read, on_error="skip")
        .batch(2)
    )
    with sp.SavableLoader(pipeline, seed=1, lanes=1, ledger=tmp_path / "ledger") as loader:
        batches = [*loader]
    assert len(batches) == 5
    assert sorted(json.loads(line)["key"] for line in (tmp_path / "bad.jsonl").open()) == ["03", "13"]
    assert sp.Ledger(tmp_path / "ledger").find(["14"])["14"]


def test_error_of_a_remote_cache_without_locks_names_other_folders(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_a_machine(tmp_path, monkeypatch) as server:
        shards.rename(tmp_path / "www" / "shards")
        with pytest.raises(sp.SavableError, match=r"no file locks .*SAVABLE_CACHE"):
            sp.open_dataset(f"{server.url}/shards/0.tar")


def test_error_of_a_shard_writer_without_locks_names_other_folders(tmp_path: Path) -> None:
    with pytest.raises(sp.SavableError, match=r"no file locks .*local disk"):
        sp.ShardWriter(tmp_path / "new")


def test_error_of_a_conversion_without_locks_names_other_folders(shards: Path, tmp_path: Path) -> None:
    from savable_pipeline.tools.convert.conversion import convert

    with pytest.raises(sp.SavableError, match=r"no file locks .*local disk"):
        convert(str(shards), str(tmp_path / "new"), reshard=True)
