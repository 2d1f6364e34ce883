"""Processes of a node that ask for a listing at the same time share one."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from savable_pipeline.data.remote.listing import Listing, shared_answer


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


def test_who_asks_while_another_lists_takes_what_it_finds_and_who_asks_later_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert {each.result(60).texts()[0] for each in (first, *others)} == {"1.tar"}
    assert bucket.listed == 1
    assert shared_listing(tmp_path, "s3://b", bucket).texts()[0] == "2.tar"


def test_who_waited_for_one_that_failed_or_left_rubbish_lists(tmp_path: Path) -> None:
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
        assert second.result(60).texts()[0] == "2.tar"
