"""Functions that observe processes and their children, and kill them, also at a chosen event."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import savable_pipeline as sp
from savable_pipeline.run.engine.pool import Pool
from savable_pipeline.run.engine.process_host import ProcessConnection


def descendants(pid: int) -> list[int]:
    """Return the living descendants of a process."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [found for child in alive(children) for found in (child, *descendants(child))]


def alive(pids: list[int]) -> list[int]:
    """Return the processes that exist and are no zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [pid] if state != "Z" else []
    return found


def wait_until_gone(pids: list[int]) -> None:
    """Fail if the processes exist for a minute more, which is long enough for a busy machine."""
    deadline = time.monotonic() + 60
    while alive(pids):
        assert time.monotonic() < deadline, f"{alive(pids)} are still there"
        time.sleep(0.01)


def workers(loader: sp.SavableLoader) -> list[int]:
    """Return the process ids of a loader's workers, once all have started."""
    pool = loader._run.backend
    if not isinstance(pool, Pool):
        return []
    while not all(worker.started for worker in pool._workers):
        pool._poll(0.05)
    return started_workers(loader)


def started_workers(loader: Any) -> list[int]:
    """Return the process ids of those of a loader's workers that have started."""
    pool = loader.__savable_run__().backend
    connections = [worker.connection for worker in pool._workers] if isinstance(pool, Pool) else []
    return [each.pid for each in connections if isinstance(each, ProcessConnection) and each.pid]


def wait_for_deaths(loader: sp.SavableLoader, deaths: int) -> None:
    """Wait until a loader has noticed so many deaths. The last batches may all come from other workers."""
    pool = loader._run.backend
    assert isinstance(pool, Pool)
    while pool.numbers()["restarts"] < deaths:
        pool._poll(0.05)


def kill(pid: int) -> None:
    """Kill a process, if it exists."""
    if alive([pid]):
        os.kill(pid, signal.SIGKILL)


def run_forked(work: Callable[..., object], *arguments: Any) -> None:
    """Run `work` in a process of its own, which a signal may end. It must return."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode


_TOUCHES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def run_until_killed(work: Callable[[], object], below: Path, event: int) -> bool:
    """Run `work` in a process that is killed before its `event`-th access to a file in `below`; returns whether it
    was.
    """

    def child() -> None:
        touched = 0

        def hook(name: str, args: tuple[Any, ...]) -> None:
            nonlocal touched
            if name in _TOUCHES:
                touched += str(args[0]).startswith(str(below))
                if touched == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0
