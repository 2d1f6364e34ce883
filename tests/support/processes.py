"""Looks at processes from outside: who is alive, and whose children they are."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import savable_pipeline as sp
from savable_pipeline.run.engine.pool import Pool


def descendants(pid: int) -> list[int]:
    """The living children of a process, and theirs."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [found for child in alive(children) for found in (child, *descendants(child))]


def alive(pids: list[int]) -> list[int]:
    """Those that are there and are no zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [pid] if state != "Z" else []
    return found


def wait_until_gone(pids: list[int]) -> None:
    """Fails after a minute: a busy machine is no fault."""
    deadline = time.monotonic() + 60
    while alive(pids):
        assert time.monotonic() < deadline, f"{alive(pids)} are still there"
        time.sleep(0.01)


def workers(loader: sp.SavableLoader) -> list[int]:
    """The process ids of a loader's workers, once all have started."""
    pool = loader._run.prefetcher._makers
    if not isinstance(pool, Pool):
        return []
    while len(pool.pids) < len(pool._workers):
        pool._hear(0.05)
    return pool.pids


def notice_deaths(loader: sp.SavableLoader, deaths: int) -> None:
    """Wait until a loader has heard of so many deaths: the last batches may all have been made by others."""
    pool = loader._run.prefetcher._makers
    assert isinstance(pool, Pool)
    while pool.restarts < deaths:
        pool._hear(0.05)


def kill(pid: int) -> None:
    """Unless it is gone."""
    if alive([pid]):
        os.kill(pid, signal.SIGKILL)
