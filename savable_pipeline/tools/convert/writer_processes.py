"""The processes that write shards. None outlives the conversion, however that ends.

    conversion ──starts──▶ fork server ──forks──▶ workers: each shares the work folder's lock while it lives
         └─ killed: the workers see it and exit; the next conversion waits until that lock is free

A shard is one job; the workers take jobs as they come, and the bytes do not depend on who takes which.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType

from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.tools.convert.shard_job import ShardJob, write_shard

_POLL_S = 0.2  # between two reports of progress
_AHEAD = 2  # jobs a worker in the pool


class _StoppedError(Exception):
    """The conversion ends early: another worker failed, or someone pressed Ctrl-C."""


def write_shards(jobs: list[ShardJob], work: Path, workers: int, progress: Callable[[int, int], None]) -> None:
    """Write all shards, with `workers` processes or in this one if that is 1.

    `progress` is called with the samples and the bytes done.

    Raises `WorkerError` if a process dies, and whatever `write_shard` raises.
    """
    workers = min(workers, len(jobs))
    if workers > 1:
        _write_in_workers(jobs, work, workers, progress)
        return
    done, size = 0, 0

    def tick(sample_bytes: int) -> None:
        nonlocal done, size
        progress(done, size)
        done += 1
        size += sample_bytes

    for job in jobs:
        write_shard(job, tick)
    progress(done, size)


def _write_in_workers(jobs: list[ShardJob], work: Path, workers: int, progress: Callable[[int, int], None]) -> None:
    with _signals_held() as deliver:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["savable_pipeline.tools.convert.writer_processes"])
        stop = context.Event()
        done = context.Array("Q", 2)  # samples, bytes
        given = work, dict(os.environ), stop, done
        with ProcessPoolExecutor(workers, context, _begin_worker, given) as pool:
            try:
                for _ in _finished(pool, jobs, _AHEAD * workers):
                    deliver()
                    progress(done[0], done[1])
            except BrokenProcessPool as error:
                raise WorkerError(
                    "a process that writes shards was killed, perhaps since memory ran out; give fewer --workers and "
                    "run the same command again to go on"
                ) from error
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise


def _finished(pool: Executor, jobs: list[ShardJob], at_once: int) -> Iterator[None]:
    """Have all jobs done, `at_once` of them in the pool; gives way now and then. Raises what one of them raised."""
    left = iter(jobs)
    waiting: set[Future[None]] = set()
    while True:
        waiting |= {pool.submit(_write, job) for job in itertools.islice(left, at_once - len(waiting))}
        if not waiting:
            return
        finished, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
        yield


@contextlib.contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C and SIGTERM back until the function that it gives is called, or until the end; a second one acts.

    An exception that a signal raises inside a pool can leave a lock held for which its threads wait for ever. SIGTERM
    exits, so that the workers end and their semaphores are freed, unless the program handles it itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    handlers = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    usual = {number: held for number, held in handlers.items() if callable(held) or held is signal.SIG_DFL}
    came: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, usual[number])

    def deliver() -> None:
        while came:
            number = came.pop(0)
            handler = usual[number]
            if callable(handler):
                handler(number, None)
            else:
                sys.exit(128 + number)

    for number in usual:
        signal.signal(number, hold)
    try:
        yield deliver
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        deliver()


_stop: Event
_done: SynchronizedArray[int]


def _begin_worker(work: Path, environ: dict[str, str], stop: Event, done: SynchronizedArray[int]) -> None:
    """Begin a worker: ignore Ctrl-C, which is the parent's, share the folder's lock, and exit when the parent does.

    (It has the parent's `environ`, with credentials: the server that forks it may have begun before they were set.)
    """
    global _stop, _done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environ)
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


def _write(job: ShardJob) -> None:
    write_shard(job, _tick)


def _tick(sample_bytes: int) -> None:
    if _stop.is_set():
        raise _StoppedError
    with _done.get_lock():
        _done[0] += 1
        _done[1] += sample_bytes


@contextlib.contextmanager
def claimed(meta: Path, work: Path) -> Iterator[None]:
    """Lock a folder for one conversion, after the workers of a killed one are gone. Raises `SavableError` if locked."""
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
