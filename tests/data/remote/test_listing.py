"""A listing of a bucket: its objects in the order of their names, however the server orders and cuts them.

Processes of a node that ask for one at the same time share it.
"""

from __future__ import annotations

import fcntl
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.remote import listing as listing_file
from savable_pipeline.data.remote import object_store
from savable_pipeline.data.remote.listing import Listing, shared_answer
from savable_pipeline.data.remote.object_store import ObjectStore
from savable_pipeline.data.stores.opening import index_any
from tests.conftest import write_tar
from tests.support import toy_server
from tests.support.toy_server import ToyServer, serving, use_as_s3

OBJECTS = [("a-b.tar", 3, "one"), ("a.tar", 1 << 40, "two"), ("a/b.tar", 0, ""), ("z/\N{SNOWMAN}.tar", 7, "\xe9")]


def test_objects_are_listed_by_name_with_size_and_etag() -> None:
    mixed = random.Random(0).sample(OBJECTS, len(OBJECTS))
    listing = Listing.of(mixed)
    assert mixed != OBJECTS
    assert list(listing) == OBJECTS
    assert len(listing) == len(OBJECTS)
    assert listing == Listing.of(OBJECTS)
    assert list(Listing.of([])) == []
    assert [listing.find(name) for name, _, _ in OBJECTS] == [(size, stamp) for _, size, stamp in OBJECTS]
    assert [listing.find(name) for name in ("", "a", "a.tar2", "zz")] == [None] * 4


def test_selected_objects_are_listed_with_size_and_etag() -> None:
    listing = Listing.of(OBJECTS)
    assert listing.only(lambda name: True) is listing
    assert list(listing.only(lambda name: "b" in name)) == [OBJECTS[0], OBJECTS[2]]


def test_a_name_with_a_zero_byte_is_an_error() -> None:
    with pytest.raises(sp.ShardError, match="has a zero byte"):
        Listing.of([("a\0b.tar", 1, "")])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    """A bucket of 25 shards, which is listed 4 objects at a time, in an order of its own."""
    for shard in range(25):
        folder = tmp_path / "bucket" / ("a", "a-b", "")[shard % 3]
        write_tar(folder / f"{shard:02d}.tar", [(f"{shard}.txt", b"x")])
    monkeypatch.setattr(toy_server, "PAGE", 4)
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path) as server:
        use_as_s3(server, monkeypatch)
        yield server


def test_a_bucket_is_listed_page_by_page(server: ToyServer, tmp_path: Path) -> None:
    files = {file.relative_to(tmp_path / "bucket").as_posix() for file in (tmp_path / "bucket").rglob("*.tar")}
    names = [name for first in range(0, 25, 4) for name, _, _ in server.page("bucket", "", first)[0]]
    assert sorted(names) == sorted(files) != names
    store = ObjectStore(1.0)
    listed = store.listing("s3://bucket")
    assert [name for name, _, _ in listed] == sorted(files)
    assert [store.stat("s3://bucket", name) for name, _, _ in listed] == [each[1:] for each in listed]
    assert open_any("s3://bucket").manifest() == open_any(str(tmp_path / "bucket")).manifest()


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each text of names or stamps that is searched for its ends from now on, in this process."""
    passes, whole = [], listing_file._texts

    def counted(raw: bytes) -> Any:
        passes.append(len(raw))
        return whole(raw)

    monkeypatch.setattr(listing_file, "_texts", counted)
    return passes


def test_finding_names_reads_the_listing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = [(f"{number:04d}.tar", number, f"{number:x}") for number in range(1000)]
    listing = Listing.of(objects)
    passes = count_passes(monkeypatch)
    assert [listing.find(name) for name, _, _ in objects] == [each[1:] for each in objects]
    assert listing.find("1000.tar") is None
    assert len(passes) == 2  # the names and the stamps


def test_indexing_an_unchanged_bucket_lists_it_once_and_requests_no_shard(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_path, faults = index_any("s3://bucket")
    pages, page = [], server.page
    monkeypatch.setattr(server, "page", lambda *asked: pages.append(asked[2]) or page(*asked))
    found, passes = [], count_passes(monkeypatch)
    find = Listing.find
    monkeypatch.setattr(Listing, "find", lambda self, name: found.append(name) or find(self, name))
    assert index_any("s3://bucket") == (index_path, faults)
    assert pages.count(4) == 1  # the second page of a listing; one object of the first may be asked for alone
    assert not [name for name in found if name.endswith(".tar")]
    assert len(passes) < 10


def test_failed_listing_restarts(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ObjectStore(1.0).listing("s3://bucket")
    server.requests = 0
    server.fault = lambda path, number: "reset" if number in (3, 8) else None
    assert ObjectStore(5.0).listing("s3://bucket") == expected
    assert server.requests == 3 + 5 + 7


def test_listing_that_makes_progress_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def listing(store: object) -> Iterator[list[dict[str, object]]]:
        nonlocal tries
        tries += 1
        for number in range(min(tries, 30)):
            yield [{"path": f"{number:02d}.tar", "size": 1, "e_tag": "x", "last_modified": 1}]
        if tries < 30:
            raise OSError("connection refused")

    monkeypatch.setattr(object_store.obstore, "list", listing)
    monkeypatch.setattr(object_store, "_FIRST_WAIT_S", 0.05)
    assert len(ObjectStore(0.12).listing("http://127.0.0.1:1/")) == 30


def shared_listing(cache: Path, root: str, listing: Callable[[str], Listing]) -> Listing:
    return shared_answer(cache, root, lambda: listing(root), Listing)


class Bucket:
    """Counts how often it is listed; each listing waits until `go` is set."""

    def __init__(self) -> None:
        self.listed, self.go, self.asked = 0, threading.Event(), threading.Event()

    def __call__(self, root: str) -> Listing:
        self.listed += 1
        self.asked.set()
        assert self.go.wait(60)
        return Listing.of([(f"{self.listed}.tar", 9, "stamp")])


def test_concurrent_listings_are_shared_and_later_ones_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, waiting, flock = Bucket(), threading.Semaphore(0), fcntl.flock

    def watched(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            waiting.release()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(shared_listing, tmp_path, "s3://b", bucket)
        assert bucket.asked.wait(60)
        others = [pool.submit(shared_listing, tmp_path, "s3://b", bucket) for _ in range(3)]
        elsewhere = pool.submit(shared_listing, tmp_path, "s3://c", lambda root: Listing.of([("c.tar", 1, "")]))
        assert elsewhere.result(60) == Listing.of([("c.tar", 1, "")])  # waits for nobody
        assert all(waiting.acquire(timeout=60) for _ in others)
        bucket.go.set()
        assert {each.result(60).all_names[0] for each in (first, *others)} == {"1.tar"}
    assert bucket.listed == 1
    assert shared_listing(tmp_path, "s3://b", bucket).all_names[0] == "2.tar"


def test_waiting_process_lists_itself_after_a_failed_listing(tmp_path: Path) -> None:
    bucket = Bucket()

    def failing(root: str) -> Listing:
        bucket(root)
        next((tmp_path / "listings").iterdir()).write_bytes(b"rubbish")
        raise OSError("the server is down")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared_listing, tmp_path, "s3://b", failing)
        assert bucket.asked.wait(60)
        second = pool.submit(shared_listing, tmp_path, "s3://b", bucket)
        threading.Timer(0.2, bucket.go.set).start()
        with pytest.raises(OSError, match="the server is down"):
            first.result(60)
        assert second.result(60).all_names[0] == "2.tar"
