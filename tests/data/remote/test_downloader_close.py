"""A downloader that is closed while a thread waits for its answer leaves no one reading a descriptor of another's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from savable_pipeline.data.remote.session import Downloader
from savable_pipeline.errors import RemoteError


def test_a_thread_that_waits_has_ended_before_the_descriptor_is_free(tmp_path: Path) -> None:
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
