"""Over nginx and over an S3 server, by real sockets, a run gives what it gives from a disk, whatever they do."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.errors import RemoteError
from tests.conftest import write_numbered_shards
from tests.data.dataset.test_remote_dataset import STEPS, batches, loader_of
from tests.support.real_servers import Nginx, bucket_of, nginx
from tests.support.toy_remote_stores import KINDS, WRITERS, ids_pipeline, urls_of


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that nginx's workers can read, whoever they are; `www/data` holds four indexed shards of 30 kB."""
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "10")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        write_numbered_shards(Path(folder, "www", "data"), [20, 33, 25, 40], pad="x" * 700)
        sp.TarShardReader(f"{folder}/www/data", sp.Lane())  # makes the index
        yield Path(folder)


@pytest.fixture
def data(root: Path) -> Path:
    return root / "www" / "data"


@pytest.fixture
def expected(data: Path) -> list[Any]:
    with loader_of(data) as loader:
        return batches(loader)


@pytest.fixture
def web(root: Path) -> Iterator[Nginx]:
    with nginx(root) as server:
        yield server


def resumed(before: str, after: str, **settings: Any) -> list[Any]:
    """Seventeen batches of shards at one place, and with a state through them the rest of those at another."""
    with loader_of(before, **settings) as loader:
        found = batches(loader, 17)
        state = loader.state_dict()
    with loader_of(after, **settings) as loader:
        loader.load_state_dict(state)
        return found + batches(loader, STEPS - 17)


# nginx.


@pytest.mark.parametrize("cache_bytes", [10**8, 60_000])  # all of it in pieces, and block by block
def test_nginx_and_disk_yield_the_same_and_runs_resume_between_them(
    web: Nginx, data: Path, expected: list[Any], cache_bytes: int
) -> None:
    url = f"{web.url}/data/"
    assert resumed(url, url, num_workers=2, cache_bytes=cache_bytes) == expected
    assert resumed(str(data), url, cache_bytes=cache_bytes) == expected
    assert resumed(url, str(data), cache_bytes=cache_bytes) == expected


@pytest.mark.parametrize(
    ("rule", "status"),
    [
        ("limit_rate 60k;", "206"),
        ("limit_req zone=all;", "503"),  # for whatever comes more often than every 5 ms
        ("limit_req zone=all; limit_req_status 429;", "429"),
        ("if ($connection_requests = 2) { return 444; }", "444"),  # closes the connection without an answer
        ("keepalive_requests 1;", "206"),
    ],
)
def test_slow_or_failing_server_changes_nothing(web: Nginx, expected: list[Any], rule: str, status: str) -> None:
    web.follow(rule)
    with loader_of(f"{web.url}/data/") as loader:
        assert batches(loader) == expected
    assert web.answers()[status]


def test_workers_of_nginx_that_are_killed_while_they_send_change_nothing(web: Nginx, expected: list[Any]) -> None:
    web.follow("limit_rate 20k;")  # so that a shard takes more than a second
    killer = threading.Thread(target=web.kill_workers_while_they_send)
    killer.start()
    with loader_of(f"{web.url}/data/") as loader:
        assert batches(loader) == expected
    assert not killer.is_alive()


def test_nginx_down_is_an_error_and_the_run_continues_when_it_is_back(
    web: Nginx, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVABLE_RETRY_S", "3")
    with loader_of(f"{web.url}/data/", cache_bytes=60_000) as loader:
        found = batches(loader, 3)
        web.follow("return 503;")
        with pytest.raises(RemoteError, match=rf"{web.url}/data/000.\.tar: ([2-9]|\d\d+) tries in .* s failed: .*503"):
            for _ in range(STEPS):
                found.append(next(loader))
        web.follow("")
        assert found + batches(loader, STEPS - len(found)) == expected


def test_shard_removed_from_nginx_is_an_error_or_skipped_like_on_disk(web: Nginx, data: Path) -> None:
    url = f"{web.url}/data/"
    (data / "0002.tar").unlink()
    with loader_of(url) as loader, pytest.raises(sp.ShardError, match=f"{url}0002.tar: no such object on the server"):
        batches(loader)
    with loader_of(data, on_error="skip") as there, loader_of(url, on_error="skip") as here:
        assert batches(here) == batches(there)


def test_a_shard_that_nginx_may_not_read_is_an_error_that_skipping_does_not_hide(web: Nginx, data: Path) -> None:
    (data / "0002.tar").chmod(0)
    url = f"{web.url}/data/"
    with (
        loader_of(url, on_error="skip") as loader,
        pytest.raises(RemoteError, match=rf"{url}0002.tar: Perm.* Check the address and the credentials"),
    ):
        batches(loader)


def test_nginx_without_an_index_serves_shards_to_build_one(web: Nginx, data: Path, expected: list[Any]) -> None:
    (data / ".nv-meta" / "savable.index").unlink()
    with loader_of(f"{web.url}/data/{{0000..0003}}.tar") as loader:
        assert batches(loader) == expected
    with pytest.raises(sp.ShardError, match=f"{web.url}/data: no .*web servers cannot be listed"):
        open_any(f"{web.url}/data/")


# Buckets.


@pytest.mark.landing
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_bucket_and_disk_yield_the_same_and_runs_resume_between_them(
    data: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url = f"{kind}://data/some/where/"
    with bucket_of(data, monkeypatch):
        assert resumed(url, url, num_workers=2) == expected
        for pattern in (f"{kind}://data/some/*/*.tar", f"{url}{{0000..0003}}.tar"):
            assert resumed(pattern, pattern) == expected
        assert resumed(str(data), url, cache_bytes=60_000) == expected
        assert resumed(url, str(data)) == expected


def test_deleted_or_replaced_object_is_an_error_or_skipped_like_on_disk(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "s3://data/some/where/{0000..0003}.tar"
    with bucket_of(data, monkeypatch) as bucket:
        bucket.Object("some/where/0002.tar").delete()
        with loader_of(url) as loader, pytest.raises(sp.ShardError, match=r"where/0002.tar: no such object"):
            batches(loader)
        (data / "0002.tar").unlink()
        with loader_of(data, on_error="skip") as there, loader_of(url, on_error="skip") as here:
            assert batches(here) == batches(there)
        bucket.put_object(Key="some/where/0002.tar", Body=os.urandom(1536))
        with (
            loader_of(url) as loader,
            pytest.raises(sp.ShardError, match=r"0002.tar: 1536 bytes, but \d+ when indexed"),
        ):
            batches(loader)


def test_missing_bucket_is_an_error_that_names_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_of(data, monkeypatch), pytest.raises(RemoteError, match=r"s3://nowhere/x: .*404.*Check the addr"):
        open_any("s3://nowhere/x/")


@pytest.mark.parametrize("kind", KINDS)
def test_run_over_nginx_yields_the_same_for_any_format(root: Path, web: Nginx, kind: str) -> None:
    folder = root / "www" / kind
    folder.mkdir()
    WRITERS[kind](folder)
    web.follow("limit_req zone=all burst=5 nodelay; limit_req_status 503;")
    found = []
    for files in (str(folder), urls_of(web.url, kind)):
        pipeline = functools.partial(ids_pipeline, kind, files)
        with sp.SavableLoader(pipeline, seed=5, lanes=6, num_workers=2) as loader:
            found.append(batches(loader))
    assert found[0] == found[1]
    assert web.answers()["206"]
