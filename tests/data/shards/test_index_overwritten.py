"""An index that is overwritten or cut under a run, which goes on with what it opened: bytes, or a private copy."""

from __future__ import annotations

import itertools
import json
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
from savable_pipeline.data.shards.indexing import index_paths
from savable_pipeline.data.stores.folder_store import FOLDER
from tests.conftest import MakeShards, write_tar

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


def batches_of(root: str, change: str, workers: int = 0, method: str = "") -> list[Any]:
    """The batches of a run of which the index is overwritten after the third."""
    pipeline = sp.read(root).map(lambda sample: sample.json()["id"], global_rng=False).batch(4)
    options: dict[str, Any] = {"num_workers": workers, "workers": sp.Workers(start_method=method)} if workers else {}
    with sp.SavableLoader(pipeline, seed=0, lanes=2, **options) as loader:
        found = [next(loader).tolist() for _ in range(3)]
        if change:
            overwrite(Path(root, ".nv-meta/savable.index"), CHANGES[change])
        return found + [batch.tolist() for batch in islice(loader, 60)]


IN_MEMORY, MAPPED = 1 << 20, 0


CASES = [
    *((change, most, "in process") for change in ("shifted", "cut") for most in (IN_MEMORY, MAPPED)),
    ("emptied", MAPPED, "in process"),
    ("shifted", MAPPED, "thread"),
    ("cut", IN_MEMORY, "fork"),
    ("shifted", MAPPED, "fork"),
    ("emptied", MAPPED, "fork"),
]


def test_runs_keep_the_index_they_have_opened(make_shards: MakeShards) -> None:
    roots = [str(make_shards([300], f"case{number}")) for number in range(len(CASES))]
    expected = batches_of(str(make_shards([300])), "")
    code = f"from {__name__} import *; print_batches({roots})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # it may die
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [case for case, batches in itertools.zip_longest(CASES, found) if batches != expected]
    assert not wrong and done.returncode == 0, (wrong[:1], done.stderr[-2000:])


def print_batches(roots: list[str]) -> None:
    """Print a line with the batches of each case."""
    for root, (change, most_in_memory, host) in zip(roots, CASES, strict=True):
        byte_source.IN_MEMORY_BYTES = most_in_memory
        print(json.dumps(batches_of(root, change, 0 if host == "in process" else 2, host)), flush=True)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index is a large one, which is not read into memory."""
    monkeypatch.setattr(byte_source, "IN_MEMORY_BYTES", 0)


def test_index_truncated_by_another_process_does_not_affect_reads(make_shards: MakeShards, large: None) -> None:
    root = make_shards([9, 9])
    data = sp.open_dataset(root)
    index = root / ".nv-meta/savable.index"
    done = subprocess.run([sys.executable, "-c", f"open({str(index)!r}, 'w')"], check=False)
    assert done.returncode == 0 and not index.stat().st_size
    assert [sample.json()["id"] for sample in data] == list(range(18))
    data.dataset.store.verify(0)


def test_new_index_replaces_the_copy_of_the_old_one(
    make_shards: MakeShards, large: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = make_shards([9])
    before = sp.open_dataset(root)
    assert len(sp.open_dataset(root)) == 9  # by the same copy
    (copy,) = (tmp_path / "cache/savable_pipeline/indexes").iterdir()
    write_tar(root / "z.tar", [("last.json", b"{}")])
    assert len(sp.open_dataset(root)) == 10 and len(before) == 9 and before[8].json() == {"id": 8}
    (other,) = (tmp_path / "cache/savable_pipeline/indexes").iterdir()
    assert other != copy


def test_large_index_is_read_into_memory_without_a_cache(
    make_shards: MakeShards, large: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_bytes(b"no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = make_shards([9])
    data = sp.open_dataset(root)
    overwrite(root / ".nv-meta/savable.index", CHANGES["emptied"])
    assert [sample.json()["id"] for sample in data] == list(range(9))


def test_replaced_or_deleted_large_index_does_not_affect_a_run(make_shards: MakeShards, large: None) -> None:
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


def test_overwritten_large_folder_table_does_not_affect_a_run(tmp_path: Path, large: None) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(str(number))

    def batches(change: str) -> list[Any]:
        with sp.SavableLoader(sp.read(tmp_path).map(sp.Sample.text).batch(4), seed=0, lanes=2) as loader:
            found = [next(loader)]
            overwrite(index_paths(tmp_path, FOLDER.index_name, near=False)[0], CHANGES.get(change, bytes))
            return [*found, *islice(loader, 20)]

    assert batches("shifted") == batches("")


KEYS = [f"s{number:06d}" for number in range(300)]


def keys_of(root: Path) -> tuple[Any, Path]:
    data = sp.open_dataset(root)
    assert data.keys.find(KEYS).tolist() == list(range(300))
    return data, data.keys.path


@pytest.mark.parametrize("most_in_memory", [1 << 20, 0])
@pytest.mark.parametrize("change", CHANGES)
def test_keys_are_found_with_the_index_that_was_opened(
    make_shards: MakeShards, change: str, most_in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_source, "IN_MEMORY_BYTES", most_in_memory)
    data, path = keys_of(make_shards([300]))
    overwrite(path, CHANGES[change])
    assert data.keys.find(KEYS).tolist() == list(range(300))


def test_zeroed_key_index_is_rebuilt(make_shards: MakeShards) -> None:
    data, path = keys_of(make_shards([300]))
    overwrite(path, lambda raw: raw[:80] + bytes(len(raw) - 80))
    assert sp.open_dataset(data.dataset.address)["s000007"].key == "s000007"
