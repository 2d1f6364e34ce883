"""A server that is down is waited for as long as the setting says; what is asked for at once follows the speed.

What somebody waits for starts at once and first; what is fetched ahead starts while the link has room.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from savable_pipeline.core.files import retry_s
from savable_pipeline.data.remote import object_store
from savable_pipeline.data.remote.cache_files import PIECE
from savable_pipeline.data.remote.download_process import QueuedRequest, RequestQueue
from savable_pipeline.data.remote.listing import Listing
from savable_pipeline.data.remote.object_store import ObjectStore, Pace
from savable_pipeline.data.remote.session import Urgency
from savable_pipeline.errors import RemoteError


class Clock:
    """Stands in for `time`: a sleep takes none, and it goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(object_store, "time", clock)
    monkeypatch.delenv("SAVABLE_RETRY_S", raising=False)
    return clock


def server(clock: Clock, monkeypatch: pytest.MonkeyPatch, up_at: float) -> ObjectStore:
    """A server that is down until `up_at`."""

    def listing(store: object) -> list[list[dict[str, object]]]:
        if clock.now < up_at:
            raise OSError("connection refused")
        return [[{"path": "a.tar", "size": 5, "e_tag": "x", "last_modified": 1}]]

    monkeypatch.setattr(object_store.obstore, "list", listing)
    return ObjectStore(retry_s())


def test_server_down_for_thirty_seconds_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server(clock, monkeypatch, up_at=30.0).listing("http://127.0.0.1:1/") == Listing.of([("a.tar", 5, '"x"')])
    assert 30 <= clock.now < 50


def test_a_server_that_stays_down_is_an_error_within_two_minutes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match=r"\d+ tries in 1\d\d\.\d s failed.*connection refused"):
        server(clock, monkeypatch, up_at=1e9).listing("http://127.0.0.1:1/")
    assert 100 < clock.now <= 120


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers each request with this status and four bytes, whatever range is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"data")

        do_PUT = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_without_credentials_the_error_names_the_variables_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with answering(403) as url:  # as machines answer that have no role
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        with pytest.raises(RemoteError, match=r"^s3://bucket/: no AWS credentials found\. Set AWS_ACCESS_KEY_ID"):
            ObjectStore(1.0).listing("s3://bucket/")


def test_a_server_that_ignores_ranges_is_named_as_the_cause() -> None:
    with answering(200) as url, pytest.raises(RemoteError, match="the server does not support range requests"):
        ObjectStore(1.0).copy(url, "a.tar", 1, 3, 4, lambda data, offset: None)


def pace_of(bytes_per_s: float, seconds: float = 10.0, step_s: float = 0.1) -> Pace:
    """The pace of a process to which bytes have come at this speed."""
    clock = Clock()
    pace = Pace(clock.monotonic)
    with pace.measure_request() as came:
        for _ in range(round(seconds / step_s)):
            clock.now += step_s
            came(int(bytes_per_s * step_s))
    return pace


@pytest.mark.parametrize(
    ("bytes_per_s", "at_once", "request_bytes"),
    [
        (1e4, 1 << 19, 1 << 17),
        (5e5, 1e6, 2.5e5),
        (2.5e6, 5e6, 1 << 20),
        (1e7, 2e7, 2.5e6),
        (1e9, 2e9, PIECE),
    ],
)
def test_two_seconds_of_bytes_are_requested_at_once(bytes_per_s: float, at_once: float, request_bytes: float) -> None:
    pace = pace_of(bytes_per_s)
    assert pace.bytes_at_once == pytest.approx(at_once, rel=0.02)
    assert pace.request_bytes == pytest.approx(request_bytes, rel=0.02)
    assert pace.chunk_bytes <= pace.request_bytes / 16


def test_change_of_link_speed_is_detected_within_three_seconds() -> None:
    clock = Clock()
    pace = Pace(clock.monotonic)
    with pace.measure_request() as came:
        for speed in (1e8, 1e6, 1e8):
            for _ in range(12):
                clock.now += 0.25
                came(int(speed * 0.25))
            assert pace.bytes_at_once == pytest.approx(2 * speed, rel=0.15)


def test_idle_time_does_not_count_for_link_speed() -> None:
    clock = Clock()
    pace = Pace(clock.monotonic)
    for _ in range(20):
        clock.now += 1000
        with pace.measure_request() as came:
            clock.now += 0.125  # shorter than what is measured over
            came(1 << 19)
    assert pace.bytes_at_once == pytest.approx(8 << 20, rel=0.01)


AT_ONCE = Pace().bytes_at_once


def request(number: int, urgency: Urgency = Urgency.LATER, size: int = 10 * AT_ONCE) -> QueuedRequest:
    return QueuedRequest(urgency, number, 0, "rows", (), size)


class Threads:
    """Take requests from a queue, each a single one."""

    def __init__(self, queue: RequestQueue) -> None:
        self.got: list[QueuedRequest] = []
        for _ in range(16):
            threading.Thread(target=lambda: self.got.append(queue.get()), daemon=True).start()

    def numbers(self, count: int) -> list[int]:
        """The numbers of the requests that have begun, once there are `count` of them, and a little later."""
        deadline = time.monotonic() + 60
        while len(self.got) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return [one.number for one in self.got]


def test_the_most_urgent_comes_first_then_the_oldest() -> None:
    queue = RequestQueue(Pace(), 16)
    for number, urgency in enumerate([Urgency.LATER, Urgency.SOON, Urgency.NOW, Urgency.SOON, Urgency.NOW]):
        queue.put(request(number, urgency, size=1))
    assert [queue.get().number for _ in range(5)] == [2, 4, 1, 3, 0]


def test_only_awaited_requests_exceed_the_pace() -> None:
    queue = RequestQueue(Pace(), 16)
    for number in range(12):
        queue.put(request(number))
    threads = Threads(queue)
    assert threads.numbers(4) == [0, 1, 2, 3]  # each a quarter of what is asked for at once
    queue.put(request(20, Urgency.SOON))
    queue.put(request(21, Urgency.NOW))
    assert threads.numbers(5)[4:] == [21]
    queue.done(threads.got[4])
    queue.done(threads.got[0])
    assert threads.numbers(6)[5:] == [20]


def test_small_requests_use_all_threads_except_those_reserved_for_urgent_ones() -> None:
    queue = RequestQueue(Pace(), 5)
    for number in range(9):
        queue.put(request(number, size=6000))
    assert len(Threads(queue).numbers(5)) == 5
