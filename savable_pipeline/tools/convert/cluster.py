"""Shards that the machines of a cluster write or scan, on storage that all of them share.

    work/attempts-8f3e…/000003.tar-x1y2/   one attempt at a shard: renamed into place file by file, at its end
    work/attempts-8f3e…/000003.tar-z3w4/   another, since the first one's node was lost, or only seemed to be

Attempts at one shard end with the same bytes, so it does not matter which is renamed last. No two write one file.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.shard_job import (
    ShardJob,
    ShardPaths,
    WrittenShard,
    make_hole,
    read_written,
    write_shard,
)
from savable_pipeline.tools.convert.stored import close_part

P = TypeVar("P", bound=ShardPaths)
_SEEN_S = 120.0  # network file systems remember for a minute that a file was not there


def write_by_cluster(engine: Engine, jobs: list[ShardJob], work: Path, progress: Callable[[int, int], None]) -> None:
    """Write all shards by an engine; `progress` is called with the samples and the bytes done.

    Raises `SavableError` for a machine that does not see the folders, and whatever `write_shard` and the engine raise.
    """
    done, size = 0, 0
    with attempts_in(work) as aside, closing(engine.each(attempt, (_sent(job, aside) for job in jobs))) as finished:
        for job, made in finished:
            if job.bucket is None:
                wait_until_seen(job.target / job.name, partial(read_written, job.target, job.work, job.name), job.work)
            else:
                if made.written.samples:
                    note_shard(job, made.written.size, made.index)
                replace_file(job.work / f"{job.name}.json", [msgspec.json.encode(made.written)])
            done += len(job.samples)
            size += sum(part.size for sample in job.samples for part in sample.parts)
            progress(done, size)


def _sent(job: ShardJob, aside: Path) -> ShardJob:
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

    written: WrittenShard
    index: bytes = b""


def attempt(job: ShardJob) -> Made:
    """Write a shard by way of a folder of its own: in `job.aside`, or before a bucket one of this machine alone.

    Raises as `write_shard` does, and OSError.
    """
    try:
        with own_folder(job) as own:
            written = write_shard(own, lambda sample_bytes: None)
            return Made(written, index_of(own) if written.samples else b"")
    finally:
        close_part()


@contextmanager
def own_folder(paths: P) -> Iterator[P]:
    """The place by way of a folder of its own; before a bucket one of this machine alone, for all but the bucket."""
    aside = paths.aside if paths.bucket is None else None
    with tempfile.TemporaryDirectory(dir=aside, prefix=f"{Path(paths.name).name}-", ignore_cleanup_errors=True) as own:
        made: dict[str, Any] = {} if paths.bucket is None else dict.fromkeys(("target", "work"), Path(own, "made"))
        yield replace(paths, aside=Path(own), **made)


def index_of(paths: ShardPaths) -> bytes:
    """The rows of the index of a shard that went to a bucket; nothing of others."""
    return b"" if paths.bucket is None else (paths.work / f"{paths.name}.index").read_bytes()


def note_shard(paths: ShardPaths, size: int, index: bytes) -> None:
    """Leave here what `put_in_place` leaves of a shard that went to a bucket."""
    path = paths.work / f"{paths.name}.index"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [index])
    make_hole(paths.target / paths.name, size)


def wait_until_seen(path: Path, is_there: Callable[[], object], *others: Path) -> None:
    """Until a file that another machine finished is there for this one too. Raises `SavableError` if it never is."""
    end = time.monotonic() + _SEEN_S
    while not is_there():
        if time.monotonic() > end:
            raise SavableError(
                f"{path}: finished by another machine, but not visible here. Use storage that all nodes share"
            )
        time.sleep(0.1)
        for folder in (path.parent, *others):  # listing a folder makes a network file system look again
            next(folder.iterdir(), None)
