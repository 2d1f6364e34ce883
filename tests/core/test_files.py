"""Files that are replaced, and the quarantine file: a full disk leaves nothing half. A user may have no home."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from savable_pipeline.core.files import replace_file, user_cache
from savable_pipeline.core.on_error import Quarantine
from savable_pipeline.data.remote.cache_space import cache_folder


def full_disk() -> Iterator[bytes]:
    yield b"begun"
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("sync", [False, True])
def test_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path: Path, sync: bool) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", full_disk(), sync=sync)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_user_without_a_home_folder_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "SAVABLE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where the list of users has no such number
    assert user_cache() is None
    with pytest.raises(ValueError, match=r"this user has no home folder .*Pass cache=, or set SAVABLE_CACHE"):
        cache_folder(None)
    assert cache_folder(tmp_path) == tmp_path / str(os.geteuid())


def test_line_cut_by_a_full_disk_warns_and_damages_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quarantine = Quarantine(tmp_path / "bad.jsonl")
    quarantine.add(key="a")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:5]))
    quarantine.add(key="b")
    assert "only a part of the line was written; is the disk full?" in caplog.text and '"b"' in caplog.text
    monkeypatch.undo()
    quarantine.add(key="c")
    lines = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in (lines[0], lines[2])] == [{"key": "a"}, {"key": "c"}]
    assert len(lines) == 3
