"""What a scan says of a shard from which samples may be lost, though it is a tar to its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from savable_pipeline.data.shards.tar_format import TARS
from tests.conftest import write_tar


def told(path: Path, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    table = TARS.scan(path.parent, path.name)
    assert not table.entry.fault
    return caplog.text


def test_a_tar_of_which_samples_are_less_than_half_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"x" * 20_000), ("README", b"r" * 15_000)])
    write_tar(tmp_path / "b.tar", [("k.txt", b"x" * 10_000), ("README", b"r" * 15_000)])
    write_tar(tmp_path / "c.tar", [("k.txt", b"x")])  # a record of zeros, as every small tar has it
    write_tar(tmp_path / "d.tar", [])
    assert told(tmp_path / "a.tar", caplog) == ""
    assert "b.tar: its 1 samples take 10752 of 30720 bytes" in told(tmp_path / "b.tar", caplog)
    assert told(tmp_path / "c.tar", caplog) == ""
    assert "d.tar: its 0 samples take 0 of 10240 bytes" in told(tmp_path / "d.tar", caplog)


def test_zeros_beyond_a_record_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"k{i}.txt", b"x" * 1000) for i in range(100)])
    raw = path.read_bytes()
    path.write_bytes(raw[: 80 * 1536] + bytes(len(raw) - 80 * 1536))
    assert "bytes of zeros at its end, where tars mostly have at most 11264" in told(path, caplog)
    path.write_bytes(raw)
    assert told(path, caplog) == ""
    os.truncate(path, -(-(100 * 1536 + 1024) // 65536) * 65536)  # a record of 128 blocks
    assert told(path, caplog) == ""


def test_samples_whose_files_do_not_lie_side_by_side_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"k{i}" for i in range(3)]
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{key}.{extension}", b"x" * 9000) for extension in ("jpg", "txt") for key in keys])
    assert "a.tar: the files of 3 samples do not lie side by side, such as those of 'k0'" in told(path, caplog)
    write_tar(path, [(f"{key}.{extension}", b"x" * 9000) for key in keys for extension in ("jpg", "txt")])
    assert told(path, caplog) == ""
    write_tar(path, [(f"{key}.txt", b"x" * 9000) for key in keys * 2])  # which are samples that come twice
    assert told(path, caplog) == ""
