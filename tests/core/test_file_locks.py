"""Locks between processes where the file system has none: a file takes their place, or an error says what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.core import file_locks
from savable_pipeline.core.file_locks import file_lock, requiring_locks


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "lock").open("ab") as file:
        yield file.fileno()


@pytest.mark.usefixtures("no_flock")
def test_without_flock_only_one_process_is_in_the_locked_block(tmp_path: Path, descriptor: int) -> None:
    inside, most, alone = 0, 0, threading.Lock()

    def enter(_: int) -> None:
        nonlocal inside, most
        with file_lock(tmp_path / "lock", descriptor):
            with alone:
                inside += 1
                most = max(most, inside)
            assert (tmp_path / "lock.owner").read_text().endswith(f" {os.getpid()}")
            with alone:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(8)))
    assert most == 1
    assert sorted(tmp_path.iterdir()) == [tmp_path / "lock"]


@pytest.mark.usefixtures("no_flock")
def test_lock_file_of_a_killed_process_is_removed(
    tmp_path: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_locks, "_DEAD_S", 0.3)
    (tmp_path / "lock.owner").write_text("node7 4711")
    with file_lock(tmp_path / "lock", descriptor):
        assert (tmp_path / "lock.owner").read_text() != "node7 4711"
    assert not (tmp_path / "lock.owner").exists()
    assert "waiting for the process that created it (node7 4711)" in caplog.text


@pytest.mark.usefixtures("no_flock")
def test_lock_file_of_a_live_process_stays(tmp_path: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "_TOUCH_S", 0.01)
    owner = tmp_path / "lock.owner"
    with file_lock(tmp_path / "lock", descriptor):
        first = owner.stat()
        os.utime(owner, (0, 0))
        while owner.stat().st_mtime_ns == 0:
            pass
        assert owner.stat().st_ino == first.st_ino


def test_with_flock_no_extra_file_is_created(tmp_path: Path, descriptor: int) -> None:
    with file_lock(tmp_path / "lock", descriptor):
        assert sorted(tmp_path.iterdir()) == [tmp_path / "lock"]
        with (tmp_path / "lock").open("ab") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.usefixtures("no_flock")
def test_error_of_an_unsupported_lock_says_what_to_do() -> None:
    said = r"^/scratch: its file system has no file locks \(.*\). Move it."
    with pytest.raises(sp.SavableError, match=said), requiring_locks("/scratch", "Move it."):
        fcntl.flock(0, fcntl.LOCK_EX)


def test_other_errors_of_a_lock_are_raised_unchanged() -> None:
    with pytest.raises(BlockingIOError), requiring_locks("/scratch", "Move it."):
        raise BlockingIOError(errno.EAGAIN, "busy")
