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


@pytest.fixture(autouse=True)
def _ranges_of_few_rows() -> Iterator[None]:
    """Small sources have several ranges, as large ones have."""
    with pytest.MonkeyPatch.context() as patch:  # which the `undo` of a test does not undo
        patch.setattr("savable_pipeline.tools.convert.ranges.LEAST_BYTES", 1)
        yield
