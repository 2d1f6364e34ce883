"""Records behind a URL are read in pages; which files of them are there is asked of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from savable_pipeline.tools.convert import remote_folder
from savable_pipeline.tools.convert.remote_folder import Pages


class Counted:
    """Bytes as a file that counts what is read of it."""

    name, size = "a", 50
    data = bytes(range(50))

    def __init__(self) -> None:
        self.reads = 0

    def read(self, offset: int, size: int) -> bytes:
        self.reads += 1
        return self.data[offset : offset + size]

    def expect(self, places: list[tuple[int, int]]) -> None: ...

    def beside(self, suffix: str) -> Path | None: ...


def test_any_stretch_is_read_whichever_pages_it_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "_PAGE", 8)
    pages = Pages(Counted())
    for offset in range(51):
        for size in range(51 - offset):
            assert pages.read(offset, size) == Counted.data[offset : offset + size], (offset, size)


def test_a_page_is_read_once_for_all_that_lies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "_PAGE", 16)
    file = Counted()
    pages = Pages(file)
    for offset in range(0, 48, 2):
        assert pages.read(0, 2) + pages.read(offset, 2) == Counted.data[:2] + Counted.data[offset : offset + 2]
    assert file.reads == 3
