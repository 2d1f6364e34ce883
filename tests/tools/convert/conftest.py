"""A server of a folder, and a cache and temporary files of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.toy_server import ToyServer, serving_a_machine


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    with serving_a_machine(tmp_path, monkeypatch) as server:
        yield server
