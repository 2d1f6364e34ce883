"""A server of a folder, and a cache and temporary files of the test's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from savable_pipeline.remote.scratch import close_scratch
from tests.support.toy_server import ToyServer, serving, use_as_s3


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    (tmp_path / "www").mkdir()
    (tmp_path / "node").mkdir()
    get_temp_dir()  # of multiprocessing: for its sockets the path below would be too long
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "5")
    with serving(tmp_path / "www") as server:
        use_as_s3(server, monkeypatch)
        yield server
    close_scratch()
