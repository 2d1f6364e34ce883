"""Of samples longer than 8 MiB behind a URL no more than what is read is downloaded, all of one version."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.remote.cache_space import bytes_in_use
from tests.support.shards import write_tar
from tests.support.toy_server import ToyServer, serving, use_as_s3

FILMS = [random.Random(n).randbytes((9 << 20) + 777 * n) for n in range(3)]
NAMES = ["before", "film0", "between", "film1", "film2", "behind"]
MIB = 1 << 20


def write(path: Path, films: list[bytes]) -> None:
    members = [("before.json", b"0")]
    for number, film in enumerate(films):
        members += [(f"film{number}.json", b"%d" % number), (f"film{number}.bin", film), (f"film{number}.txt", b"end")]
        members += [("between.txt", b"short")] if not number else []
    write_tar(path, [*members, ("behind.txt", b"short too")])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    write(folder / "data/a.tar", FILMS)
    open_any(folder / "data")  # makes the index
    return folder


@pytest.fixture
def server(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    for path in [path for path in made.rglob("*") if path.is_file()]:
        (tmp_path / path.relative_to(made)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.relative_to(made)).hardlink_to(path)
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "20")  # a busy machine is no fault
    with serving(tmp_path) as server:
        yield server


def samples_of(dataset: Dataset) -> dict[str, Sample]:
    refs = np.array([(number, 0) for number in range(dataset.count)], REF)
    return dict(zip(NAMES, dataset.open_samples(refs), strict=True))


def requests(server: ToyServer) -> list[int]:
    """Bytes of each that was answered about the tar."""
    return [stop - start for path, start, stop in server.ranges if path.endswith(".tar")]


@pytest.mark.parametrize("place", ["a web server", "a bucket"])
def test_only_the_blocks_that_are_read_are_downloaded(
    server: ToyServer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "a bucket":
        use_as_s3(server, monkeypatch)
    film = samples_of(open_any("s3://data" if place == "a bucket" else f"{server.url}/data"))["film1"]
    with film.open("bin") as file:
        assert (film.json(), film.text("txt"), film.key) == (1, "end", "film1")
        assert (file.seek(-100, os.SEEK_END), file.read()) == (len(FILMS[1]) - 100, FILMS[1][-100:])
        assert (file.seek(4 * MIB), file.read(300_000)) == (4 * MIB, FILMS[1][4 * MIB : 4 * MIB + 300_000])
    assert sum(requests(server)) <= 2 * MIB and max(requests(server)) <= MIB
    before = len(requests(server))
    assert (film.key, film.json(), film.open("bin").read(1000)) == ("film1", 1, FILMS[1][:1000])
    assert len(requests(server)) == before


def test_sequential_reads_download_growing_blocks_within_the_part(server: ToyServer) -> None:
    with samples_of(open_any(f"{server.url}/data"))["film0"].open("bin") as file:
        assert b"".join(iter(partial(file.read, 20_000), b"")) == FILMS[0]
    assert MIB // 4 < max(requests(server)) <= MIB and len(requests(server)) < 26
    assert sum(requests(server)) <= len(FILMS[0]) + MIB // 2


def test_short_sample_does_not_download_its_long_neighbors(server: ToyServer) -> None:
    samples = samples_of(open_any(f"{server.url}/data"))
    assert (samples["before"].json(), samples["between"].text(), samples["behind"].text()) == (0, "short", "short too")
    assert samples["between"].open("txt").read() == b"short"
    assert sum(requests(server)) < MIB


class Excerpts(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> tuple[str, bytes]:
        if "bin" not in sample:
            return sample.key, b""
        with sample.open("bin") as file:
            file.seek(rng.integers(9 * MIB))
            return sample.key, file.read(1000)

    def batch(self, items: list[tuple[str, bytes]], rng: sp.Rng) -> list[tuple[str, bytes]]:
        return items


def excerpts(place: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(place, lane), size=4), Excerpts()), size=1)


@pytest.mark.parametrize("cache_bytes", [100 * MIB, 20 * MIB], ids=["all fit", "not all fit"])
def test_run_that_reads_excerpts_equals_a_local_one_and_downloads_little(
    server: ToyServer, made: Path, cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(cache_bytes))
    found = []
    for place, workers in ((str(made / "data"), 0), (f"{server.url}/data", 0), (f"{server.url}/data", 2)):
        with sp.SavableLoader(partial(excerpts, place), seed=3, lanes=2, num_workers=workers) as loader:
            found.append([next(loader) for _ in range(12)])
    assert found[0] == found[1] == found[2]
    assert len({data for batch in found[0] for _, data in batch}) > 5
    assert sum(requests(server)) < 6 * MIB and max(requests(server)) <= MIB


def test_after_one_whole_read_the_next_samples_are_prefetched(server: ToyServer) -> None:
    dataset = open_any(f"{server.url}/data")
    samples = samples_of(dataset)
    dataset.prefetch(np.array([(3, 0)], REF))
    assert samples["film0"]["bin"] == FILMS[0]
    assert sum(requests(server)) < len(FILMS[0]) + MIB
    dataset.prefetch(np.array([(4, 0)], REF))
    assert bytes(samples["film1"].array("bin")) == FILMS[1]  # behind what was announced before it
    before = sum(requests(server))
    assert samples["film2"]["bin"] == FILMS[2]
    assert sum(requests(server)) - before < len(FILMS[2]) // 2


def replace(server: ToyServer, films: list[bytes]) -> None:
    """Another shard in the place of this one: its index stays beside it."""
    path = server.folder / "data/a.tar"
    write(path.with_name("new"), films)
    path.with_name("new").replace(path)


@pytest.mark.parametrize("first", ["before", "film0"], ids=["a short sample", "a long one"])
def test_replaced_shard_is_an_error_and_reindexed_at_the_next_start(server: ToyServer, first: str) -> None:
    samples, other = samples_of(open_any(f"{server.url}/data")), [film[::-1] for film in FILMS]
    assert samples[first].json() == 0
    replace(server, other)
    with (
        samples["film2"].open("bin") as file,
        pytest.raises(sp.ShardError, match="the shard was rewritten on the server"),
    ):
        file.read(100)
    for _ in range(2):
        with samples_of(open_any(f"{server.url}/data"))["film2"].open("bin") as file:
            assert (file.read(100), file.seek(5 * MIB), file.read(100)) == (
                other[2][:100],
                5 * MIB,
                other[2][5 * MIB : 5 * MIB + 100],
            )


def test_sample_at_another_offset_than_indexed_is_an_error(server: ToyServer) -> None:
    films = [FILMS[0][:-600] + FILMS[1][-600:] * 2, FILMS[1][:-600], FILMS[2]]
    replace(server, films)  # of the same size
    fault = r"a\.tar: the shard was rewritten after indexing"
    with (
        samples_of(open_any(f"{server.url}/data"))["film1"].open("bin") as file,
        pytest.raises(sp.ShardError, match=fault),
    ):
        file.read(100)
    assert samples_of(open_any(f"{server.url}/data"))["film1"]["bin"] == films[1]


def test_cache_smaller_than_a_sample_returns_its_bytes_within_its_limit(server: ToyServer, tmp_path: Path) -> None:
    samples = samples_of(open_any(f"{server.url}/data", cache=(None, 3 * MIB)))
    for _ in range(2):
        with samples["film0"].open("bin") as one, samples["film1"].open("bin") as other:
            for begin in range(0, 9 * MIB, 250_000):
                assert one.read(250_000) == FILMS[0][begin : begin + 250_000]
                assert other.read(250_000) == FILMS[1][begin : begin + 250_000]
        assert bytes_in_use(tmp_path / "cache") <= 4 * MIB


def test_block_evicted_during_a_read_is_downloaded_again(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_any(f"{server.url}/data")
    file = samples_of(dataset)["film0"].open("bin")
    assert file.read(10) == FILMS[0][:10]
    blocks, pread, evicted = dataset.store.files._long_samples._blocks, os.pread, list[int]()  # type: ignore[attr-defined]

    def evict_first(fd: int, size: int, offset: int) -> bytes:
        if not evicted and fd == blocks.get(0):
            evicted.append(fd)
            with blocks.path(0).open("r+b") as shard:
                blocks._cached.evict(0, shard.fileno(), also_unused=True)
            assert not any(pread(fd, size, offset))  # what is read now is a hole
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", evict_first)
    assert (file.seek(100_000), file.read(10)) == (100_000, FILMS[0][100_000:100_010])
    assert evicted


def test_whole_file_is_read_as_a_buffer_in_memory(server: ToyServer) -> None:
    copied = io.BytesIO()
    with samples_of(open_any(f"{server.url}/data"))["film2"].open("bin") as file:
        copied.write(file.read())
    assert copied.getvalue() == FILMS[2]
