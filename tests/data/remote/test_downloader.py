"""A downloading process that somebody has stopped (SIGSTOP) is replaced once requests would not be tried any longer.

One that is closed while a thread waits for its answer leaves no one reading a descriptor of another's.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.remote.session import Downloader
from savable_pipeline.data.stores.cached_blocks import DownloadedFiles
from savable_pipeline.errors import RemoteError
from tests.conftest import write_numbered_shards
from tests.support.toy_server import ToyServer, serving

pytestmark = pytest.mark.timeout(60)  # beyond which it hangs


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_RETRY_S", "2")
    (tmp_path / "shards").mkdir()
    write_numbered_shards(tmp_path / "shards", [6, 9])
    sp.open_dataset(tmp_path / "shards")
    with serving(tmp_path) as server:
        yield server


def downloader_of(dataset: Dataset) -> Downloader:
    files: Any = dataset.store
    assert isinstance(files.files, DownloadedFiles)
    return files.files.remote.session.connected()


def test_suspended_downloader_is_replaced_and_the_run_continues(
    server: ToyServer, caplog: pytest.LogCaptureFixture
) -> None:
    data = sp.open_dataset(f"{server.url}/shards/")
    data[0].json()
    os.kill(downloader_of(data.dataset).pid, signal.SIGSTOP)
    assert [sample.json()["id"] for sample in data] == list(range(15))
    assert "had been stopped" in caplog.text and "replaced, 1 of 3" in caplog.text


def test_run_continues_after_a_downloader_killed_within_an_answer(server: ToyServer, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(8 << 20))
    downloader = Downloader(tmp_path / "cache", 1 << 30)
    try:
        ticket = downloader.submit("part", server.url, "large", 8 << 20, 0, 8 << 20)
        assert downloader._child.connection.poll(30)  # it sends, and nobody reads
        os.kill(downloader.pid, signal.SIGSTOP)
        with pytest.raises(RemoteError, match="had been stopped"):
            downloader.result(ticket)
        assert downloader.ended
    finally:
        downloader.close()


def test_requests_to_a_hung_downloader_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVABLE_RETRY_S", "1")
    downloader = Downloader(tmp_path / "cache", 1 << 30)
    try:
        os.kill(downloader.pid, signal.SIGSTOP)
        with pytest.raises(RemoteError, match="had been stopped"):
            for _ in range(1000):
                downloader.submit("stat", "http://127.0.0.1:1", "x" * 10_000)
    finally:
        downloader.close()


def test_waiting_thread_ends_before_its_descriptor_is_reused(tmp_path: Path) -> None:
    downloader = Downloader(tmp_path, 1 << 20)
    began, freed = threading.Event(), threading.Event()
    receive, wait_for_answer = downloader._child.connection.recv, downloader._wait_for_answer
    seen: list[bool] = []

    def waiting() -> None:
        began.set()
        wait_for_answer()

    def slow() -> object:
        try:
            return receive()
        finally:
            freed.wait(0.2)  # a thread that the scheduler leaves here, between two reads of a message
            seen.append(downloader._child.connection.closed)

    downloader._child.connection.recv = slow  # type: ignore[method-assign]
    downloader._wait_for_answer = waiting  # type: ignore[method-assign]

    def wait() -> None:
        with pytest.raises(RemoteError, match="ended with code"):
            downloader.result(7)

    thread = threading.Thread(target=wait)
    thread.start()
    began.wait()
    downloader.close()
    freed.set()
    thread.join()
    assert seen == [False]
