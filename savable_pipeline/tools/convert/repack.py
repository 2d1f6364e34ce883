"""Compressed tars written as plain ones, which can be read at an offset; their members stay the same.

    SRC/a.tar.gz, SRC/b/c.tgz, SRC/d.tar      ─▶      DST/a.tar, DST/b/c.tar, DST/d.tar

A tar that cannot be read to its end is left out. A tar that is in DST already is whole, and not written again.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.remote.bucket import Found
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME
from savable_pipeline.data.shards.index_file import ShardTable
from savable_pipeline.data.shards.index_writer import write_index
from savable_pipeline.data.shards.scan import TARS
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.changed import is_newer
from savable_pipeline.tools.convert.compressed import DamagedError, is_compressed, opened
from savable_pipeline.tools.convert.describe import describe, describe_indexed
from savable_pipeline.tools.convert.elsewhere import attempts_in, wait_until_seen
from savable_pipeline.tools.convert.model import Reject
from savable_pipeline.tools.convert.names import TAR_ENDINGS, is_tar, printable
from savable_pipeline.tools.convert.shard_job import ShardPlace, make_hole, put_in_place

_CHUNK = 1 << 20


def packed_tars(source: Path) -> list[Path]:
    """The tars of a folder, or a tar by itself, if one of them is compressed; else nothing."""
    found = sorted(path for path in (source.rglob("*") if source.is_dir() else [source]) if path.is_file())
    tars = [path for path in found if is_tar(path.name) and not path.name.startswith(".")]
    return tars if any(map(is_compressed, tars)) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tar(ShardPlace):
    """A tar to write; of one that is in its place already, to compare with, `there` has the bytes."""

    path: Path
    there: int | None


@dataclass(frozen=True, slots=True)
class _Repacked:
    """What became of a tar: its fault; or its size, and where it went to a bucket, its rows of the index."""

    fault: str = ""
    size: int = 0
    index: bytes = b""


def repack(
    source: Path,
    tars: list[Path],
    place: ShardPlace,
    engine: Engine | None,
    progress: Callable[[int, int, int], None],
    *,
    moved: bool,
) -> tuple[list[Reject], TarIndex | None, int]:
    """Write the tars, each to its own `place`; gives what was left out, their index, and how many were looked at anew.

    A tar that is there is compared with its source if that may have changed since, or the whole source was `moved`.
    Raises OSError where a file cannot be written, and ValueError for two tars that would have one name.
    """
    base, target = source if source.is_dir() else source.parent, place.target
    names = [_plain_name(path.relative_to(base).as_posix()) for path in tars]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{source}: two tars would become {twice}; convert them into two folders")
    jobs = [
        _Tar(
            name=name,
            target=target,
            work=place.work,
            aside=place.aside,
            bucket=place.bucket,
            path=path.absolute(),
            there=(target / name).stat().st_size if (target / name).exists() else None,
        )
        for path, name in zip(tars, names, strict=True)
        if moved or not (target / name).exists() or is_newer(path, target / name)
    ]
    done, size = len(tars) - len(jobs), 0
    progress(done, len(tars), size)
    faults: dict[str, str] = {}
    for job, made in _repacked(jobs, place.work, engine):
        faults[job.name] = made.fault
        done, size = done + 1, size + job.path.stat().st_size
        progress(done, len(tars), size)
    rejected = [
        Reject(str(path), "", "damaged tar", printable(faults[name]))
        for path, name in zip(tars, names, strict=True)
        if faults.get(name)
    ]
    if len(rejected) == len(tars):
        return rejected, None, len(jobs)
    if place.bucket is None:
        return rejected, describe(target), len(jobs)
    return rejected, _describe_holes(place, {name for name in names if (target / name).exists()}), len(jobs)


def _describe_holes(place: ShardPlace, names: set[str]) -> TarIndex:
    """Write the index of tars that lie in a bucket, of what was noted of each, or an earlier index says."""
    path = place.target / INDEX_NAME
    old = TarIndex(path) if path.exists() else None

    def tables() -> Iterator[ShardTable]:
        for name in sorted(names):
            noted = place.work / f"{name}.index"
            if noted.exists():
                yield TarIndex(noted).table(0)
            elif old is not None:
                yield old.table(old.number(name))

    write_index(place.work / "savable.index", tables())
    (place.work / "savable.index").replace(path)
    return describe_indexed(place.target, path)


def _repacked(jobs: list[_Tar], work: Path, engine: Engine | None) -> Iterator[tuple[_Tar, _Repacked]]:
    """The tars, each once it is written, or has a fault."""
    if engine is None:
        yield from ((job, _repack_one(job)) for job in jobs)
        return
    with (
        attempts_in(work) as aside,
        closing(engine.each(_attempt, [replace(job, aside=aside) for job in jobs])) as finished,
    ):
        for job, made in finished:
            if made.index:
                _note(job, made)
            elif not made.fault:
                wait_until_seen(job.target / job.name, (job.target / job.name).exists)
            yield job, made


def _attempt(job: _Tar) -> _Repacked:
    """`_repack_one`, by way of a folder of its own: in `job.aside`, or before a bucket one of this machine alone."""
    with tempfile.TemporaryDirectory(dir=job.aside if job.bucket is None else None) as own:
        if job.bucket is None:
            return _repack_one(replace(job, aside=Path(own)))
        made = Path(own, "made")
        return _repack_one(replace(job, aside=Path(own), target=made, work=made))


def _note(job: _Tar, made: _Repacked) -> None:
    """Leave here what `put_in_place` leaves of a tar that went to a bucket."""
    index = job.work / f"{job.name}.index"
    index.parent.mkdir(parents=True, exist_ok=True)
    replace_file(index, [made.index])
    make_hole(job.target / job.name, made.size)


def _repack_one(job: _Tar) -> _Repacked:
    """Write one tar, and put it in its place if it is whole; or compare it with what is there."""
    aside = job.aside / "repacked.tar"
    with aside.open("wb") as file:
        try:
            with opened(job.path) as content:
                shutil.copyfileobj(content, file, _CHUNK)
        except (DamagedError, ValueError) as error:
            return _Repacked(f"{job.path.name}: {error}")
        file.flush()
        os.fsync(file.fileno())
    table = TARS.scan(job.aside, aside.name)
    size = table.entry.size
    if table.entry.fault:
        return _Repacked(table.entry.fault)
    if job.there is not None:
        if job.there != size or not filecmp.cmp(aside, _brought(job), shallow=False):
            place = job.target if job.bucket is None else job.bucket.url
            raise SavableError(
                f"{place}/{job.name} was made of another {job.path.name}: it was changed since, at the same size. "
                "Convert into another folder, or remove this one"
            )
        return _Repacked()
    if job.bucket is None:
        (job.target / job.name).parent.mkdir(parents=True, exist_ok=True)
        aside.replace(job.target / job.name)
        return _Repacked()
    (job.aside / job.name).parent.mkdir(parents=True, exist_ok=True)
    aside.replace(job.aside / job.name)
    put_in_place(job, msgspec.structs.replace(table, entry=msgspec.structs.replace(table.entry, name=job.name)))
    return _Repacked("", size, (job.work / f"{job.name}.index").read_bytes())


def _brought(job: _Tar) -> Path:
    """The tar that is in its place, brought from a bucket if it lies there."""
    if job.bucket is None:
        return job.target / job.name
    job.bucket.fetch([Found(job.name, job.there or 0, 0)], job.aside / "there")
    return job.aside / "there" / job.name


def _plain_name(name: str) -> str:
    ending = next(ending for ending in TAR_ENDINGS if name.lower().endswith(ending))
    return f"{name[: -len(ending)]}.tar"


def digest_of(source: Path, tars: list[Path]) -> str:
    """A hash of the names and sizes of the tars: a conversion that continues must have the same."""
    base = source if source.is_dir() else source.parent
    digest = hashlib.sha256()
    for path in tars:
        digest.update(
            f"{path.relative_to(base).as_posix()}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()
