"""The process that starts workers, stopped for good: the loader closes all the same, or goes on with another."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.engine import pool, process_host
from tests.support.toy_faults import number_pipeline


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_loader_with_a_stopped_fork_server_closes_completely(
    make_shards: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_host, "_CHECK_S", 1.0)
    monkeypatch.setattr(process_host, "END_WAIT_S", 1.0)
    before = set(children(os.getpid()))
    loader = sp.SavableLoader(partial(number_pipeline, str(make_shards([40]))), seed=1, lanes=4, num_workers=2)
    next(loader)
    (server,) = set(children(os.getpid())) - before
    os.kill(server, signal.SIGSTOP)
    loader.close()
    assert not set(children(os.getpid())) - before
    assert "the process that starts workers does not answer. It was replaced" in caplog.text


def stop_server_and_kill_workers(loader: sp.SavableLoader, before: set[int]) -> None:
    (server,) = set(children(os.getpid())) - before
    workers = children(server)
    os.kill(server, signal.SIGSTOP)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    assert len(workers) == 2


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("wait_s", "method"),
    [(0.3, "fork"), pytest.param(None, "fork", marks=LONG), pytest.param(None, "forkserver", marks=LONG)],
)
def test_loader_with_a_stopped_fork_server_replaces_killed_workers(
    make_shards: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, wait_s: float | None, method: str
) -> None:
    if wait_s is not None:
        monkeypatch.setattr(process_host, "_SILENT_S", wait_s)
        monkeypatch.setattr(pool, "END_WAIT_S", wait_s)
    before = set(children(os.getpid()))
    pipeline = partial(number_pipeline, str(make_shards([40])))
    expected = list(islice(sp.SavableLoader(pipeline, seed=1, lanes=4), 30))
    with sp.SavableLoader(pipeline, seed=1, lanes=4, num_workers=2, workers=sp.Workers(start_method=method)) as loader:
        got = [next(loader) for _ in range(8)]
        before |= tracker()
        stop_server_and_kill_workers(loader, before)
        begin = time.monotonic()
        got += [next(loader) for _ in range(22)]
        assert time.monotonic() - begin < 45
    assert got == expected
    assert caplog.text.count("does not answer. It was replaced") == 1
    assert not set(children(os.getpid())) - before


def tracker() -> set[int]:
    """Python's own process that tracks resources, where there is one."""
    pid = getattr(resource_tracker._resource_tracker, "_pid", None)
    return set() if pid is None else {pid}


def test_slowly_starting_fork_server_is_not_killed(
    make_shards: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_host, "_SILENT_S", 0.05)
    monkeypatch.setattr(pool, "END_WAIT_S", 0.02)
    pipeline = partial(slow_to_build, str(make_shards([40])), os.getpid())
    with sp.SavableLoader(pipeline, seed=1, lanes=4, num_workers=1) as loader:
        next(loader)
    assert "does not answer" not in caplog.text


def slow_to_build(shards: str, trainer: int, lane: sp.Lane) -> custom.Stage:
    if os.getpid() != trainer:
        time.sleep(0.4)
    return number_pipeline(shards, lane)
