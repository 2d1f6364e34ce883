"""Shards behind a URL give the batches that they give from a disk, whatever the cache holds and the server does."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF, RefArray
from savable_pipeline.data.remote.cache_space import bytes_in_use
from savable_pipeline.data.remote.session import Downloader
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.stores import cached_samples
from savable_pipeline.data.stores.cached_samples import CachedFiles
from savable_pipeline.data.stores.opening import index_any
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import RemoteError
from tests.conftest import MakeShards, write_numbered_shards
from tests.support.toy_server import ToyServer, serving, use_as_s3

SIZES = [20, 33, 25, 40]
STEPS = 40


class Ids(sp.TaskEncoder):
    """The number, the key and a random number of each sample."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], sample.key, rng.random()

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def ids_pipeline(shards: Any, lane: sp.Lane, **settings: Any) -> custom.Stage:
    reader = sp.TarShardReader(shards, lane, **settings)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(reader, size=10), Ids()), size=4)


def loader_of(shards: Any, *, num_workers: int = 0, method: str | None = None, **settings: Any) -> sp.SavableLoader:
    pipeline = functools.partial(ids_pipeline, str(shards), **settings)
    return sp.SavableLoader(pipeline, seed=5, lanes=6, num_workers=num_workers, workers=sp.Workers(start_method=method))


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
    monkeypatch.setenv("SAVABLE_RETRY_S", "20")  # a busy machine is no fault
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def expected(local: Path) -> list[Any]:
    with loader_of(local) as loader:
        return batches(loader)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same_as_from_disk_also_after_the_trainer_has_read(
    server: ToyServer, expected: list[Any], method: str
) -> None:
    with loader_of(f"{server.url}/shards/") as loader:
        assert batches(loader) == expected
        with loader_of(f"{server.url}/shards/", num_workers=2 if method == "fork" else 1, method=method) as workers:
            assert batches(workers) == expected


def test_forked_process_downloads_through_its_own_process(server: ToyServer) -> None:
    dataset = open_any(f"{server.url}/shards/", cache=(None, 60_000))
    dataset.read(0, 3, "json")
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        right = b'"id": 19' in dataset.read(0, 19, "json")
        os.write(tell, f"{right} {files_of(dataset).remote.session.connected().pid}".encode())
        os._exit(0)
    right, downloader = os.read(told, 100).split()
    os.waitpid(child, 0)
    assert right == b"True"
    assert int(downloader) != files_of(dataset).remote.session.connected().pid
    assert b'"id": 18' in dataset.read(0, 18, "json")


@pytest.mark.parametrize("settings", [{}, {"cache_bytes": 8192}])
def test_run_saved_with_local_shards_resumes_with_remote_shards(
    server: ToyServer, local: Path, expected: list[Any], settings: dict[str, int]
) -> None:
    with loader_of(local) as loader:
        batches(loader, 17)
        state = loader.state_dict()
    with loader_of(f"{server.url}/shards/", **settings) as loader:
        loader.load_state_dict(state)
        assert batches(loader, STEPS - 17) == expected[17:]


def blended(shards: str, lane: sp.Lane) -> custom.Stage:
    """Two sources of two shards each, shuffled together."""
    parts = {"early": f"{shards}/{{0000..0001}}.tar", "late": f"{shards}/{{0002..0003}}.tar"}
    readers = {name: sp.TarShardReader(part, lane) for name, part in parts.items()}
    samples = sp.Blend(readers, weights={"early": 2, "late": 1})
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=10), Ids()), size=4)


