"""`sp.open_dataset`: samples by number, slice and key, in this process and in torch's workers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import savable_pipeline as sp
from savable_pipeline.data.dataset import key_index
from savable_pipeline.data.dataset.opening import Samples
from savable_pipeline.data.shards import byte_source
from tests.conftest import MakeShards, write_tar


def number_of(sample: sp.Sample) -> int:
    return int(sample.json()["id"])


@pytest.fixture
def data(make_shards: MakeShards) -> Samples:
    return sp.open_dataset(make_shards([5, 0, 7, 3]), transform=number_of)


def test_dataset_is_indexed_and_sliced_like_a_list(data: Samples) -> None:
    same = list(range(15))
    assert (len(data), list(data), data[-1], data[4]) == (15, same, 14, 4)
    for part in [slice(3, 9), slice(None, None, -2), slice(12, 99), slice(4, 4)]:
        assert list(data[part]) == same[part]
        assert list(data[part][1:]) == same[part][1:]
    assert data[2:][-1] == 14
    for wrong in (15, -16):
        with pytest.raises(IndexError, match=f"no sample {wrong}; there are 15"):
            data[wrong]
    with pytest.raises(TypeError):
        data[1.5]


def test_samples_are_found_by_key(data: Samples) -> None:
    assert [data[f"s{i:06d}"] for i in (0, 14, 7)] == [0, 14, 7]
    assert "s000003" in data
    assert "s000003" not in data[4:]
    assert 3 not in data
    with pytest.raises(KeyError, match="no sample has the key 's000015'"):
        data["s000015"]
    with pytest.raises(KeyError):
        data[5:]["s000001"]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_of_torchs_dataloader_read_a_dataset(data: Samples, method: str) -> None:
    data["s000001"]
    loader = DataLoader(data, batch_size=4, shuffle=False, num_workers=1, multiprocessing_context=method)
    assert [number for batch in loader for number in batch.tolist()] == list(range(15))


def test_forked_copy_reopens_the_shards(data: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    before = data.dataset
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert data.dataset is not before
    assert data["s000002"] == 2


def test_a_copy_of_shards_that_changed_is_an_error(make_shards: MakeShards) -> None:
    folder = make_shards([5])
    pickled = pickle.dumps(sp.open_dataset(folder))
    write_tar(folder / "0001.tar", [("new.json", b"{}")])
    assert len(pickle.loads(pickled)) == 5  # as in the process that opened it
    write_tar(folder / "00.tar", [("new.json", b"{}")])
    with pytest.raises(sp.ShardError, match="the shards changed since another process opened them"):
        pickle.loads(pickled)


def test_a_pickled_part_is_the_same_part(data: Samples) -> None:
    again = pickle.loads(pickle.dumps(data[3:9]))
    assert list(again) == [3, 4, 5, 6, 7, 8]
    assert again["s000004"] == 4
    assert repr(again).endswith("6 of 15)")


def test_without_a_transform_samples_are_read_lazily(make_shards: MakeShards) -> None:
    folder = make_shards([4])
    data = sp.open_dataset(folder)
    found = data[2]
    assert (found.key, found.ref.index, found.decoded()) == ("s000002", 2, {"__key__": "s000002", "json": {"id": 2}})


# The index of keys.


def index_of(folder: Path) -> Path:
    (path,) = (folder / ".nv-meta").glob("savable.*.keys")
    return path


def test_key_index_is_built_once_next_to_the_shards(make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_shards([5, 7])
    assert sp.open_dataset(folder)["s000011"].key == "s000011"
    monkeypatch.setattr(key_index, "_write", None)
    assert sp.open_dataset(folder)["s000003"].key == "s000003"
    assert index_of(folder).stat().st_size == 80 + 12 * 24


def test_other_shards_have_their_own_key_index(make_shards: MakeShards) -> None:
    folder = make_shards([5, 7])
    assert "s000011" in sp.open_dataset(folder)
    write_tar(folder / "0002.tar", [("new.json", b"{}")])
    assert "new" in sp.open_dataset(folder)
    assert "new" not in sp.open_dataset(folder / "0001.tar")
    assert len(list((folder / ".nv-meta").glob("savable.*.keys"))) == 3


@pytest.mark.parametrize("place", [3, 30, 70])
def test_key_index_with_a_damaged_header_is_rebuilt(make_shards: MakeShards, place: int) -> None:
    folder = make_shards([5])
    assert "s000001" in sp.open_dataset(folder)
    path = index_of(folder)
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    assert "s000001" in sp.open_dataset(folder)
    assert path.read_bytes() != raw


def test_damaged_key_index_never_returns_another_sample(
    make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_source, "IN_MEMORY_BYTES", 0)  # a large index is not read as a whole when it is opened
    folder = make_shards([9])
    keys = [f"s{i:06d}" for i in range(9)]
    data = sp.open_dataset(folder)
    assert data.keys.find(keys).tolist() == list(range(9))
    path = index_of(folder)
    whole = path.read_bytes()
    refused = 0
    for place in range(80, len(whole), 5):
        raw = bytearray(whole)
        raw[place] ^= 1 << place % 8
        path.write_bytes(raw)
        index = key_index.KeyIndex(path, data.dataset.digest())
        for number, key in enumerate(keys):
            try:
                assert int(index.find([key])[0]) in (number, -1)
            except sp.ShardError as error:
                assert "the index of keys is damaged" in str(error)
                refused += 1
    assert refused > 5


def test_duplicate_key_returns_the_first_sample(tmp_path: Path) -> None:
    for shard, value in enumerate([b'{"id": 1}', b'{"id": 2}']):
        write_tar(tmp_path / f"{shard}.tar", [("same.json", value), (f"own{shard}.json", b"{}")])
    data = sp.open_dataset(tmp_path)
    assert data["same"].json() == {"id": 1}
    assert data.keys.duplicate == (0, 2)


def test_unwritable_folder_is_skipped_for_the_key_index(
    make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_shards([3])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write = key_index._write

    def full(path: Path, *rest: Any) -> None:
        if path.is_relative_to(folder):
            raise OSError(28, "No space left on device")
        write(path, *rest)

    monkeypatch.setattr(key_index, "_write", full)
    assert "s000002" in sp.open_dataset(folder)
    assert len(list((tmp_path / "cache").rglob("*.keys"))) == 1
