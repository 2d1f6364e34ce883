"""A network disk that fails for a moment is read again; one that stays away is no fault of the data."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core import files
from savable_pipeline.errors import RemoteError
from tests.support.toy_stores import WRITERS

READERS = {"tar": sp.TarShardReader, "parquet": custom.ParquetReader, "arrow": custom.ArrowReader}
READERS |= {"jsonl": custom.JsonlReader}
Fail = Callable[..., None]


class Everything(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        first = next(iter(sample))
        return sample.key, bytes(sample.array(first)), {part: sample[part] for part in sample}


def items(kind: str, folder: Path, **settings: Any) -> Iterator[Any]:
    return iter(sp.Encode(READERS[kind](folder, sp.Lane(), shuffle=False, epochs=1, **settings), Everything()))


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Has every read fail with an error: as often as is said, or until a file is opened again."""

    def install(number: int, *, times: int | None = None) -> None:
        state = {"left": times, "stale": True}

        def read(call: Any) -> Any:
            def instead(*args: Any) -> Any:
                path = str(Path(f"/proc/self/fd/{args[0]}").readlink())
                if state["stale"] and not any(local in path for local in (".nv-meta", "/savable_pipeline/")):
                    if state["left"] is not None:
                        state["left"] -= 1
                        state["stale"] = state["left"] > 0
                    raise OSError(number, os.strerror(number))
                return call(*args)

            return instead

        def opening(*args: Any, call: Any = os.open, **kwargs: Any) -> int:
            state["stale"] = state["stale"] and state["left"] is not None
            return call(*args, **kwargs)

        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, read(getattr(os, name)))
        monkeypatch.setattr(os, "open", opening)

    return install


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EIO])
@pytest.mark.parametrize("kind", READERS)
def test_transient_read_error_reopens_the_file(tmp_path: Path, fail: Fail, kind: str, number: int) -> None:
    WRITERS[kind](tmp_path / "data", [4, 4])
    expected = list(items(kind, tmp_path / "data"))
    assert len(expected) == 8
    stage = items(kind, tmp_path / "data")
    found = [next(stage)]
    fail(number)
    assert found + list(stage) == expected


@pytest.mark.parametrize("kind", ["tar", "jsonl"])  # of the others, the rows are decoded
def test_reopened_file_is_compared_before_a_byte_is_used(tmp_path: Path, fail: Fail, kind: str) -> None:
    WRITERS[kind](tmp_path / "data", [4])
    stage = items(kind, tmp_path / "data")
    next(stage)
    (shard,) = [path for path in (tmp_path / "data").iterdir() if path.is_file() and path.suffix != ".idx"]
    data = shard.read_bytes()
    shard.unlink()
    shard.with_name("other").write_bytes(b"")  # takes the inode
    shard.write_bytes(data)
    fail(errno.ESTALE)
    with pytest.raises(sp.ShardError, match="it was replaced while this run read it"):
        list(stage)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EIO])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_unavailable_network_disk_is_an_environment_error(
    tmp_path: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch, on_error: Any, number: int
) -> None:
    WRITERS["tar"](tmp_path / "data", [4])
    monkeypatch.setenv("SAVABLE_RETRY_S", "0.2")
    monkeypatch.setattr(files, "_is_on_network_disk", lambda path: True)
    reader = sp.TarShardReader(tmp_path / "data", sp.Lane(), shuffle=False, epochs=1, on_error=on_error)
    stage = iter(sp.Encode(reader, Everything(), on_error=on_error))
    next(stage)
    fail(number, times=10**9)
    with pytest.raises(RemoteError, match=r"0+\.tar: .* for 0\.\d s\. Check that its server is reachable"):
        next(stage)


def test_local_disk_error_is_retried_once_and_then_a_shard_error(tmp_path: Path, fail: Fail) -> None:
    WRITERS["tar"](tmp_path / "data", [4])
    expected = list(items("tar", tmp_path / "data"))
    stage = items("tar", tmp_path / "data", on_error="skip")
    next(stage)
    fail(errno.EIO, times=2)
    assert list(stage) == expected[2:]


@pytest.mark.parametrize("kind", READERS)
def test_new_file_is_indexed_despite_a_transient_error(tmp_path: Path, fail: Fail, kind: str) -> None:
    WRITERS[kind](tmp_path / "data", [4])
    WRITERS[kind](tmp_path / "same", [4])
    expected = list(items(kind, tmp_path / "same"))
    for path in tmp_path.rglob("*.index*"):
        path.unlink()
    fail(errno.ESTALE, times=1)
    assert list(items(kind, tmp_path / "data")) == expected


def test_transient_stat_error_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["tar"](tmp_path / "data", [4])
    dataset = sp.open_dataset(tmp_path / "data")
    assert dataset[0].key
    files: Any = dataset[0].origin.store.files  # type: ignore[attr-defined]
    kept, fstat, failing = dict(files), os.fstat, [True]

    def look(descriptor: int) -> os.stat_result:
        if descriptor in kept.values() and failing.pop(0):
            raise OSError(errno.ESTALE, "Stale file handle")
        failing.append(False)
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", look)
    files.verify(0)
    assert files.keys() == kept.keys() and not any(files[shard] is kept[shard] for shard in kept) and not failing[0]


def test_read_of_a_named_file_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(b"picture")
    (tmp_path / "a.jsonl").write_text('{"image": "a.jpg"}\n')
    sample = sp.open_dataset(tmp_path / "a.jsonl", file_fields=["image"])[0]
    stat, failing = Path.stat, [True]

    def look(path: Path, **how: Any) -> os.stat_result:
        if path.name == "a.jpg" and failing and failing.pop():
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", look)
    assert sample["jpg"] == b"picture" and not failing
