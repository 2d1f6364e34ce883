"""Of a large index, a run fetches the head and the rows of the shards that it reads."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.remote import lookup, shard_cache
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.data.stores.jsonl import JsonlStore
from savable_pipeline.data.stores.opening import find_source, open_indexed
from savable_pipeline.errors import RemoteError
from savable_pipeline.stages.batch_difference import digest
from tests.conftest import write_tar
from tests.support.toy_remote_stores import KINDS, LISTED, WRITERS, names_of
from tests.support.toy_server import ToyServer, serving

SHARDS, SAMPLES = 48, 10


class Texts(sp.TaskEncoder):
    """The text of a sample, and its extensions."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> dict[str, Any]:
        return {"text": sample.text("txt"), "parts": " ".join(sample)}


class Pipeline:
    """Small batches of shuffled samples."""

    def __init__(self, shards: str, on_error: Any = "raise") -> None:
        self.shards, self.on_error = shards, on_error

    def __call__(self, lane: sp.Lane) -> custom.Stage:
        samples = sp.TarShardReader(self.shards, lane, epochs=1, on_error=self.on_error)
        return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=8), Texts()), size=4, drop_last=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[ToyServer]:
    """Shards of samples whose parts are unlike, or alike; with an index that is fetched by the part."""
    for shard in range(SHARDS):
        members_of = members(shard, alike=getattr(request, "param", "unlike") == "alike")
        write_tar(tmp_path / "shards" / f"{shard:04d}.tar", members_of)
    open_any(str(tmp_path / "shards"))
    yield from served_by_parts(tmp_path, monkeypatch)


def served_by_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    """A server of this folder, of which every index is fetched by the part."""
    monkeypatch.setattr(shard_cache, "WHOLE_BYTES", 0)
    monkeypatch.setattr(lookup, "_FIRST_BYTES", 100)
    monkeypatch.setattr(lookup, "PIECE", 1000)
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**7))  # few refs are announced ahead
    monkeypatch.setenv("SAVABLE_RETRY_S", "1")
    with serving(tmp_path) as server:
        yield server


def members(shard: int, alike: bool) -> list[tuple[str, bytes]]:
    found = []
    for i in range(SAMPLES):
        found.append((f"{shard:04d}-{i:04d}.txt", f"text {shard} {i}".encode() * (1 + i % 3)))
        if alike or (shard + i) % 3:
            found.append((f"{shard:04d}-{i:04d}.cls", str(i).encode()))
    return found


def batches(shards: str, count: int | None = None, **settings: Any) -> list[str]:
    with sp.SavableLoader(Pipeline(shards), seed=3, lanes=4, **settings) as loader:
        return [digest(batch) for batch in islice(loader, count)]


@pytest.mark.parametrize(("server", "workers"), [("alike", 0), ("unlike", 2)], indirect=["server"])
def test_remote_batches_equal_local_ones(server: ToyServer, tmp_path: Path, workers: int) -> None:
    found = batches(f"{server.url}/shards/", num_workers=workers)
    assert found == batches(str(tmp_path / "shards"))
    (here,) = (tmp_path / "cache").glob("*/*/*/index")
    assert here.read_bytes() == (tmp_path / "shards" / INDEX_NAME).read_bytes()


@pytest.mark.parametrize("server", ["alike", "unlike"], indirect=True)
def test_only_needed_index_rows_are_downloaded(server: ToyServer, tmp_path: Path) -> None:
    size = (tmp_path / "shards" / INDEX_NAME).stat().st_size
    dataset = open_any(f"{server.url}/shards/")
    head = server.sent(INDEX_NAME)
    rows = size - head
    assert rows > 0.6 * size
    dataset.locate(np.arange(5 * SAMPLES, 6 * SAMPLES))
    assert 0 < server.sent(INDEX_NAME) - head < rows / 40
    dataset.locate(np.arange(5 * SAMPLES, 6 * SAMPLES))
    dataset.locate(np.arange(6 * SAMPLES, 9 * SAMPLES))
    assert rows / 20 < server.sent(INDEX_NAME) - head < rows / 10


