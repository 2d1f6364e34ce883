"""A file of the cache is whole and of the version that its pin names, or it is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from savable_pipeline.data.remote.cache_files import drop_whole, pin_whole, pinned_version, whole_version
from savable_pipeline.data.remote.cache_space import CacheSpace


@pytest.mark.parametrize("spoil", ["nothing", "a byte", "the end", "the file", "the pin", "the pin's end"])
def test_a_file_is_whole_only_with_all_its_bytes_and_its_pin(tmp_path: Path, spoil: str) -> None:
    path, pin = tmp_path / "film.idx", tmp_path / "film.idx.pin"
    path.write_bytes(b"0123456789")
    pin_whole(path, '"v1" or so')
    if spoil == "a byte":
        path.write_bytes(b"012345678X")
    elif spoil == "the end":
        path.write_bytes(b"012345678")
    elif spoil == "the file":
        path.unlink()
    elif spoil == "the pin":
        pin.write_bytes(bytes(pin.stat().st_size))
    elif spoil == "the pin's end":
        pin.write_bytes(pin.read_bytes()[:-1])
    assert whole_version(path) == ('"v1" or so' if spoil == "nothing" else None)
    assert pinned_version(path) == ("" if "pin" in spoil else '"v1" or so')
    drop_whole(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("raw", [b"", bytes(16), b"1234567", b"\xff" * 16])
def test_bytes_in_use_whose_count_is_damaged_are_measured_again(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(9000))
    (tmp_path / "room").write_bytes(raw)
    space = CacheSpace(tmp_path, 30_000)
    assert not space.try_reserve(20_000)
    assert space.try_reserve(5000)
