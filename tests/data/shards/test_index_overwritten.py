"""An index that is overwritten or cut under a run: a small one was read, of a large one the run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.shards import byte_source
from savable_pipeline.data.stores import shard_files
from tests.conftest import MakeShards

CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "zeroed": lambda raw: bytes(len(raw)),
    "shifted": lambda raw: raw[:-512] + raw[-504:] + raw[:8],
    "cut": lambda raw: raw[:100],
    "emptied": lambda raw: b"",
}


def overwrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write other bytes into the file in its place, as `cp` and `rsync --inplace` do."""
    raw = change(path.read_bytes())
    time.sleep(0.02)  # a tick of the clock that stamps files
    with path.open("r+b") as file:
        file.write(raw)
        file.truncate()


def run_that_loses_its_index(root: str, change: str, workers: int, method: str) -> None:
    """Print the batches of a run of which the index is overwritten after the third; its processes may die."""
    pipeline = sp.read(root).map(lambda sample: sample.json()["id"], global_rng=False).batch(4)
    options: dict[str, Any] = {"num_workers": workers, "workers": sp.Workers(start_method=method)} if workers else {}
    with sp.SavableLoader(pipeline, seed=0, lanes=2, **options) as loader:
        given = [next(loader).tolist() for _ in range(3)]
        if change:
            overwrite(Path(root, ".nv-meta/savable.index"), CHANGES[change])
        given += [batch.tolist() for batch in islice(loader, 60)]
    print(json.dumps(given))


@pytest.mark.parametrize("host", ["in process", "thread", "fork"])
@pytest.mark.parametrize("change", ["shifted", "cut"])
def test_run_keeps_the_index_it_has_read(make_shards: MakeShards, change: str, host: str) -> None:
    root = make_shards([300])

    def batches(changed: str) -> Any:
        code = f"from {__name__} import *; run_that_loses_its_index({str(root)!r}, {changed!r}, {workers}, {host!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    workers = 0 if host == "in process" else 2
    expected = batches("")
    assert batches(change) == expected


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index is a large one, and looked at for each batch."""
    monkeypatch.setattr(byte_source, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(shard_files, "_LOOK_S", 0.0)
    monkeypatch.setattr(shard_files, "_LOOK_SHARE", 0)


@pytest.mark.parametrize("change", ["shifted", "head, and the time put back"])
def test_overwriting_a_large_index_ends_the_run(make_shards: MakeShards, mapped: None, change: str) -> None:
    root = make_shards([300])
    index = root / ".nv-meta/savable.index"
    with sp.SavableLoader(sp.read(root).map(lambda s: s.json()["id"]).batch(4), seed=0, lanes=2) as loader:
        list(islice(loader, 3))
        stat = index.stat()
        overwrite(index, CHANGES.get(change, lambda raw: raw[:8] + bytes(8) + raw[16:]))
        if change not in CHANGES:
            os.utime(index, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(sp.ShardError, match=r"savable\.index: it was overwritten while") as caught:
            next(loader)
        assert caught.value.reason == "changed shard"


@pytest.mark.parametrize("change", ["cut", "emptied"])
def test_truncated_large_index_is_an_error_before_it_is_read_further(
    make_shards: MakeShards, mapped: None, change: str
) -> None:
    root = make_shards([9, 9])
    data = sp.open_dataset(root)
    assert data[0].json() == {"id": 0}
    data.dataset.store.verify(0)
    overwrite(root / ".nv-meta/savable.index", CHANGES[change])
    for use in (lambda: data[9].json(), lambda: data.dataset.store.verify(1)):
        with pytest.raises(sp.ShardError, match=r"savable\.index: it was overwritten while"):
            use()


def test_replaced_or_deleted_large_index_does_not_affect_a_run(make_shards: MakeShards, mapped: None) -> None:
    root = make_shards([300])
    index = root / ".nv-meta/savable.index"
    with sp.SavableLoader(sp.read(root).map(lambda s: s.json()["id"]).batch(4), seed=0, lanes=2) as loader:
        expected = [batch.tolist() for batch in islice(loader, 9)]
    with sp.SavableLoader(sp.read(root).map(lambda s: s.json()["id"]).batch(4), seed=0, lanes=2) as loader:
        found = [next(loader).tolist() for _ in range(3)]
        (root / "new").write_bytes(bytes(index.stat().st_size))
        (root / "new").replace(index)
        found += [next(loader).tolist() for _ in range(3)]
        index.unlink()
        assert [*found, *(next(loader).tolist() for _ in range(3))] == expected


def test_large_folder_table_is_checked_before_a_file_is_blamed(tmp_path: Path, mapped: None) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(str(number))
    with sp.SavableLoader(sp.read(tmp_path).map(sp.Sample.text).batch(4), seed=0, lanes=2) as loader:
        next(loader)
        overwrite(tmp_path / ".nv-meta/savable.folder.index", CHANGES["shifted"])
        with pytest.raises(sp.ShardError, match=r"savable\.folder\.index: it was overwritten while"):
            next(loader)


KEYS = [f"s{number:06d}" for number in range(300)]


def keys_of(root: Path) -> tuple[Any, Path]:
    data = sp.open_dataset(root)
    assert data.keys.find(KEYS).tolist() == list(range(300))
    return data, data.keys.path


@pytest.mark.parametrize("change", CHANGES)
def test_keys_are_found_with_the_index_that_was_read(make_shards: MakeShards, change: str) -> None:
    data, path = keys_of(make_shards([300]))
    overwrite(path, CHANGES[change])
    assert data.keys.find(KEYS).tolist() == list(range(300))


@pytest.mark.parametrize("change", CHANGES)
def test_a_large_index_of_keys_that_is_overwritten_is_an_error(
    make_shards: MakeShards, mapped: None, change: str
) -> None:
    data, path = keys_of(make_shards([300]))
    overwrite(path, CHANGES[change])
    with pytest.raises(sp.ShardError, match=r"\.keys: it was overwritten while"):
        data["s000007"]


def test_zeroed_key_index_is_rebuilt(make_shards: MakeShards) -> None:
    data, path = keys_of(make_shards([300]))
    overwrite(path, lambda raw: raw[:80] + bytes(len(raw) - 80))
    assert sp.open_dataset(data.dataset.address)["s000007"].key == "s000007"
