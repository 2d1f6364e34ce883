"""Writing one shard of a conversion, the same bytes every time, so that it can be killed and done again.

aside/000003.tar.index   its rows of the dataset's index      ─ renamed ─▶  work/000003.tar.index ┐ kept until the
aside/000003.tar.idx     its sample offsets for Energon       ─ renamed ─▶  000003.tar.idx        │ whole conversion
aside/000003.tar         the shard while it is written        ─ renamed ─▶  000003.tar            │ is done
aside/000003.tar.json    samples, bytes, rejects: it is done  ─ renamed ─▶  work/000003.tar.json  ┘
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote.session import Bucket
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.tar_format import write_tar_idx
from savable_pipeline.data.shards.tar_writer import ShardFile
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.model import Files, SampleReader
from savable_pipeline.tools.convert.part_data import Parts, data_fault

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WrittenShard(msgspec.Struct, frozen=True):
    """The record of a finished shard: its samples and rejects; without a sample there is no tar."""

    samples: int
    size: int
    rejected: list[Reject]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPaths:
    """Where a shard is written: into `target`, and what is known of it into `work`, all by way of the folder `aside`.

    With a `bucket` the files are written there; in `target` a hole of the shard's size stands for it.
    """

    name: str
    target: Path
    work: Path
    aside: Path
    bucket: Bucket | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob(ShardPaths):
    """One shard to write, of these samples."""

    samples: list[Files]
    reader: SampleReader
    check_images: bool


def read_written(target: Path, work: Path, name: str) -> WrittenShard | None:
    """The record of a finished shard; None for one that must be written."""
    try:
        written = msgspec.json.decode((work / f"{name}.json").read_bytes(), type=WrittenShard)
        size = (target / name).stat().st_size if written.samples else 0
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return written if size == written.size else None


def write_shard(job: ShardJob, tick: Callable[[int], None]) -> WrittenShard:
    """Write one shard and its record; `tick` is called before each sample with its size in bytes.

    Raises `SavableError` if a file is no longer what the plan was made from, or the disk is full.
    """
    aside = job.aside / job.name
    rejected: list[Reject] = []
    job.reader.expect(job.samples)
    with room_on(job.target), ShardFile(aside, job.name) as shard:
        for sample in job.samples:
            tick(sum(part.size for part in sample.parts))
            parts = _checked(job, sample, rejected)
            if parts:
                shard.add(sample.key, parts)
        table = shard.finish()
        written = WrittenShard(shard.samples, shard.size if shard.samples else 0, rejected)
        if shard.samples:
            put_in_place(job, table)
        else:
            aside.unlink()
        record = f"{job.name}.json"
        replace_file(job.aside / record, [msgspec.json.encode(written)], sync=True)
        _move(job, record, job.work)
    return written


@contextlib.contextmanager
def room_on(folder: Path) -> Iterator[None]:
    """Raises `SavableError` in place of an OSError of a disk that is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise SavableError(
            f"{folder}: {error.strerror}: disk or quota is full. Free space and start again to continue"
        ) from error


def put_in_place(paths: ShardPaths, table: ShardTable) -> None:
    """Put a shard that was written aside in its paths, after its rows of the index and its offsets."""
    index, offsets = f"{paths.name}.index", f"{paths.name}.idx"
    write_index(paths.aside / index, [table], TARS)
    write_tar_idx(paths.aside / paths.name, table)
    _move(paths, index, paths.work)
    for name in (offsets, paths.name):
        if paths.bucket is not None:
            paths.bucket.upload(name, paths.aside / name)
        if paths.bucket is not None and name == paths.name:
            make_hole(paths.aside / name, (paths.aside / name).stat().st_size)
        _move(paths, name, paths.target)


def _move(paths: ShardPaths, name: str, folder: Path) -> None:
    """Put a file in its place in `folder`."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (paths.aside / name).replace(folder / name)


def make_hole(path: Path, size: int) -> None:
    """Make a file of `size` bytes that takes no room, to stand for a shard in a bucket."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def _checked(job: ShardJob, sample: Files, rejected: list[Reject]) -> Parts:
    """The parts of a sample; empty, and a reject more, if one of them is bad."""
    parts = job.reader.read(sample)
    for part in sample.parts:
        fault = data_fault(part.extension, parts[part.extension], check_images=job.check_images)
        if fault:
            reason, _, detail = fault.partition(": ")
            rejected.append(Reject(_name(sample, part.path), sample.key, reason, detail))
            return {}
    return parts


def _name(sample: Files, path: str) -> str:
    return path if sample.of_files else f"{path}, record {sample.record}"
