"""Shards that the machines of a cluster write or scan, on storage that all of them share.

    work/attempts-8f3e…/000003.tar-x1y2/   one attempt at a shard: renamed into place file by file, at its end
    work/attempts-8f3e…/000003.tar-z3w4/   another, since the first one's node was lost, or only seemed to be

Attempts at one shard end with the same bytes, so it does not matter which is renamed last. No two write one file.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.processes import Answer, EachShard, Task, do
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.remote_part import close_part
from savable_pipeline.tools.convert.shard_job import Job, Written, make_hole, read_written, write_shard

_SEEN_S = 120.0  # network file systems remember for a minute that a file was not there


def write_by_cluster(engine: Engine, jobs: list[Job], work: Path, progress: Callable[[int, int], None]) -> None:
    """Write all shards by an engine; `progress` is called with the samples and the bytes done.

    Raises `SavableError` for a machine that does not see the folders, and whatever `write_shard` and the engine raise.
    """
    done, size = 0, 0
    with (
        attempts_in(work) as aside,
        closing(engine.each(attempt, (_sent(job, aside) for job in jobs))) as finished,
    ):
        for job, made in finished:
            if job.bucket is None:
                wait_until_seen(job.target / job.name, partial(read_written, job.target, job.work, job.name), job.work)
            else:
                _note(job, made)
            done += len(job.samples)
            size += sum(part.size for sample in job.samples for part in sample.parts)
            progress(done, size)


def _sent(job: Job, aside: Path) -> Job:
    return replace(job, aside=aside, reader=job.reader.elsewhere(job.samples))


@contextmanager
def attempts_in(work: Path) -> Iterator[Path]:
    """A new folder for the attempts of this call; those of a conversion that was killed are removed."""
    for left in work.glob("attempts-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = work / f"attempts-{uuid4().hex}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Made:
    """A shard that was finished: its record, and where it went to a bucket, its rows of the index."""

    written: Written
    index: bytes = b""


def attempt(job: Job) -> Made:
    """Write a shard by way of a folder of its own: in `job.aside`, or before a bucket one of this machine alone.

    Raises as `write_shard` does, and OSError.
    """
    own = Path(tempfile.mkdtemp(dir=job.aside if job.bucket is None else None, prefix=f"{job.name}-"))
    try:
        if job.bucket is None:
            return Made(write_shard(replace(job, aside=own), lambda sample_bytes: None))
        written = write_shard(replace(job, target=own, work=own, aside=own), lambda sample_bytes: None)
        return Made(written, (own / f"{job.name}.index").read_bytes() if written.samples else b"")
    finally:
        close_part()
        shutil.rmtree(own, ignore_errors=True)


def _note(job: Job, made: Made) -> None:
    """Leave here what `write_shard` leaves of a shard that went to a bucket."""
    if made.written.samples:
        replace_file(job.work / f"{job.name}.index", [made.index])
        make_hole(job.target / job.name, made.written.size)
    replace_file(job.work / f"{job.name}.json", [msgspec.json.encode(made.written)])


def wait_until_seen(path: Path, is_there: Callable[[], object], *others: Path) -> None:
    """Until a file that another machine finished is there for this one too. Raises `SavableError` if it never is."""
    end = time.monotonic() + _SEEN_S
    while not is_there():
        if time.monotonic() > end:
            raise SavableError(
                f"{path} was finished by another machine, and is not there for this one: source and "
                "target must be storage that all nodes share"
            )
        time.sleep(0.1)
        for folder in (path.parent, *others):  # listing a folder makes a network file system look again
            next(folder.iterdir(), None)


@dataclass(frozen=True, slots=True)
class _Scan:
    """One shard to scan: its size is told, so that a machine which has another folder there is noticed."""

    task: Task
    root: Path
    name: str
    size: int


def each_shard_by(engine: Engine) -> EachShard:
    """`each_shard`, by the machines of an engine: the tasks read shards on storage that all of them share."""

    def each(task: Task, root: Path, names: list[str]) -> Generator[Answer, None, None]:
        root = root.absolute()
        scans = (_Scan(task, root, name, (root / name).stat().st_size) for name in names)
        with closing(engine.each(_scanned, scans)) as finished:
            yield from ((scan.name, answer) for scan, answer in finished)

    return each


def _scanned(scan: _Scan) -> bytes:
    size = (scan.root / scan.name).stat().st_size
    if size != scan.size:
        raise OSError(f"{scan.root / scan.name} has {size} bytes, and {scan.size} where the command runs")
    return msgspec.msgpack.encode(do(scan.task, scan.root, scan.name))
