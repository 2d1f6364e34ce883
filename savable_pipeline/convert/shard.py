"""Writing one shard of a conversion, the same bytes every time, so that it can be killed and done again.

work/000003.tar         the shard while it is written        ─ renamed ─▶  000003.tar
work/000003.tar.idx     its sample offsets for Energon       ─ renamed ─▶  000003.tar.idx
work/000003.tar.index   its rows of the dataset's index      ┐ kept in the work folder
work/000003.tar.json    samples, bytes, rejects: it is done  ┘ until the whole conversion is
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from savable_pipeline.content import content_fault
from savable_pipeline.convert.source import Files, Part, Reject
from savable_pipeline.errors import SavableError
from savable_pipeline.indexing import write_tar_idx
from savable_pipeline.scan import scan
from savable_pipeline.shard_index import write_index


class Written(msgspec.Struct, frozen=True):
    """What is in a finished shard, and what was left out of it; without a sample there is no tar."""

    samples: int
    size: int
    rejected: list[Reject]


@dataclass(frozen=True, slots=True)
class Job:
    """One shard to write: all that a worker needs to know."""

    name: str
    samples: list[Files]
    root: str  # of the input
    target: Path
    work: Path
    check_images: bool


def read_written(target: Path, work: Path, name: str) -> Written | None:
    """The record of a shard that is finished and lies in its place; None for one that must be written."""
    try:
        written = msgspec.json.decode((work / f"{name}.json").read_bytes(), type=Written)
        size = (target / name).stat().st_size if written.samples else 0
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return written if size == written.size else None


def write_shard(job: Job, tick: Callable[[], None]) -> Written:
    """Write one shard and its record; `tick` is called before each sample.

    Raises `SavableError` if a file is no longer what the plan was made from.
    """
    from webdataset.writer import TarWriter  # here: it imports torch, which takes seconds that other commands save

    aside = job.work / job.name
    rejected: list[Reject] = []
    with aside.open("wb") as file:
        with TarWriter(file, encoder=False, user="", group="", mode=0o644, mtime=0, format="PAX_FORMAT") as writer:
            for sample in job.samples:
                tick()
                parts = _read_sample(job, sample, rejected)
                if parts:
                    writer.write({"__key__": sample.key, **parts})
        file.flush()
        os.fsync(file.fileno())
    count = len(job.samples) - len(rejected)
    written = Written(count, aside.stat().st_size if count else 0, rejected)
    if count:
        _put_in_place(job)
    else:
        aside.unlink()
    replace_bytes(job.work / f"{job.name}.json", msgspec.json.encode(written))
    return written


def _put_in_place(job: Job) -> None:
    table = scan(job.work, job.name)
    if table.entry.fault:
        raise SavableError(f"{job.work}/{table.entry.fault}")
    write_index(job.work / f"{job.name}.index", [table])
    write_tar_idx(job.work / job.name, table)
    (job.work / job.name).with_suffix(".tar.idx").replace((job.target / job.name).with_suffix(".tar.idx"))
    (job.work / job.name).replace(job.target / job.name)


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file aside and rename it, so that it is never there half."""
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _read_sample(job: Job, sample: Files, rejected: list[Reject]) -> dict[str, bytes]:
    """The parts of a sample; empty, and a reject more, if one of them is bad."""
    parts = {}
    for part in sample.parts:
        data = _read(job, part)
        fault = content_fault(part.extension, data, check_images=job.check_images)
        if fault:
            reason, _, detail = fault.partition(": ")
            rejected.append(Reject(part.path, sample.key, reason, detail))
            return {}
        parts[part.extension] = data
    return parts


def _read(job: Job, part: Part) -> bytes:
    path = Path(job.root, part.path)
    with path.open("rb") as file:
        file.seek(part.offset or 0)
        data = file.read() if part.offset is None else file.read(part.size)
    if len(data) != part.size:
        raise SavableError(
            f"{path}: expected {part.size} bytes, found {len(data)}: it changed while it was converted; "
            "let the input rest and convert into another folder"
        )
    return data
