"""The processes that write shards, none of which outlives the conversion, however that ends.

    conversion ──starts──▶ fork server ──forks──▶ workers: each shares the work folder's lock while it lives
         └─ killed: the workers see it and exit; the next conversion waits until that lock is free

A shard is one job; the workers take jobs as they come, and the bytes do not depend on who takes which.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from savable_pipeline.convert.shard import Job, write_shard
from savable_pipeline.errors import SavableError, WorkerError

_POLL_S = 0.2  # how often the progress is told


class _StoppedError(Exception):
    """The conversion ends early: another worker failed, or someone pressed Ctrl-C."""


def write_shards(jobs: list[Job], work: Path, workers: int, progress: Callable[[int], None]) -> None:
    """Write all shards, with `workers` processes or, for one, in this one; `progress` hears the samples done.

    Raises `WorkerError` if a process dies, and whatever `write_shard` raises.
    """
    workers = min(workers, len(jobs))
    if workers > 1:
        _write_in_workers(jobs, work, workers, progress)
        return
    done = 0

    def tick() -> None:
        nonlocal done
        progress(done)
        done += 1

    for job in jobs:
        write_shard(job, tick)
    progress(done)


def _write_in_workers(jobs: list[Job], work: Path, workers: int, progress: Callable[[int], None]) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["savable_pipeline.convert.pool", "webdataset.writer"])
    stop = context.Event()
    done = context.Value("Q", 0)
    with ProcessPoolExecutor(workers, context, _enter, (work, stop, done)) as pool:
        waiting = {pool.submit(_write, job) for job in jobs}
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                _raise_first(finished)
                progress(done.value)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _raise_first(finished: set[Future[None]]) -> None:
    try:
        for future in finished:
            future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "a process that writes shards was killed, perhaps for want of memory; give fewer --workers and "
            "run the same command again to go on"
        ) from error


_stop: Event
_done: Synchronized[int]


def _enter(work: Path, stop: Event, done: Synchronized[int]) -> None:
    """The first thing in a worker: from here on it neither outlives its parent nor hears Ctrl-C before it."""
    global _stop, _done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop, _done = stop, done
    fcntl.flock(os.open(work, os.O_RDONLY), fcntl.LOCK_SH)  # open until the process ends
    parent = multiprocessing.parent_process()
    assert parent is not None
    if not parent.is_alive():
        os._exit(1)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _write(job: Job) -> None:
    write_shard(job, _tick)


def _tick() -> None:
    if _stop.is_set():
        raise _StoppedError
    with _done.get_lock():
        _done.value += 1


@contextlib.contextmanager
def claimed(meta: Path, work: Path) -> Iterator[None]:
    """Hold a folder for one conversion, once the workers of a killed one are gone. Raises `SavableError`."""
    with _opened(meta) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SavableError(f"{meta.parent}: another conversion is writing here; wait until it ends") from error
        work.mkdir(exist_ok=True)
        with _opened(work) as shared:
            fcntl.flock(shared, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, to lock; closing it unlocks."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
