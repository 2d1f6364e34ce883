"""The processes that write shards. None outlives the conversion, however that ends.

    conversion ── a shard, one job ─────▶ workers: each shares the work folder's lock while it lives
         │     ◀── samples and bytes ───
         └─ killed: the workers cannot tell it any more, and exit; the next one waits until that lock is free

The workers take jobs as they come, and the bytes do not depend on who takes which.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from savable_pipeline.core.file_locks import LOCK_ADVICE, needs_locks
from savable_pipeline.data.shards.processes import NOTE, each_job
from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.tools.convert.shard_job import ShardJob, write_shard

_EVERY_S = 0.1  # between two notes of a worker


class _Counts:
    """Samples and bytes, which are told on now and then."""

    def __init__(self, told: Callable[[int, int], None], every_s: float = 0.0) -> None:
        self._told = told
        self._every_s = every_s
        self._next = 0.0
        self.samples = self.size = 0

    def add(self, size: int) -> None:
        """Count a sample, whose writing begins."""
        if time.monotonic() >= self._next:
            self._told(self.samples, self.size)
            self._next = time.monotonic() + self._every_s
        self.samples, self.size = self.samples + 1, self.size + size


def write_shards(jobs: list[ShardJob], work: Path, workers: int, progress: Callable[[int, int], None]) -> None:
    """Write all shards, with `workers` processes or in this one if that is 1.

    `progress` is called with the samples and the bytes done.

    Raises `WorkerError` if a process dies, and whatever `write_shard` raises.
    """
    if min(workers, len(jobs)) > 1:
        _write_in_workers(jobs, work, workers, progress)
        return
    counts = _Counts(progress)
    for job in jobs:
        write_shard(job, counts.add)
    progress(counts.samples, counts.size)


def _write_in_workers(jobs: list[ShardJob], work: Path, workers: int, progress: Callable[[int, int], None]) -> None:
    samples, size = 0, 0
    serve = "savable_pipeline.tools.convert.writer_processes:serve"
    with _sigterm_exits(), contextlib.closing(each_job(serve, (os.fspath(work),), jobs, workers)) as answers:
        for _, answer in answers:
            if answer is None:
                raise WorkerError(
                    "a writer process was killed, perhaps out of memory. Run the command again with fewer --workers"
                )
            found = pickle.loads(answer.removeprefix(NOTE))
            if isinstance(found, Exception):
                raise found
            samples, size = samples + found[0], size + found[1]
            progress(samples, size)


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Have SIGTERM exit as an error does, unless the program handles it itself: what is open is closed."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def serve(connection: Connection, jobs: Iterator[ShardJob], work: str) -> None:
    """The worker: writes one shard after the other, and tells what is done of each, or what was raised."""
    fcntl.flock(os.open(work, os.O_RDONLY), fcntl.LOCK_SH)  # open until the process ends
    told = 0, 0

    def tell(samples: int, size: int) -> bytes:
        nonlocal told
        before, told = told, (samples, size)
        return pickle.dumps((samples - before[0], size - before[1]))

    counts = _Counts(lambda *done: connection.send_bytes(NOTE + tell(*done)), _EVERY_S)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the conversion was killed
        for job in jobs:
            try:
                write_shard(job, counts.add)
                answer = tell(counts.samples, counts.size)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = pickle.dumps(error)
            connection.send_bytes(answer)


@contextlib.contextmanager
def claimed(meta: Path, work: Path) -> Iterator[None]:
    """Lock a folder for one conversion, after the workers of a killed one are gone. Raises `SavableError` if locked."""
    with locked(meta, f"{meta.parent}: another conversion is writing here; wait until it ends"):
        work.mkdir(exist_ok=True)
        with locked(work):
            pass
        yield


@contextlib.contextmanager
def locked(folder: Path, busy: str = "") -> Iterator[None]:
    """Lock a folder, once it is free; with `busy` raises `SavableError` that says this if it is not."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            with needs_locks(folder, LOCK_ADVICE):
                fcntl.flock(fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as error:
            raise SavableError(busy) from error
        yield
    finally:
        os.close(fd)
