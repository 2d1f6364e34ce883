"""Which shards a URL means, and where their index comes from."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.remote.listing import Listing
from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.remote.urls import RemoteShards, list_remote, select
from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.paths import is_remote
from savable_pipeline.data.stores.remote_indexing import open_remote
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import RemoteError
from tests.conftest import MakeShards, write_numbered_shards, write_tar
from tests.support.toy_server import ToyServer, serving, use_as_s3


class OneBucket:
    """A session that knows one bucket."""

    def stat(self, root: str, name: str) -> tuple[int, str] | None:
        return (9, "v1") if (root, name) == ("s3://b/p", "a.tar") else None

    def stats(self, root: str, names: list[str]) -> dict[str, tuple[int, str]]:
        return {}

    def heads(self, root: str, most: dict[str, int]) -> dict[str, bytes]:
        return {}

    def listing(self, root: str) -> Listing:
        assert root in ("s3://b/p", "s3://b/p/x")
        names = ["a.tar", "x/b.tar", "x/b.tar.idx", ".nv-meta/c.tar", ".hidden.tar", "d.txt"]
        return Listing.of((name.removeprefix("x/") if root.endswith("/x") else name, 9, "v1") for name in names)


def found(shards: Any, form: Format = TARS) -> tuple[str, list[str], list[int], list[str]]:
    session: Any = OneBucket()
    there = select(list_remote(shards, session), form, None, session)
    return there.root, list(there.names), there.sizes.tolist(), list(there.stamps)


STAMPED = replace(TARS, whole=False)  # whose stamps are compared at each start


def test_a_folder_in_a_bucket_means_the_tars_below_it() -> None:
    assert found("s3://b/p/") == ("s3://b/p", ["a.tar", "x/b.tar"], [9, 9], [])
    assert found("s3://b/p/", STAMPED) == ("s3://b/p", ["a.tar", "x/b.tar"], [9, 9], ["v1", "v1"])
    assert found("s3://b/p/x")[0] == "s3://b/p/x"


def test_brace_pattern_is_expanded_without_requests() -> None:
    names = ["a/08.tar", "a/09.tar", "a/10.tar", "b/08.tar", "b/09.tar", "b/10.tar"]
    assert found("http://h/p/{a,b}/{08..10}.tar") == ("http://h/p", names, [-1] * 6, [])


def test_glob_and_list_are_resolved_in_buckets() -> None:
    assert found("s3://b/p/*.tar") == ("s3://b/p", ["a.tar"], [9], [])
    assert found("s3://b/p/*/b.*", STAMPED) == ("s3://b/p/x", ["b.tar"], [9], ["v1"])
    assert found("s3://b/p/**/[ab].tar")[1] == ["a.tar", "x/b.tar"]
    assert found("s3://b/p/x*")[:2] == ("s3://b/p/x", ["b.tar"])  # a folder, as no object matches
    assert found("s3://b/p/.h*")[1] == [".hidden.tar"]
    assert found(["s3://b/p/q.tar", "s3://b/p/a.tar"]) == ("s3://b/p", ["a.tar", "q.tar"], [-1, -1], [])
    names = ["a.tar", "x/a.tar", "x/b.tar"]
    assert found(["s3://b/p/x/", "s3://b/p/a.tar"], STAMPED) == ("s3://b/p", names, [-1, 9, 9], ["", "v1", "v1"])


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (["s3://b/a.tar", "/c.tar"], "Read remote and local ones separately"),
        ("ftp://h/a.tar", "unsupported URL. Use one of s3, gs, az, http, https, hf"),
        ("https://h/a.tar?token=1", "a URL with a query"),
    ],
)
def test_unsupported_urls_and_mixed_lists_are_an_error(shards: Any, message: str) -> None:
    with pytest.raises(sp.ShardError, match=message):
        is_remote(shards)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (["s3://b/a.tar", "s3://b/{a,c}.tar"], "s3://b/a.tar: the same shard is named twice"),
        (["s3://b/a.tar", "s3://c/a.tar"], "Use one reader for each"),
        (["http://h/a/", "http://h/b/"], "web servers cannot be listed"),
        ("s3://b/p/z*.tar", "no shard matches"),
    ],
)
def test_missing_shards_are_an_error(shards: Any, message: str) -> None:
    with pytest.raises(sp.ShardError, match=message):
        found(shards)


def test_without_obstore_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RemoteError, match=r"pip install obstore"):
        open_any("s3://b/p/", cache=(tmp_path, None))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_shards: MakeShards) -> Iterator[ToyServer]:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "1")
    make_shards([3, 4, 5])
    with serving(tmp_path) as server:
        yield server


def keys(dataset: Dataset) -> list[str]:
    return [dataset.key(shard, row) for shard in range(3) for row in range(*dataset.firsts[shard : shard + 2])]


def test_without_an_index_shards_are_downloaded_once_and_stay_cached(server: ToyServer, tmp_path: Path) -> None:
    url = f"{server.url}/shards/{{0000..0002}}.tar"
    dataset_bytes = sum(path.stat().st_size for path in (tmp_path / "shards").glob("*.tar"))
    dataset = open_any(url)
    assert server.sent() == dataset_bytes
    again = open_any(url)
    assert keys(dataset) == keys(again) == [f"s{i:06d}" for i in range(12)]
    assert server.sent() == dataset_bytes
    assert again.manifest() == open_any(str(tmp_path / "shards")).manifest()


def test_only_added_shards_are_indexed(server: ToyServer, tmp_path: Path) -> None:
    open_any(f"{server.url}/shards/{{0000..0001}}.tar")
    sent = server.sent()
    dataset = open_any(f"{server.url}/shards/{{0000..0002}}.tar")
    assert server.sent() - sent == (tmp_path / "shards" / "0002.tar").stat().st_size
    assert dataset.manifest() == open_any(str(tmp_path / "shards")).manifest()
    assert keys(dataset) == [f"s{i:06d}" for i in range(12)]


def test_cached_shards_are_downloaded_once_more_for_a_larger_index(server: ToyServer, tmp_path: Path) -> None:
    """A limit that docs/add-data.md tells of: the cache belongs to a version of the index."""
    two, three = (f"{server.url}/shards/{{0000..{last}}}.tar" for last in ("0001", "0002"))
    bytes_of_two = sum((tmp_path / "shards" / f"{shard:04d}.tar").stat().st_size for shard in (0, 1))
    open_any(two), open_any(three)
    sent = server.sent()
    keys(open_any(three))
    assert 0 < server.sent() - sent <= bytes_of_two
    sent = server.sent()
    keys(open_any(three))
    assert server.sent() == sent


def test_resized_shard_is_reindexed_together_with_added_ones(server: ToyServer, tmp_path: Path) -> None:
    open_any(f"{server.url}/shards/{{0000..0001}}.tar")
    write_tar(tmp_path / "shards" / "0000.tar", [(f"s{i}.json", b"{}") for i in range(30)])
    dataset = open_any(f"{server.url}/shards/{{0000..0002}}.tar")
    assert dataset.manifest() == open_any(str(tmp_path / "shards")).manifest()


def test_shards_larger_than_the_cache_are_indexed(server: ToyServer) -> None:
    dataset = open_any(f"{server.url}/shards/{{0000..0002}}.tar", cache=(None, 8192))
    assert keys(dataset) == [f"s{i:06d}" for i in range(12)]


def test_unfinished_indexing_reuses_its_downloads(server: ToyServer, tmp_path: Path) -> None:
    url = f"{server.url}/shards/{{0000..0002}}.tar"
    bad, good = tmp_path / "shards" / "0002.tar", tmp_path / "good.tar"
    good.write_bytes(bad.read_bytes())
    bad.write_bytes(b"x" * len(good.read_bytes()))
    with pytest.raises(sp.ShardError, match=rf"{server.url}/shards/0002.tar: no tar header at byte 0"):
        open_any(url)
    sent = server.sent()
    shutil.copy(good, bad)
    assert len(keys(open_any(url))) == 12
    assert server.sent() == sent + bad.stat().st_size


def test_killed_indexing_resumes_although_the_cache_has_no_shard(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{server.url}/shards/{{0000..0002}}.tar"
    three = RemoteShards.named(f"{server.url}/shards", [f"000{number}.tar" for number in range(3)])
    scan, told = Format.scan, list[tuple[int, int]]()

    def killed_at_the_last(form: Format, root: Path, name: str) -> Any:
        if name == "0002.tar":
            raise KeyboardInterrupt
        return scan(form, root, name)

    monkeypatch.setattr(Format, "scan", killed_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        open_remote(url, three, TARS, Session(tmp_path / "cache", 5000), tolerant=False)
    monkeypatch.setattr(Format, "scan", scan)
    (scanned,) = (tmp_path / "cache").glob("*/scan")
    assert {path.name for path in scanned.iterdir() if path.suffix != ".pin"} == {"0002.tar", "index.scanned"}
    sent = server.sent()
    open_remote(
        url,
        three,
        TARS,
        Session(tmp_path / "cache", 5000),
        tolerant=False,
        progress=lambda *numbers: told.append(numbers),
    )
    assert server.sent() == sent
    assert told == [(2, 3), (3, 3)]
    assert not scanned.exists()
    assert open_any(url, cache=(None, 8192)).manifest() == open_any(str(tmp_path / "shards")).manifest()


def test_remains_of_a_changed_shard_are_not_used(server: ToyServer, tmp_path: Path) -> None:
    url = f"{server.url}/shards/{{0000..0002}}.tar"
    truncated = (tmp_path / "shards" / "0002.tar").read_bytes()
    (tmp_path / "shards" / "0002.tar").write_bytes(truncated[:100])
    with pytest.raises(sp.ShardError, match=r"0002\.tar"):
        open_any(url, cache=(None, 8192))
    (scanned,) = (tmp_path / "cache").glob("*/*/scan")
    with (scanned / "index.scanned").open("r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    write_numbered_shards(tmp_path / "shards", [30, 4, 5])
    assert open_any(url, cache=(None, 8192)).manifest() == open_any(str(tmp_path / "shards")).manifest()


def test_web_folder_lists_the_names_of_its_index_or_energons_info(server: ToyServer, tmp_path: Path) -> None:
    with pytest.raises(sp.ShardError, match=r"no .nv-meta/savable.index or .nv-meta/.info.json .* Name the shards"):
        open_any(f"{server.url}/shards/")
    info = tmp_path / "shards" / ".nv-meta" / ".info.json"
    info.parent.mkdir()
    info.write_text(json.dumps({"energon_version": "7", "shard_counts": {"0001.tar": 4, "0000.tar": 3}}))
    assert open_any(f"{server.url}/shards/").count == 7
    open_any(str(tmp_path / "shards"))
    assert open_any(f"{server.url}/shards/").count == 12
    (tmp_path / "shards" / INDEX_NAME).unlink()
    info.write_text(json.dumps({"shard_counts": {"../../../0001.tar": 4}}))
    with pytest.raises(sp.ShardError, match="is outside the dataset"):
        open_any(f"{server.url}/shards/")
    info.write_text("[]")
    with pytest.raises(sp.ShardError, match=r".info.json: expected a mapping, found list"):
        open_any(f"{server.url}/shards/")


def test_index_replaced_on_the_server_is_downloaded_again(
    server: ToyServer, tmp_path: Path, make_shards: MakeShards
) -> None:
    open_any(str(tmp_path / "shards"))
    url = f"{server.url}/shards/"
    assert open_any(url).count == open_any(url).count == 12
    assert len([path for path, _, _ in server.ranges if path.endswith(".index")]) == 1
    make_shards([3, 4, 60])
    open_any(str(tmp_path / "shards"))
    dataset = open_any(url)
    assert dataset.count == 67
    assert dataset.key(2, 12) == "s000012"


def test_an_index_that_does_not_fit_the_bucket_is_rebuilt(
    server: ToyServer, tmp_path: Path, make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    open_any(str(tmp_path / "shards"))
    index = (tmp_path / "shards" / INDEX_NAME).read_bytes()
    make_shards([3, 4, 60])
    (tmp_path / "shards" / INDEX_NAME).write_bytes(index)
    assert open_any("s3://shards/").count == 67
