"""Shards that other machines write or scan, on storage that all of them share.

    work/attempts-8f3e…/000003.tar-x1y2/   one attempt at a shard: renamed into place file by file, at its end
    work/attempts-8f3e…/000003.tar-z3w4/   another, since the first one's node was lost, or only seemed to be

Attempts at one shard end with the same bytes, so it does not matter which is renamed last. No two write one file.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import msgspec

from savable_pipeline.convert.engine import Engine
from savable_pipeline.convert.shard_job import Job, Written, read_written, write_shard
from savable_pipeline.errors import SavableError
from savable_pipeline.shards.processes import Answer, EachShard, Task, do

_SEEN_S = 120.0  # network file systems remember for a minute that a file was not there


def write_elsewhere(engine: Engine, jobs: list[Job], work: Path, progress: Callable[[int, int], None]) -> None:
    """Write all shards by an engine; `progress` is called with the samples and the bytes done.

    Raises `SavableError` for a machine that does not see the folders, and whatever `write_shard` and the engine raise.
    """
    for left in work.glob("attempts-*"):  # of a conversion that was killed
        shutil.rmtree(left, ignore_errors=True)
    attempts = work / f"attempts-{uuid4().hex}"
    attempts.mkdir()
    done, size = 0, 0
    for job, _ in engine.each(attempt, [replace(job, aside=attempts) for job in jobs]):
        _wait_until_seen(job)
        done += len(job.samples)
        size += sum(part.size for sample in job.samples for part in sample.parts)
        progress(done, size)
    shutil.rmtree(attempts, ignore_errors=True)


def attempt(job: Job) -> Written:
    """Write a shard by way of a folder of its own in `job.aside`. Raises as `write_shard` does, and OSError."""
    aside = Path(tempfile.mkdtemp(dir=job.aside, prefix=f"{job.name}-"))
    try:
        return write_shard(replace(job, aside=aside), lambda sample_bytes: None)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _wait_until_seen(job: Job) -> None:
    """Until a shard that another machine finished is there for this one too."""
    end = time.monotonic() + _SEEN_S
    while read_written(job.target, job.work, job.name) is None:
        if time.monotonic() > end:
            raise SavableError(
                f"{job.target / job.name} was finished by another machine, and is not there for this one: source and "
                "target must be storage that all nodes share"
            )
        time.sleep(0.1)
        for folder in (job.work, job.target):  # listing a folder makes a network file system look again
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
        for scan, answer in engine.each(_scanned, (_Scan(task, root, n, (root / n).stat().st_size) for n in names)):
            yield scan.name, answer

    return each


def _scanned(scan: _Scan) -> bytes:
    size = (scan.root / scan.name).stat().st_size
    if size != scan.size:
        raise OSError(f"{scan.root / scan.name} has {size} bytes, and {scan.size} where the command runs")
    return msgspec.msgpack.encode(do(scan.task, scan.root, scan.name))
