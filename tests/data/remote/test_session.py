"""An opening asks a server for each thing once, by the one downloading process of this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline.core import child_process
from savable_pipeline.data.remote.session import Session, job_session, scratch
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.stores.opening import find_source, index_any, open_store
from tests.conftest import write_numbered_shards
from tests.support import toy_server
from tests.support.toy_server import ToyServer, serving_a_machine

SHARDS = 4


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    gc.collect()  # closes the processes that tests before have left
    with serving_a_machine(tmp_path, monkeypatch) as server:
        write_numbered_shards(tmp_path / "www" / "b" / "tars", [2] * SHARDS)
        folder = tmp_path / "www" / "b" / "tables"
        folder.mkdir()
        for number in range(SHARDS):
            pq.write_table(
                pa.table({"json": [f'{{"id": {2 * number + i}}}' for i in range(2)]}), folder / f"{number}.parquet"
            )
        for name in ("tars", "tables"):
            index_any(tmp_path / "www" / "b" / name, processes=1)
        yield server


@pytest.fixture
def children(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The downloading processes that were started; one that indexes the server's tables was started before."""
    begun: list[Any] = []
    start = child_process.subprocess.Popen

    def counted(*arguments: Any, **settings: Any) -> Any:
        begun.append(start(*arguments, **settings))
        return begun[-1]

    monkeypatch.setattr(child_process.subprocess, "Popen", counted)
    return begun


def opened(server: ToyServer, url: str) -> tuple[Any, int]:
    """The dataset there, and the requests that opening it took."""
    before = server.requests
    return sp.open_dataset(url), server.requests - before


@pytest.mark.parametrize("behind", ["s3://b", "server"])
@pytest.mark.parametrize("name", ["tars", "tables"])
def test_an_opening_is_one_process_and_few_requests(
    server: ToyServer, children: list[Any], name: str, behind: str
) -> None:
    url = f"{behind.replace('server', f'{server.url}/b')}/{name}/"
    data, cold = opened(server, url)
    assert [sample.json()["id"] for sample in data] == list(range(2 * SHARDS))
    del data
    again, warm = opened(server, url)
    assert again[0].json() == {"id": 0}
    assert len(children) <= 2  # the second opening started its own, if the first dataset was gone
    assert warm <= 5
    assert cold <= (8 if name == "tars" or behind != "server" else 20)


def test_two_hundred_shards_with_an_index_are_opened_in_few_requests(server: ToyServer, tmp_path: Path) -> None:
    folder = tmp_path / "www" / "b" / "many"
    write_numbered_shards(folder, [1] * 200)
    sp.open_dataset(folder)
    assert opened(server, "s3://b/many/")[1] <= 8
    assert opened(server, f"{server.url}/b/many/")[1] <= 8


def test_added_shards_are_found_by_the_next_opening(server: ToyServer, tmp_path: Path) -> None:
    folder, url = tmp_path / "www" / "b" / "tars", "s3://b/tars/"
    first = sp.open_dataset(url)
    (folder / "split.txt").write_text("of no shard")
    write_numbered_shards(tmp_path / "more", [3])
    (tmp_path / "more" / "0000.tar").rename(folder / "0009.tar")
    (folder / META / "split.yaml").write_text("split_parts: {few: ['0009.tar']}\n")
    second = sp.open_dataset(url)
    assert (len(first), len(second)) == (2 * SHARDS, 2 * SHARDS + 3)
    (few,) = list(sp.SavableLoader(sp.read(url, split="few", epochs=1).map(ids).batch(3), seed=1, lanes=1))
    assert sorted(few.tolist()) == [0, 1, 2]
    (folder / META / "split.yaml").write_text("split_parts: {few: ['0000.tar']}\n")
    (few,) = list(sp.SavableLoader(sp.read(url, split="few", epochs=1).map(ids).batch(3), seed=1, lanes=1))
    assert sorted(few.tolist()) == [0, 1]


def test_metadata_without_an_etag_are_read_at_each_opening(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, split = f"{server.url}/b/tars/", tmp_path / "www" / "b" / "tars" / META / "split.yaml"
    monkeypatch.setattr(toy_server, "_tag", lambda stat: "")
    for shard in (0, 1):  # of one length, within one second
        split.write_text(f"split_parts: {{few: ['000{shard}.tar']}}\n")
        (few,) = list(sp.SavableLoader(sp.read(url, split="few", epochs=1).map(ids).batch(3), seed=1, lanes=1))
        assert sorted(few.tolist()) == [2 * shard, 2 * shard + 1]


def ids(sample: sp.Sample) -> int:
    return int(sample.json()["id"])


def test_reopened_source_is_checked_again(server: ToyServer, tmp_path: Path) -> None:
    source = find_source("s3://b/tars/")
    assert len(open_store(source).entries) == SHARDS
    write_numbered_shards(tmp_path / "more", [3])
    (tmp_path / "more" / "0000.tar").rename(tmp_path / "www" / "b" / "tars" / "0009.tar")
    assert len(open_store(source).entries) == SHARDS + 1


def test_each_job_repeats_its_requests(server: ToyServer, tmp_path: Path) -> None:
    url, found = f"{server.url}/b/tars", set()
    for size in (3, 4):
        (tmp_path / "www" / "b" / "tars" / "a.txt").write_bytes(bytes(size))
        found.add(job_session().stat(url, "a.txt"))
        with scratch() as (_, session):
            found.add(session.stat(url, "a.txt"))
    assert len(found) == 2


def test_datasets_of_one_cache_share_a_process_that_ends_with_the_last(
    server: ToyServer, children: list[Any], tmp_path: Path
) -> None:
    some = [sp.open_dataset(f"s3://b/{name}/") for name in ("tars", "tables", "tars")]
    assert [data[1].json() for data in some] == [{"id": 1}] * 3
    (only,) = children
    elsewhere = sp.open_dataset("s3://b/tars/", cache=tmp_path / "other")
    assert elsewhere[0].json() == {"id": 0} and len(children) == 2
    del some[1:]
    gc.collect()
    assert only.poll() is None
    del some[:]
    gc.collect()
    only.wait()  # it ends by itself


def test_repeated_lookups_of_an_opening_are_requested_once(server: ToyServer, tmp_path: Path) -> None:
    session = Session(tmp_path / "cache", 10**8)
    url, before = f"{server.url}/b/tars", server.requests
    for _ in range(3):
        assert session.stats(url, ["0000.tar", "no.tar"]).keys() == {"0000.tar"}
        assert session.stat(url, "no.tar") is None
        assert session.heads(url, {f"{META}/savable.index": 1 << 20, "no.tar": 5}).keys() == {f"{META}/savable.index"}
    assert server.requests - before == 4  # of them one for the bytes
    with pytest.raises(sp.ShardError, match=r"no\.tar: no such object on the server"):
        session.stats(url, ["0000.tar", "no.tar"], needed=True)
    assert [len(head) for head in session.heads(url, {f"{META}/savable.index": 5}).values()] == [5]
    session.forget()
    (tmp_path / "www" / "b" / "tars" / "no.tar").write_bytes(b"now")
    assert session.stat(url, "no.tar") is not None