def test_restored_buffer_prefetches_its_refs_per_source(
    server: ToyServer, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = blended(str(local), sp.Lane(seed=5))
    next(here)
    saved = here.save_state()
    buffer = saved["source"]["source"]
    there = blended(f"{server.url}/shards", sp.Lane(seed=5))
    announced: list[tuple[str, int]] = []

    def note(dataset: Dataset, refs: RefArray) -> None:
        announced.extend((sample.shard, sample.ref.index) for sample in dataset.open_samples(refs))

    monkeypatch.setattr(Dataset, "prefetch", note)
    there.restore_state(saved)
    held = here.source.source.open_samples(np.frombuffer(buffer["refs"], REF))
    assert {sample.shard < "0002.tar" for sample in held} == {True, False}  # of both sources
    assert sorted(announced) == sorted((sample.shard, sample.ref.index) for sample in held)
    assert [next(there) for _ in range(9)] == [next(here) for _ in range(9)]


def test_ref_of_another_dataset_is_rejected_remotely_as_locally(server: ToyServer, local: Path) -> None:
    beyond = np.array([(10**6, 0)], REF)
    for place in (str(local), f"{server.url}/shards"):
        with pytest.raises(sp.CheckpointMismatchError, match=f"{place}: the state names sample 1000000 of 118"):
            open_any(place).open_samples(beyond)


def files_of(dataset: Dataset) -> CachedFiles:
    files = dataset.store.files  # type: ignore[attr-defined]  # of a `TarStore`
    assert isinstance(files, CachedFiles)
    return files


def all_refs(dataset: Dataset) -> RefArray:
    refs = np.zeros(dataset.count, REF)
    refs["index"] = np.arange(dataset.count)
    return refs


def filled(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A dataset that has found all of itself in the cache."""
    monkeypatch.setattr(cached_samples, "_CHECK_S", 0.0)
    monkeypatch.setattr(cached_samples, "_CHECK_MULTIPLE", 0)
    dataset = open_any(f"{server.url}/shards/")
    for sample in dataset.open_samples(all_refs(dataset)):
        _ = sample["json"]
    assert dataset.prefetch_refs
    dataset.prefetch(all_refs(dataset)[:1])
    assert not dataset.prefetch_refs
    return dataset


def evict(dataset: Dataset, shard: int) -> None:
    """Evict all of a shard; what a downloader has locked at this moment, as soon as it lets go."""
    fd = files_of(dataset)._cached.open(shard)
    rows = slice(*files_of(dataset)._cached.firsts[shard : shard + 2])
    while (files_of(dataset)._cached.present[rows] & 1).any():
        files_of(dataset)._cached.evict(shard, fd, also_unused=True)
    os.close(fd)


@pytest.mark.parametrize("all_here", [False, True])
def test_sample_evicted_during_a_read_is_downloaded_again(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch, all_here: bool
) -> None:
    dataset = open_any(f"{server.url}/shards/", cache=(None, 60_000))
    dataset = filled(server, monkeypatch) if all_here else dataset
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
    "index swapped": lambda version: write_index(version / "index", [TARS.scan(version, "0.tar")], TARS),
    "all deleted": lambda version: shutil.rmtree(version),
    "pointer cut": lambda version: os.truncate(version.parent / "own.json", 5),
}


def test_damaged_cache_between_runs_changes_no_byte(server: ToyServer, tmp_path: Path) -> None:
    """Each damage is done to what the run before it has left there, whole again."""
    for damage in (None, *DAMAGES):
        if damage is not None:
            flags = max((tmp_path / "cache").glob("*/*/*/flags"), key=lambda path: path.stat().st_mtime_ns)
            assert {path.name for path in flags.parent.iterdir()} >= {"0.tar", "1.tar", "flags", "index"}, damage
            DAMAGES[damage](flags.parent)
        assert first_ids(open_any(f"{server.url}/shards/")) == [*range(sum(SIZES))], damage
        gc.collect()  # now no one reads from there any more


@pytest.mark.parametrize("damage", ["a shard deleted", "a shard with holes", "all shards deleted"])
def test_cache_files_deleted_while_closed_are_downloaded_again(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    before = filled(server, monkeypatch)
    again = open_any(f"{server.url}/shards/")
    again.prefetch(all_refs(again))  # finds all of itself there
    DAMAGES[damage](files_of(before)._cached.folder)
    assert [sample.json()["id"] for sample in again.open_samples(all_refs(again))] == list(range(118))
    assert [sample.json()["id"] for sample in before.open_samples(all_refs(before))] == list(range(118))


def test_cache_file_deleted_while_open_is_reopened(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = filled(server, monkeypatch)
    emptied(files_of(dataset).path(0))
    files_of(dataset).path(0).unlink()
    evict(dataset, 0)
    assert [sample.json()["id"] for sample in dataset.open_samples(all_refs(dataset))] == list(range(118))


def test_fully_cached_dataset_announces_nothing_until_an_eviction(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = filled(server, monkeypatch)
    asked, rows_of = server.requests, files_of(dataset)._rows
    monkeypatch.setattr(files_of(dataset), "_rows", None)  # who announces fails
    assert [sample.json()["id"] for sample in dataset.open_samples(all_refs(dataset))] == list(range(118))
    dataset.prefetch(all_refs(dataset))
    assert server.requests == asked
    monkeypatch.setattr(files_of(dataset), "_rows", rows_of)
    evict(dataset, 2)
    assert [sample.json()["id"] for sample in dataset.open_samples(all_refs(dataset))] == list(range(118))
    dataset.prefetch(all_refs(dataset)[:1])
    assert server.requests > asked
    dataset.prefetch(all_refs(dataset))
    assert not dataset.prefetch_refs  # all is here again


def test_remote_array_has_the_bytes_of_the_part(server: ToyServer) -> None:
    dataset = open_any(f"{server.url}/shards/")
    for _ in range(2):  # fetched, and found in the cache
        array = dataset.array(0, 3, "json")
        assert array.tobytes() == dataset.read(0, 3, "json")
        assert array.flags.writeable


def test_two_workers_download_each_byte_once(server: ToyServer, local: Path) -> None:
    for _ in range(2):  # the second time nothing is fetched
        with loader_of(f"{server.url}/shards/", num_workers=2) as loader:
            batches(loader, 60)  # two epochs
    assert server.sent() <= sum(path.stat().st_size for path in local.glob("*.tar"))
    assert no_overlap(server.ranges)


def no_overlap(ranges: list[tuple[str, int, int]]) -> bool:
    ordered = sorted(one for one in ranges if one[0].endswith(".tar"))
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ordered))


SHARDS = 14


def test_cache_of_two_windows_downloads_each_byte_once_per_epoch_within_its_limit(
    make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_shards([160] * SHARDS, "many", pad="x" * 4000)
    sp.TarShardReader(str(folder), sp.Lane())
    shard_bytes = (folder / "0000.tar").stat().st_size
    limit, dataset_bytes = 2 * 3 * shard_bytes, SHARDS * shard_bytes  # for windows of 3 shards
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
        assert len(set(seen)) == len(seen) == SHARDS * 160
        assert dataset_bytes / 2 < server.sent() <= 1.1 * dataset_bytes
        assert limit / 2 < most < 1.1 * limit  # what is being written comes on top


@pytest.mark.parametrize("fault", ["503", "reset", "cut", "short", "less", "more", "slow"])
def test_transient_server_errors_change_nothing(server: ToyServer, fault: str) -> None:
    failed: set[str] = set()

    def once_a_path(path: str, number: int) -> str | None:
        if path in failed or (fault == "slow" and failed):
            return None
        failed.add(path)
        return fault

    server.fault = once_a_path
    assert first_ids(open_any(f"{server.url}/shards/")) == [*range(sum(SIZES))]
    assert failed


def test_server_down_is_an_error_and_the_run_continues_when_it_is_back(
    server: ToyServer, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVABLE_RETRY_S", "3")
    with loader_of(f"{server.url}/shards/", cache_bytes=60_000) as loader:
        first = batches(loader, 3)
        server.fault = lambda path, number: "503"
        with pytest.raises(
            RemoteError, match=r"http://127.*/shards/000.\.tar: ([2-9]|\d\d+) tries .*503.*SAVABLE_RETRY_S"
        ):
            for _ in range(STEPS):
                first.append(next(loader))
        server.fault = lambda path, number: None
        assert first + batches(loader, STEPS - len(first)) == expected


def test_a_downloader_that_is_killed_is_replaced(
    server: ToyServer, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with loader_of(f"{server.url}/shards/", cache_bytes=60_000) as loader:
        got = batches(loader, 3)
        for _ in range(4):
            dataset = next(one for one in loader._run.local._shared.values() if isinstance(one, Dataset))
            child = files_of(dataset).remote.session.connected()._child.process
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            got += batches(loader, 3)
        assert got + batches(loader, STEPS - len(got)) == expected


def test_downloader_that_dies_repeatedly_is_an_error(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = open_any(f"{server.url}/shards/")

    def death(self: Downloader, *request: Any) -> Any:
        self.ended = True
        raise RemoteError("the process that downloads shards ended with code -9")

    monkeypatch.setattr(Downloader, "submit", death)
    monkeypatch.setattr(Downloader, "prefetch", lambda *request: None)  # which may be done before the sample is read
    with pytest.raises(RemoteError, match="ended with code -9"):
        dataset.open_samples(all_refs(dataset)[:1])[0].json()
    assert "ended with code -9: replaced, 3 of 3" in caplog.text


def test_slow_link_works_as_long_as_bytes_arrive(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbered_shards(tmp_path / "large", [100], pad="x" * 10_000)
    sp.TarShardReader(tmp_path / "large", sp.Lane())  # makes the index
    monkeypatch.setenv("SAVABLE_RETRY_S", "8")
    server.fault = lambda path, number: "stalled" if path.endswith("0000.tar") else None
    dataset = open_any(f"{server.url}/large/")
    samples = dataset.open_samples(all_refs(dataset))
    assert [sample.json()["id"] for sample in samples] == [*range(100)]
    server.fault = lambda path, number: "503"
    evict(dataset, 0)
    with pytest.raises(RemoteError, match=r"\d+ tries in"):
        samples[0].json()


def test_slow_link_downloads_what_is_needed_next_first_in_small_requests(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbered_shards(tmp_path / "large", [160, 160, 160], pad="x" * 50_000)
    sp.TarShardReader(tmp_path / "large", sp.Lane())  # makes the index
    monkeypatch.delenv("SAVABLE_RETRY_S")
    server.link_bytes_per_s = 2.5e6
    dataset = open_any(f"{server.url}/large/")
    dataset.prefetch(all_refs(dataset))  # 24 MB
    carried = server.link_bytes
    assert dataset.open_samples(all_refs(dataset)[-3:])[0].json()["id"] == 477  # in the third shard
    assert server.link_bytes - carried < 6e6
    assert max(stop - start for path, start, stop in server.ranges if path.endswith(".tar")) <= 1 << 20
    assert no_overlap(server.ranges)


@pytest.mark.parametrize("down_s", [1.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_unavailable_server_is_waited_for(
    tmp_path: Path, local: Path, expected: list[Any], down_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SAVABLE_RETRY_S", raising=False)
    with contextlib.ExitStack() as life:
        server = life.enter_context(serving(tmp_path))
        port = server.server_port
        loader = loader_of(f"http://127.0.0.1:{port}/shards/", cache_bytes=60_000)
        got = batches(loader, 3)
        server.fault = lambda path, number: "reset"  # on connections that are open
        life.close()  # others are refused
        begin = time.monotonic()
        started = threading.Timer(down_s, lambda: life.enter_context(serving(tmp_path, port)))
        started.start()
        got += batches(loader, STEPS - 3)
        assert time.monotonic() - begin >= down_s
        loader.close()
        assert got == expected


def test_a_disk_without_room_for_the_flags_of_a_cache_is_an_error(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RemoteError, match=r"No space left on device. Free space there"):
        open_any(f"{server.url}/shards/")


def test_process_killed_during_a_download_leaves_a_valid_cache(
    server: ToyServer, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVABLE_RETRY_S", "4")
    loader = loader_of(f"{server.url}/shards/", num_workers=1, cache_bytes=200_000)

    def kill(path: str, number: int) -> str | None:
        if 9 <= number < 13 and path.endswith(".tar"):
            for child in downloaders():
                os.kill(child, signal.SIGKILL)
        return "cut" if number >= 9 else None

    server.fault = kill
    with pytest.raises(sp.SavableError):
        batches(loader)
    loader.close()
    server.fault = lambda path, number: None
    with loader_of(f"{server.url}/shards/", cache_bytes=200_000) as loader:
        assert batches(loader) == expected


def downloaders() -> list[int]:
    """The downloader processes below this process."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    mine = [line.split(None, 1) for line in found if "download_process" in line and os.environ["SAVABLE_CACHE"] in line]
    return [int(pid) for pid, _ in mine]


def test_s3_returns_the_same_as_a_disk(server: ToyServer, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_s3(server, monkeypatch)
    server.fault = lambda path, number: "503" if number % 7 == 0 else None
    with loader_of("s3://shards/", num_workers=2) as loader:
        assert batches(loader) == expected


def test_split_and_its_excluded_samples_apply_to_remote_shards(server: ToyServer, local: Path) -> None:
    (local / ".nv-meta" / "split.yaml").write_text(
        "split_parts: {train: ['000{0..2}.tar'], val: [0003.tar]}\nexclude: [0001.tar/s000021]\n"
    )
    settings = {"split": "train", "subset": 0.5}
    with loader_of(local, **settings) as there, loader_of(f"{server.url}/shards/", **settings) as here:
        assert batches(here) == batches(there)


def test_damaged_remote_shard_is_skipped_like_a_local_one(server: ToyServer, local: Path) -> None:
    shutil.rmtree(local / ".nv-meta")
    raw = (local / "0001.tar").read_bytes()
    (local / "0001.tar").write_bytes(raw[:20_000] + bytes(512) + raw[20_512:])
    url = f"{server.url}/shards/{{0000..0003}}.tar"
    with pytest.raises(sp.ShardError, match=f"{server.url}/shards/0001.tar"), loader_of(url) as loader:
        batches(loader)
    with loader_of(local, on_error="skip") as there, loader_of(url, on_error="skip") as here:
        assert batches(here) == batches(there)


def rewritten(path: Path, change: tuple[bytes, bytes]) -> None:
    raw = path.read_bytes()
    assert raw.count(change[0])
    path.write_bytes(raw.replace(*change))


def first_ids(dataset: Dataset) -> list[int]:
    return [sample.json()["id"] for sample in dataset.open_samples(all_refs(dataset))]


def test_run_keeps_its_index_version_when_another_run_reindexes(server: ToyServer, local: Path) -> None:
    before = open_any(f"{server.url}/shards/")
    (sample,) = before.open_samples(all_refs(before)[:1])
    assert first_ids(before)[0] == 0  # all are here: what is being written is not evicted
    # It may fetch ahead once more, and tell of the other version.
    files_of(before).remote.session.connected()._child.kill()
    rewritten(local / "0000.tar", (b'{"id": ', b'{"id":-'))  # names and places stay as they were
    evict(before, 0)
    other = open_any(f"{server.url}/shards/")
    with pytest.raises(sp.ShardError, match="rewritten on the server"):
        first_ids(other)
    assert all(number <= 0 for number in first_ids(open_any(f"{server.url}/shards/"))[: SIZES[0]])
    with pytest.raises(sp.ShardError, match="rewritten on the server"):
        sample.json()


def test_reindexed_shard_stays_so_when_another_is_reindexed(server: ToyServer, local: Path, tmp_path: Path) -> None:
    firsts = [0, *itertools.accumulate(SIZES)]
    expected = [[*range(*pair)] for pair in itertools.pairwise(firsts)]
    open_any(f"{server.url}/shards/")
    for shard in (0, 1, 2):
        write_numbered_shards(tmp_path / "other", [5 + shard], pad="x" * 700)
        (tmp_path / "other/0000.tar").replace(local / f"{shard:04d}.tar")
        expected[shard] = [*range(5 + shard)]
        for cached in (tmp_path / "cache").rglob("*.tar"):
            cached.unlink()
        with pytest.raises(sp.ShardError, match=rf"{shard:04d}.tar: .* when indexed"):
            first_ids(open_any(f"{server.url}/shards/"))
        assert first_ids(open_any(f"{server.url}/shards/")) == [*itertools.chain(*expected)]


def test_shard_that_differs_from_its_index_is_an_error_and_reindexed_at_the_next_start(
    server: ToyServer, local: Path
) -> None:
    rewritten(local / "0000.tar", (b"s000000.json", b"s000000.text"))
    raw = bytearray((local / "0000.tar").read_bytes())
    raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + 8 * 32 + sum(raw[156:512]))
    (local / "0000.tar").write_bytes(raw)
    dataset = open_any(f"{server.url}/shards/")
    with pytest.raises(sp.ShardError, match=r"0000\.tar: the shard was rewritten after indexing"):
        dataset.open_samples(all_refs(dataset)[:1])[0].json()
    for _ in range(2):
        dataset = open_any(f"{server.url}/shards/")
        samples = dataset.open_samples(all_refs(dataset))
        assert list(samples[0]) == ["text"] and [s.json()["id"] for s in samples[1:]] == [*range(1, sum(SIZES))]


def test_index_command_reindexes_a_remote_shard_of_another_size(server: ToyServer, local: Path, tmp_path: Path) -> None:
    (local / ".nv-meta/savable.index").unlink()
    url = f"{server.url}/shards/{{0000..{len(SIZES) - 1:04d}}}.tar"
    assert first_ids(open_any(url)) == [*range(sum(SIZES))]
    write_numbered_shards(tmp_path / "other", [SIZES[0] + 40], pad="x" * 700)
    (tmp_path / "other/0000.tar").replace(local / "0000.tar")
    assert index_any(url)[1] == []
    assert open_any(url).count == sum(SIZES) + 40
    assert first_ids(open_any(url))[: SIZES[0] + 40] == [*range(SIZES[0] + 40)]


def test_shard_deleted_from_an_indexed_bucket_is_an_error_or_a_counted_skip(
    server: ToyServer, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    (local / "0001.tar").unlink()
    with pytest.raises(sp.ShardError, match=r"1 indexed shards are gone, such as 0001\.tar"):
        open_any("s3://shards/")
    dataset = open_any("s3://shards/", on_error="skip")
    assert dataset.count == sum(SIZES)
