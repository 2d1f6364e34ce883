"""Processes and machines that write ranges.

No process outlives the conversion, even if it is killed.

    conversion ── a range, one job ────────▶ workers: each shares the lock of the work folder until it exits
         │     ◀── rows and bytes written ──
         └─ if killed: the workers cannot send, and exit; the next conversion waits until that lock is free

Workers take jobs in any order, and the bytes do not depend on it. The machines of an engine see the same folders, or
write into a bucket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.index_making import NOTE, each_job
from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.tools.convert.range_job import RangeJob, Written, write_range
from savable_pipeline.tools.convert.shard_series import locked
from savable_pipeline.tools.convert.source import close_open_source

_VISIBLE_S = 120.0  # seconds; network file systems may cache for a minute that a file does not exist
_SERVE = "savable_pipeline.tools.convert.jobs:serve_ranges"


def do_jobs(
    jobs: list[RangeJob], work: Path, workers: int, engine: Engine | None, progress: Callable[[int, int, int], None]
) -> set[str]:
    """Do the jobs whose ranges are not finished, and those that compare ranges.

    They run in this process, in several processes, or on the machines of an engine. `progress` is called with the
    number of rows done, the number of all rows, and the bytes done.

    Returns the names of the changed files that comparing jobs found. Raises `WorkerError` if a process dies, and the
    errors of `write_range` and of the engine.
    """
    for path in work.glob("[0-9]*.*"):  # folders of attempts of a killed conversion
        shutil.rmtree(path, ignore_errors=True)
    remaining = [job for job in jobs if job.hashes is not None or not job.is_finished]
    if not remaining and jobs:
        return set()
    total, changed = sum(job.rows for job in jobs), set[str]()
    done_rows, done_bytes = total - sum(job.rows for job in remaining), 0

    def note(rows: int, size: int) -> None:
        nonlocal done_rows, done_bytes
        done_rows, done_bytes = done_rows + rows, done_bytes + size
        progress(done_rows, total, done_bytes)

    note(0, 0)
    if engine is not None:
        results = _by_engine(engine, remaining)
    elif min(workers, len(remaining)) > 1:
        results = _in_workers(remaining, work, workers, note)
    else:
        results = ((job, write_range(job, note)) for job in remaining)
    with contextlib.closing(results):
        for job, written in results:
            if job.hashes is None:
                job.note(written)
            changed.update(written.changed)
            note(written.rows, written.size)
    return changed


def _in_workers(
    jobs: list[RangeJob], work: Path, workers: int, note: Callable[[int, int], None]
) -> Generator[tuple[RangeJob, Written], None, None]:
    """Yield each job and its result. `note` is called with new rows and bytes while jobs run."""
    with _sigterm_exits(), contextlib.closing(each_job(_SERVE, (os.fspath(work),), jobs, workers)) as answers:
        for job, answer in answers:
            if answer is None:
                raise WorkerError(
                    "a writer process was killed, perhaps out of memory. Run the command again with fewer --workers"
                )
            result = pickle.loads(answer.removeprefix(NOTE))
            if isinstance(result, Exception):
                raise result
            if answer.startswith(NOTE):
                note(*result)
            else:
                yield job, result


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that open files are closed. Does nothing if the program has a handler."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def serve_ranges(connection: Connection, jobs: Iterator[RangeJob], work: str) -> None:
    """Run jobs in the child process, and send the result or error of each job."""
    fcntl.flock(os.open(work, os.O_RDONLY), fcntl.LOCK_SH)  # stays open until the process ends
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the conversion was killed
        for job in jobs:
            try:
                answer = pickle.dumps(write_range(job, lambda *new: connection.send_bytes(NOTE + pickle.dumps(new))))
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = pickle.dumps(error)
            connection.send_bytes(answer)


def _by_engine(engine: Engine, jobs: list[RangeJob]) -> Generator[tuple[RangeJob, Written], None, None]:
    """Yield each job and its result, once its finished range is visible to this machine."""
    with contextlib.closing(engine.each(attempt, map(_for_machine, jobs))) as finished:
        for job, written in finished:
            _wait_until_visible(job)
            yield job, written


def _for_machine(job: RangeJob) -> RangeJob:
    """Return the job with the source and spans that another machine needs."""
    source, spans = job.source.for_machine(job.spans)
    return replace(job, source=source, spans=spans)


def attempt(job: RangeJob) -> Written:
    """Write a range on a machine of an engine."""
    try:
        return write_range(job)
    finally:
        close_open_source()


def _wait_until_visible(job: RangeJob) -> None:
    """Wait for the folder of a finished range. Raises `SavableError` if it never appears."""
    deadline = time.monotonic() + _VISIBLE_S
    while job.bucket is None and job.hashes is None and not job.is_finished:
        if time.monotonic() > deadline:
            raise SavableError(
                f"{job.work / job.name}: finished by another machine, but not visible. Use storage that all nodes share"
            )
        time.sleep(0.1)
        next(job.work.iterdir(), None)  # listing the folder updates a network file system's cache


@contextlib.contextmanager
def claimed(meta: Path, work: Path) -> Iterator[None]:
    """Lock the folder `meta` for one conversion.

    Waits until no worker of a killed conversion uses `work`. Raises `SavableError` if another conversion has locked
    `meta`.
    """
    with locked(meta, f"{meta.parent}: another conversion is writing here; wait until it ends"):
        work.mkdir(exist_ok=True)
        with locked(work):
            pass
        yield