@pytest.mark.parametrize(("change", "on_error"), [("rows", "raise"), ("size", "skip"), ("version", "raise")])
def test_index_replaced_during_a_run_is_an_error_and_its_state_still_resumes(
    server: ToyServer, tmp_path: Path, change: str, on_error: Any
) -> None:
    index = tmp_path / "shards" / INDEX_NAME
    whole, stat = index.read_bytes(), index.stat()
    expected = batches(str(tmp_path / "shards"))
    with sp.SavableLoader(Pipeline(f"{server.url}/shards/", on_error), seed=3, lanes=4) as loader:
        given = [digest(next(loader)) for _ in range(3)]
        zeros = whole[: len(whole) // 3].ljust(len(whole) + (8 if change == "size" else 0), b"\0")
        index.write_bytes(whole if change == "version" else zeros)
        if change == "rows":
            os.utime(index, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the server takes it for the same
        with pytest.raises(RemoteError, match=rf"{INDEX_NAME}: .* replaced in the run"):
            given.extend(digest(batch) for batch in loader)
        state = loader.state_dict()
    index.write_bytes(whole)
    with sp.SavableLoader(Pipeline(f"{server.url}/shards/", on_error), seed=3, lanes=4) as loader:
        loader.load_state_dict(state)
        assert given + [digest(batch) for batch in loader] == expected


def test_cached_index_parts_are_reused_and_lost_ones_downloaded_again(server: ToyServer, tmp_path: Path) -> None:
    url = f"{server.url}/shards/"
    first, sent = batches(url), server.sent("")
    assert batches(url) == first
    assert server.sent("") == sent
    (here,) = (tmp_path / "cache").glob("*/*/*/index")
    raw, marks = here.read_bytes(), here.with_name("parts")
    with here.open("r+b") as file:  # as if the last rows had not reached the disk
        file.seek(len(raw) - 200)
        file.write(bytes(200))
    assert batches(url) == first
    assert here.read_bytes() == raw
    for left in (0, 300):
        os.truncate(here, left)
        assert batches(url) == first
    marks.write_bytes(b"\1" * 5)
    assert batches(url) == first
    assert marks.read_bytes().count(b"\1") == SHARDS


def test_only_added_shards_are_indexed(server: ToyServer, tmp_path: Path) -> None:
    write_tar(tmp_path / "shards" / f"{SHARDS:04d}.tar", members(SHARDS, alike=False))
    sent = server.sent()
    dataset = open_any(f"{server.url}/shards/{{0000..{SHARDS:04d}}}.tar")
    assert server.sent() - sent == (tmp_path / "shards" / f"{SHARDS:04d}.tar").stat().st_size
    assert dataset.manifest() == open_any(str(tmp_path / "shards")).manifest()


def test_part_sizes_are_estimated_from_some_samples(server: ToyServer) -> None:
    sizes, looked_at = open_any(f"{server.url}/shards/").part_sizes()
    assert len(sizes["txt"]) == looked_at == SHARDS * SAMPLES
    assert set(sizes) == {"txt", "cls"}


def test_truncated_or_forged_index_head_is_rebuilt(server: ToyServer, tmp_path: Path) -> None:
    index = tmp_path / "shards" / INDEX_NAME
    raw = index.read_bytes()
    for n, wrong in enumerate([raw[:60], raw[:16] + b"\xff" * 8 + raw[24:], raw[:30] + b"x" + raw[31:]]):
        index.write_bytes(wrong)
        dataset = open_any(f"{server.url}/shards/{{0000..0002}}.tar", cache=(tmp_path / f"cache{n}", None))
        assert dataset.count == 3 * SAMPLES


def others_beside(tmp_path: Path, kind: str) -> str:
    """Files of another kind below the server's folder, with their index; gives its path there."""
    (tmp_path / kind).mkdir()
    WRITERS[kind](tmp_path / kind)
    index_files(tmp_path / kind, format_named(kind))
    return format_named(kind).index_name


@pytest.fixture
def parts_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    yield from served_by_parts(tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_every_format_use_partial_indexes_and_none_is_requested_at_start(
    parts_server: ToyServer, tmp_path: Path, kind: str
) -> None:
    name = others_beside(tmp_path, kind)
    asked = set[str]()

    def note(path: str, number: int) -> None:
        asked.add(path.rpartition("/")[2])

    parts_server.fault = note
    dataset = open_any(f"{parts_server.url}/{kind}/")
    if kind not in LISTED:  # an index.json names several that may be there
        assert not asked.intersection(names_of(kind))
    here = open_any(str(tmp_path / kind))
    assert dataset.manifest() == here.manifest()
    (cached,) = (tmp_path / "cache").glob("*/*/*/index")
    if kind not in ("tokens", *LISTED):  # of which a few numbers are needed of each file
        assert cached.read_bytes() != (tmp_path / kind / name).read_bytes()
    for shard, row in zip(*(found.tolist() for found in here.locate(np.arange(here.count))), strict=True):
        for extension in here.store.extensions(shard, row):
            assert dataset.read(shard, row, extension) == here.read(shard, row, extension)
    assert cached.read_bytes() == (tmp_path / kind / name).read_bytes()


def test_an_index_of_twenty_thousand_files_is_opened_in_a_few_requests_and_little_memory(
    parts_server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, lines, form = 20_000, 40, format_named("jsonl")
    places = np.arange(0, 250 * (lines + 1), 250, dtype="<u8").tobytes()
    entries = (ShardEntry(f"{n // 1000:03d}/{n:06d}.jsonl", 250 * lines, lines, n) for n in range(files))
    index = tmp_path / "many" / form.index_name
    write_index(index, (ShardTable(entry, places) for entry in entries), form)
    monkeypatch.setattr(lookup, "PIECE", 8 << 20)
    tracemalloc.start()
    try:
        store = JsonlStore(open_indexed(find_source(f"{parts_server.url}/many/", format="jsonl"), form))
        requests, sent, most = parts_server.requests, parts_server.sent(".index"), tracemalloc.get_traced_memory()[1]
        assert store.offset(17_777, 3) == 750
    finally:
        tracemalloc.stop()
    assert requests < 20 and sent < 0.3 * index.stat().st_size
    assert most < 10e6
    assert parts_server.requests == requests + 1
    assert store.part_sizes() is None  # which would take all rows
