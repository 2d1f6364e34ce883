"""Shards behind a URL give the batches that they give from a disk, whatever the cache holds and the server does."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import remote_dataset
from savable_pipeline.cache_room import bytes_in_use
from savable_pipeline.dataset import Dataset
from savable_pipeline.remote_dataset import RemoteDataset, open_dataset
from savable_pipeline.sample import REF, RefArray
from savable_pipeline.scan import scan
from savable_pipeline.shard_index import write_index
from tests.conftest import MakeShards
from tests.toy_server import ToyServer, serving, use_as_s3

SIZES = [20, 33, 25, 40]
STEPS = 40


class Ids(sp.TaskEncoder):
    """The number, the key and a random number of each sample."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], sample.key, rng.random()

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def ids_pipeline(shards: Any, lane: sp.Lane, **settings: Any) -> sp.Stage:
    reader = sp.TarShardReader(shards, lane, **settings)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(reader, size=10), Ids()), size=4)


def loader_of(shards: Any, *, num_workers: int = 0, method: str | None = None, **settings: Any) -> sp.SavableLoader:
    pipeline = functools.partial(ids_pipeline, str(shards), **settings)
    return sp.SavableLoader(pipeline, seed=5, lanes=6, num_workers=num_workers, multiprocessing_context=method)


def batches(loader: sp.SavableLoader, steps: int = STEPS) -> list[Any]:
    return [batch for _, batch in zip(range(steps), loader, strict=False)]


@pytest.fixture
def local(make_shards: MakeShards) -> Path:
    folder = make_shards(SIZES, pad="x" * 700)
    sp.TarShardReader(str(folder), sp.Lane())  # makes the index
    return folder


@pytest.fixture
def server(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "1.2")
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def expected(local: Path) -> list[Any]:
    with loader_of(local) as loader:
        return batches(loader)


def test_forked_workers_read_what_a_disk_gives_even_after_the_trainer_has_read(
    server: ToyServer, expected: list[Any]
) -> None:
    with loader_of(f"{server.url}/shards/") as loader:
        assert batches(loader) == expected
        with loader_of(f"{server.url}/shards/", num_workers=2, method="fork") as forked:
            assert batches(forked) == expected


def test_a_forked_process_fetches_by_a_process_of_its_own(server: ToyServer) -> None:
    dataset = open_dataset(f"{server.url}/shards/", cache_size=60_000)
    assert isinstance(dataset, RemoteDataset)
    dataset.read(0, 3, "json")
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        right = b'"id": 19' in dataset.read(0, 19, "json")
        os.write(tell, f"{right} {dataset._own_fetcher()._process.pid}".encode())
        os._exit(0)
    right, fetcher = os.read(told, 100).split()
    os.waitpid(child, 0)
    assert right == b"True"
    assert int(fetcher) != dataset._own_fetcher()._process.pid
    assert b'"id": 18' in dataset.read(0, 18, "json")


def test_spawned_workers_read_what_a_disk_gives(server: ToyServer, expected: list[Any]) -> None:
    with loader_of(f"{server.url}/shards/", num_workers=2, method="spawn") as loader:
        assert batches(loader) == expected


@pytest.mark.parametrize("cache", ["empty", "warm", "smallest"])
def test_a_run_saved_from_a_disk_resumes_over_a_server(
    server: ToyServer, local: Path, expected: list[Any], cache: str
) -> None:
    with loader_of(local) as loader:
        batches(loader, 17)
        state = loader.state_dict()
    url = f"{server.url}/shards/"
    if cache == "warm":
        with loader_of(url) as loader:
            batches(loader)
    settings = {"cache_bytes": 1} if cache == "smallest" else {}
    with loader_of(url, **settings) as loader:
        loader.load_state_dict(state)
        assert batches(loader, STEPS - 17) == expected[17:]


def blended(shards: str, lane: sp.Lane) -> sp.Stage:
    """Two sources of two shards each, shuffled together."""
    parts = {"early": f"{shards}/{{0000..0001}}.tar", "late": f"{shards}/{{0002..0003}}.tar"}
    readers = {name: sp.TarShardReader(part, lane) for name, part in parts.items()}
    samples = sp.Blend(readers, weights={"early": 2, "late": 1})
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=10), Ids()), size=4)


def test_a_blend_saved_from_a_disk_resumes_over_a_server(server: ToyServer, local: Path) -> None:
    with sp.SavableLoader(functools.partial(blended, str(local)), seed=5, lanes=6) as loader:
        batches(loader, 17)
        state = loader.state_dict()
        expected = batches(loader)
    with sp.SavableLoader(functools.partial(blended, f"{server.url}/shards"), seed=5, lanes=6) as loader:
        loader.load_state_dict(state)
        assert batches(loader) == expected


