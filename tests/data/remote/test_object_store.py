"""A server that is down is waited for as long as the setting says; bytes that come keep a request alive."""

from __future__ import annotations

import pytest

from savable_pipeline.data.remote import object_store
from savable_pipeline.data.remote.listing import Listing
from savable_pipeline.data.remote.object_store import ObjectStore
from savable_pipeline.data.remote.session import retry_s
from savable_pipeline.errors import RemoteError


class Clock:
    """Stands in for `time`: a sleep takes none."""

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


def test_a_server_that_is_down_for_thirty_seconds_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server(clock, monkeypatch, up_at=30.0).listing("http://127.0.0.1:1/") == Listing.of([("a.tar", 5, '"x"')])
    assert 30 <= clock.now < 50


def test_a_server_that_stays_down_is_an_error_within_two_minutes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match=r"tried \d+ times in 1\d\d\.\d s.*connection refused"):
        server(clock, monkeypatch, up_at=1e9).listing("http://127.0.0.1:1/")
    assert 100 < clock.now <= 120
