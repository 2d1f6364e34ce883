"""Processes and machines that write ranges. None outlives the conversion, however that ends.

    conversion ── a range, one job ─────▶ workers: each shares the lock of the work folder while it lives
         │     ◀── samples and bytes ───
         └─ killed: the workers cannot send, and exit; the next conversion waits until that lock is free

Workers take jobs in any order, and the bytes do not depend on it. The machines of an engine see the same folders, or
write into a bucket.
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
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from savable_pipeline.core.file_locks import LOCK_ADVICE, needs_locks
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.processes import NOTE, each_job
from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.tools.convert.range_job import (
    RangeJob,
    is_finished,
    note_finished,
    write_range,
)
from savable_pipeline.tools.convert.source import close_source

_EVERY_S = 0.1  # between two notes of a worker
_VISIBLE_S = 120.0  # network file systems cache for a minute that a file does not exist
_SERVE = "savable_pipeline.tools.convert.jobs:serve"
Progress = Callable[[int, int], None]  # samples and bytes done


class _Counts:
    """Samples and bytes, reported now and then."""

    def __init__(self, report: Progress, every_s: float = 0.0) -> None:
        self._report, self._every_s, self._next = report, every_s, 0.0
        self.samples = self.size = 0

    def add(self, samples: int, size: int) -> None:
        """Count samples; the first call reports what was counted before."""
        if time.monotonic() >= self._next:
            self._report(self.samples, self.size)
            self._next = time.monotonic() + self._every_s
        self.samples, self.size = self.samples + samples, self.size + size


def write_ranges(jobs: list[RangeJob], work: Path, workers: int, engine: Engine | None, progress: Progress) -> None:
    """Write all ranges, in this process, in several, or by the machines of an engine.

    Raises `WorkerError` if a process dies, and the errors of `write_range` and of the engine.
    """
    if engine is not None:
        _write_by_engine(engine, jobs, progress)
    elif min(workers, len(jobs)) > 1:
        _write_in_workers(jobs, work, workers, progress)
    else:
        counts = _Counts(progress)
        for job in jobs:
            _note(job, write_range(job, counts.add))
        progress(counts.samples, counts.size)


def _note(job: RangeJob, record: bytes) -> None:
    if job.bucket is not None:
        note_finished(job.work, job.name, record)


def _write_in_workers(jobs: list[RangeJob], work: Path, workers: int, progress: Progress) -> None:
    samples, size = 0, 0
    with _sigterm_exits(), contextlib.closing(each_job(_SERVE, (os.fspath(work),), jobs, workers)) as answers:
        for job, answer in answers:
            if answer is None:
                raise WorkerError(
                    "a writer process was killed, perhaps out of memory. Run the command again with fewer --workers"
                )
            found = pickle.loads(answer.removeprefix(NOTE))
            if isinstance(found, Exception):
                raise found
            if not answer.startswith(NOTE):
                _note(job, found[2])
            samples, size = samples + found[0], size + found[1]
            progress(samples, size)


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Exit on SIGTERM as on an error, unless the program handles it: open files are closed."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def serve(connection: Connection, jobs: Iterator[RangeJob], work: str) -> None:
    """Write one range after another; sends progress, then a record or an error of each."""
    fcntl.flock(os.open(work, os.O_RDONLY), fcntl.LOCK_SH)  # open until the process ends
    sent = 0, 0

    def counted(samples: int, size: int, record: bytes = b"") -> bytes:
        nonlocal sent
        before, sent = sent, (samples, size)
        return pickle.dumps((samples - before[0], size - before[1], record))

    counts = _Counts(lambda *done: connection.send_bytes(NOTE + counted(*done)), _EVERY_S)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the conversion was killed
        for job in jobs:
            try:
                record = write_range(job, counts.add)
                answer = counted(counts.samples, counts.size, record)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = pickle.dumps(error)
            connection.send_bytes(answer)


def _write_by_engine(engine: Engine, jobs: list[RangeJob], progress: Progress) -> None:
    samples, size = 0, 0
    with contextlib.closing(engine.each(attempt, map(_for_machine, jobs))) as finished:
        for job, (done, written, record) in finished:
            _note(job, record)
            _wait_until_visible(job)
            samples, size = samples + done, size + written
            progress(samples, size)


def _for_machine(job: RangeJob) -> RangeJob:
    source, spans = job.source.for_machine(job.spans)
    return replace(job, source=source, spans=spans)


def attempt(job: RangeJob) -> tuple[int, int, bytes]:
    """Write a range on a machine of an engine; returns samples, bytes and the record if it went to a bucket."""
    counts = [0, 0]

    def add(samples: int, size: int) -> None:
        counts[:] = counts[0] + samples, counts[1] + size

    try:
        record = write_range(job, add)
        return counts[0], counts[1], record
    finally:
        close_source()


def _wait_until_visible(job: RangeJob) -> None:
    """Wait for the folder of a finished range. Raises `SavableError` if it never appears."""
    end = time.monotonic() + _VISIBLE_S
    while not is_finished(job):
        if time.monotonic() > end:
            raise SavableError(
                f"{job.work / job.name}: finished by another machine, but not visible. Use storage that all nodes share"
            )
        time.sleep(0.1)
        next(job.work.iterdir(), None)  # listing a folder makes a network file system look again


@contextlib.contextmanager
def claimed(meta: Path, work: Path) -> Iterator[None]:
    """Lock a folder for one conversion, once workers of a killed one are gone. Raises `SavableError` if locked."""
    with locked(meta, f"{meta.parent}: another conversion is writing here; wait until it ends"):
        work.mkdir(exist_ok=True)
        with locked(work):
            pass
        yield


@contextlib.contextmanager
def locked(folder: Path, busy: str = "") -> Iterator[None]:
    """Lock a folder, once it is free; with `busy` raise `SavableError` if it is not."""
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