def test_a_restored_buffer_has_what_it_holds_fetched_ahead_each_source_its_own(
    server: ToyServer, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = blended(str(local), sp.Lane(seed=5))
    next(here)
    saved = here.save_state()
    buffer = saved["source"]["source"]
    there = blended(f"{server.url}/shards", sp.Lane(seed=5))
    announced: list[tuple[str, int]] = []

    def note(dataset: RemoteDataset, refs: RefArray) -> None:
        announced.extend((sample.shard, sample.ref.index) for sample in Dataset.samples(dataset, refs))

    monkeypatch.setattr(RemoteDataset, "announce", note)
    there.restore_state(saved)
    held = here.samples(np.frombuffer(buffer["refs"], REF))
    assert {sample.shard < "0002.tar" for sample in held} == {True, False}  # of both sources
    assert sorted(announced) == sorted((sample.shard, sample.ref.index) for sample in held)


def test_a_ref_of_another_dataset_is_refused_over_a_server_as_on_a_disk(server: ToyServer, local: Path) -> None:
    beyond = np.array([(10**6, 0)], REF)
    for place in (str(local), f"{server.url}/shards"):
        with pytest.raises(sp.CheckpointMismatchError, match=f"{place}: a ref names sample 1000000, but there are 118"):
            open_dataset(place).samples(beyond)


def all_refs(dataset: Dataset) -> RefArray:
    refs = np.zeros(dataset.count, REF)
    refs["index"] = np.arange(dataset.count)
    return refs


def filled(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> RemoteDataset:
    """A dataset that has found all of itself in the cache."""
    monkeypatch.setattr(remote_dataset, "_LOOK_S", 0.0)
    monkeypatch.setattr(remote_dataset, "_LOOK_SHARE", 0)
    dataset = open_dataset(f"{server.url}/shards/")
    assert isinstance(dataset, RemoteDataset)
    for sample in dataset.samples(all_refs(dataset)):
        _ = sample["json"]
    assert dataset.ahead
    dataset.announce(all_refs(dataset)[:1])
    assert not dataset.ahead
    return dataset


def evict(dataset: RemoteDataset, shard: int) -> None:
    """Evict all of a shard; what a fetcher has locked at this moment, as soon as it lets go."""
    fd = dataset._cached.open(shard)
    rows = slice(*dataset._cached.firsts[shard : shard + 2])
    while (dataset._cached.present[rows] & 1).any():
        dataset._cached.evict(shard, fd, wanted=True)
    os.close(fd)


@pytest.mark.parametrize("all_here", [False, True])
def test_a_sample_that_is_evicted_while_it_is_read_is_fetched_again(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch, all_here: bool
) -> None:
    dataset = open_dataset(f"{server.url}/shards/", cache_size=60_000)
    dataset = filled(server, monkeypatch) if all_here else dataset
    assert isinstance(dataset, RemoteDataset)
    expected = dataset.read(0, 3, "json")
    assert b'"id": 3' in expected
    pread, evicted = os.pread, []

    def evict_first(fd: int, size: int, offset: int) -> bytes:
        if not evicted:
            evicted.append(True)
            evict(dataset, 0)
            assert not any(pread(fd, size, offset))  # what is read now is a hole
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", evict_first)
    assert dataset.read(0, 3, "json") == expected
    assert evicted


def emptied(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(b"")
    os.truncate(path, size)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a shard deleted": lambda version: (version / "1.tar").unlink(),
    "a shard emptied": lambda version: os.truncate(version / "1.tar", 0),
    "a shard cut": lambda version: os.truncate(version / "1.tar", 9000),
    "a shard with holes": lambda version: emptied(version / "1.tar"),
    "all shards deleted": lambda version: [path.unlink() for path in version.glob("*.tar")],
    "flags deleted": lambda version: (version / "flags").unlink(),
    "flags emptied": lambda version: os.truncate(version / "flags", 0),
    "flags cut": lambda version: os.truncate(version / "flags", 100),
    "index deleted": lambda version: (version / "index").unlink(),
    "index emptied": lambda version: os.truncate(version / "index", 0),
    "index cut": lambda version: os.truncate(version / "index", 300),
    "index swapped": lambda version: write_index(version / "index", [scan(version, "0.tar")]),
    "all deleted": lambda version: shutil.rmtree(version),
    "pointer cut": lambda version: os.truncate(version.parent / "own.json", 5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_happened_to_the_cache_between_two_runs_the_next_reads_what_a_disk_gives(
    server: ToyServer, expected: list[Any], damage: str, tmp_path: Path
) -> None:
    with loader_of(f"{server.url}/shards/") as loader:
        assert batches(loader) == expected
    del loader
    gc.collect()  # now no one reads from there any more
    (flags,) = (tmp_path / "cache").glob("*/*/flags")
    DAMAGES[damage](flags.parent)
    with loader_of(f"{server.url}/shards/") as loader:
        assert batches(loader) == expected


@pytest.mark.parametrize("damage", ["a shard deleted", "a shard with holes", "all shards deleted"])
def test_files_that_go_while_a_run_has_them_not_open_are_fetched_again(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    before = filled(server, monkeypatch)
    again = open_dataset(f"{server.url}/shards/")
    again.announce(all_refs(again))  # finds all of itself there
    DAMAGES[damage](before._cached.folder)
    assert [sample.json()["id"] for sample in again.samples(all_refs(again))] == list(range(118))
    assert [sample.json()["id"] for sample in before.samples(all_refs(before))] == list(range(118))


def test_a_cached_index_with_a_damaged_row_is_an_error_that_says_what_to_remove(
    server: ToyServer, tmp_path: Path
) -> None:
    open_dataset(f"{server.url}/shards/")
    (index,) = (tmp_path / "cache").glob("*/*/index")
    raw = bytearray(index.read_bytes())
    raw[-200] ^= 1
    index.write_bytes(raw)
    dataset = open_dataset(f"{server.url}/shards/")
    with pytest.raises(sp.ShardError, match=f"the index of 000.\\.tar is damaged; remove {index} and start again"):
        [sample["json"] for sample in dataset.samples(all_refs(dataset))]
    index.unlink()
    assert len([sample["json"] for sample in open_dataset(f"{server.url}/shards/").samples(all_refs(dataset))]) == 118


def test_a_dataset_that_is_all_here_asks_no_row_until_something_is_evicted(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = filled(server, monkeypatch)
    asked = server.requests
    dataset._present = None  # type: ignore[assignment]  # whoever looks at a row fails
    assert [sample.json()["id"] for sample in dataset.samples(all_refs(dataset))] == list(range(118))
    dataset.announce(all_refs(dataset))
    assert server.requests == asked
    dataset._present = dataset._cached.present.data
    evict(dataset, 2)
    assert [sample.json()["id"] for sample in dataset.samples(all_refs(dataset))] == list(range(118))
    assert dataset.ahead and server.requests > asked
    dataset.announce(all_refs(dataset))
    assert not dataset.ahead  # all is here again


def test_an_array_over_a_server_has_the_bytes_of_the_part(server: ToyServer) -> None:
    dataset = open_dataset(f"{server.url}/shards/")
    for _ in range(2):  # fetched, and found in the cache
        array = dataset.array(0, 3, "json")
        assert array.tobytes() == dataset.read(0, 3, "json")
        assert array.flags.writeable


def test_two_workers_fetch_each_byte_once(server: ToyServer, local: Path) -> None:
    for _ in range(2):  # the second time nothing is fetched
        with loader_of(f"{server.url}/shards/", num_workers=2) as loader:
            batches(loader, 60)  # two epochs
    assert server.sent() <= sum(path.stat().st_size for path in local.glob("*.tar"))
    assert no_overlap(server.ranges)


def no_overlap(ranges: list[tuple[str, int, int]]) -> bool:
    ordered = sorted(one for one in ranges if one[0].endswith(".tar"))
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ordered))


def test_a_cache_of_twice_the_window_fetches_each_byte_once_an_epoch_and_keeps_to_its_bound(
    make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_shards([160] * 20, "many", pad="x" * 4000)
    sp.TarShardReader(str(folder), sp.Lane())
    shard_bytes = (folder / "0000.tar").stat().st_size
    limit, dataset_bytes = 2 * 3 * shard_bytes, 20 * shard_bytes  # for windows of 3 shards
    most = 0
    with serving(tmp_path) as server:
        pipeline = functools.partial(
            ids_pipeline, f"{server.url}/many/", window=3, epochs=1, cache=tmp_path / "cache", cache_bytes=limit
        )
        seen = []
        with sp.SavableLoader(pipeline, seed=5, lanes=8) as loader:  # the lanes stand in all the windows at once
            for number, batch in enumerate(loader):
                seen += [sample for sample, _, _ in batch]
                if number % 10 == 0:
                    most = max(most, bytes_in_use(tmp_path / "cache"))
        assert len(set(seen)) == len(seen) == 20 * 160
        assert dataset_bytes / 2 < server.sent() <= 1.1 * dataset_bytes
        assert limit / 2 < most < 1.1 * limit  # what is being written comes on top


@pytest.mark.parametrize("fault", ["503", "reset", "cut", "short", "less", "more", "slow"])
def test_a_server_that_fails_now_and_then_changes_nothing(
    server: ToyServer, expected: list[Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: set[str] = set()

    def once_a_path(path: str, number: int) -> str | None:
        if path in failed or (fault == "slow" and failed):
            return None
        failed.add(path)
        return fault

    server.fault = once_a_path
    with loader_of(f"{server.url}/shards/") as loader:
        assert batches(loader) == expected
    assert failed


def test_a_server_that_stays_down_is_an_error_that_names_it_and_the_run_goes_on_when_it_is_back(
    server: ToyServer, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVABLE_RETRY_S", "0.3")
    with loader_of(f"{server.url}/shards/", cache_bytes=60_000) as loader:
        first = batches(loader, 3)
        server.fault = lambda path, number: "503"
        with pytest.raises(
            sp.RemoteError, match=r"http://127.*/shards/000.\.tar: tried [2-9] times .*503.*SAVABLE_RETRY_S"
        ):
            for _ in range(STEPS):
                first.append(next(loader))
        server.fault = lambda path, number: None
        assert first + batches(loader, STEPS - len(first)) == expected


def test_a_fetcher_that_is_killed_is_an_error_and_the_run_goes_on_with_another(
    server: ToyServer, expected: list[Any]
) -> None:
    with loader_of(f"{server.url}/shards/", cache_bytes=60_000) as loader:
        got = batches(loader, 3)
        dataset = next(one for one in loader._shared.values() if isinstance(one, RemoteDataset))
        assert dataset._fetcher is not None
        os.kill(dataset._fetcher._process.pid, signal.SIGKILL)
        dataset._fetcher._process.wait()
        with pytest.raises(sp.RemoteError, match="ended"):
            for _ in range(STEPS):
                got.append(next(loader))
        assert got + batches(loader, STEPS - len(got)) == expected


def test_a_process_killed_in_the_middle_of_fetching_leaves_nothing_broken(
    server: ToyServer, expected: list[Any]
) -> None:
    for kill_at in (6, 12):
        loader = loader_of(f"{server.url}/shards/", num_workers=2, cache_bytes=200_000)
        seen = server.requests

        def kill(path: str, number: int, after: int = seen + kill_at) -> str | None:
            if number >= after and path.endswith(".tar"):
                for child in fetchers():
                    os.kill(child, signal.SIGKILL)
            return "cut" if number >= after else None

        server.fault = kill
        with pytest.raises(sp.SavableError):
            batches(loader)
        loader.close()
        server.fault = lambda path, number: None
    with loader_of(f"{server.url}/shards/", num_workers=2, cache_bytes=200_000) as loader:
        assert batches(loader) == expected


def fetchers() -> list[int]:
    """The fetcher processes below this process."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    mine = [line.split(None, 1) for line in found if "fetcher_process" in line and os.environ["SAVABLE_CACHE"] in line]
    return [int(pid) for pid, _ in mine]


def test_a_shard_that_was_replaced_by_a_longer_one_is_an_error(server: ToyServer, local: Path) -> None:
    with loader_of(f"{server.url}/shards/", cache_bytes=60_000) as loader:
        batches(loader, 1)
        for path in local.glob("*.tar"):
            path.write_bytes(path.read_bytes() + bytes(512))
        with pytest.raises(sp.ShardError, match=r"/shards/000.\.tar: \d+ bytes, but \d+ when it was indexed"):
            batches(loader)


def test_s3_gives_what_a_disk_gives(server: ToyServer, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_s3(server, monkeypatch)
    server.fault = lambda path, number: "503" if number % 7 == 0 else None
    with loader_of("s3://shards/", num_workers=2) as loader:
        assert batches(loader) == expected


def test_a_split_and_its_excluded_samples_hold_over_a_server_too(server: ToyServer, local: Path) -> None:
    (local / ".nv-meta" / "split.yaml").write_text(
        "split_parts: {train: ['000{0..2}.tar'], val: [0003.tar]}\nexclude: [0001.tar/s000021]\n"
    )
    settings = {"split": "train", "subset": 0.5}
    with loader_of(local, **settings) as there, loader_of(f"{server.url}/shards/", **settings) as here:
        assert batches(here) == batches(there)


def test_a_damaged_shard_is_skipped_over_a_server_as_on_a_disk(server: ToyServer, local: Path) -> None:
    shutil.rmtree(local / ".nv-meta")
    raw = (local / "0001.tar").read_bytes()
    (local / "0001.tar").write_bytes(raw[:20_000] + bytes(512) + raw[20_512:])
    url = f"{server.url}/shards/{{0000..0003}}.tar"
    with pytest.raises(sp.ShardError, match=f"{server.url}/shards/0001.tar"), loader_of(url) as loader:
        batches(loader)
    with loader_of(local, on_error="skip") as there, loader_of(url, on_error="skip") as here:
        assert batches(here) == batches(there)
