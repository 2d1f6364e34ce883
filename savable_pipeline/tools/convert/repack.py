"""Compressed tars written as plain ones, which can be read at an offset; their members stay the same.

    SRC/a.tar.gz, SRC/b/c.tgz, SRC/d.tar      ─▶      DST/a.tar, DST/b/c.tar, DST/d.tar

A tar that cannot be read to its end is left out. A tar that is in DST already is whole, and not written again.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.tar_format import TarIndex
from savable_pipeline.data.stores.sample_names import TAR_ENDINGS, Reject, is_tar, printable
from savable_pipeline.data.stores.tar_store import TARS, warning_of_links
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.cluster import attempts_in, index_of, note_shard, own_folder, wait_until_seen
from savable_pipeline.tools.convert.describe import describe, describe_tables
from savable_pipeline.tools.convert.mirror import Target
from savable_pipeline.tools.convert.model import Options, Report
from savable_pipeline.tools.convert.plan import VERSION, WORK, Manifest, source_id, source_name
from savable_pipeline.tools.convert.resume import is_newer, to_go_on, write_manifest, write_rejects
from savable_pipeline.tools.convert.shard_job import ShardPaths, put_in_place
from savable_pipeline.tools.convert.source_file import is_compressed, opened

_CHUNK = 1 << 20


def packed_tars(source: Path) -> list[Path]:
    """The tars of a folder, or a tar by itself, if one of them is compressed; else nothing."""
    found = sorted(path for path in (source.rglob("*") if source.is_dir() else [source]) if path.is_file())
    tars = [path for path in found if is_tar(path.name) and not path.name.startswith(".")]
    return tars if any(map(is_compressed, tars)) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _TarJob(ShardPaths):
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
    source: Path, target: Target, options: Options, engine: Engine | None, progress: Callable[[int, int, int], None]
) -> Report:
    """Write compressed tars as plain ones, each to its own place; `progress` counts tars.

    A tar that is there is compared with its source if that may have changed since, or the whole source was moved.
    Raises OSError where a file cannot be written, and ValueError for two tars that would have one name.
    """
    tars = packed_tars(source)
    base = source if source.is_dir() else source.parent
    names = [_plain_name(path.relative_to(base).as_posix()) for path in tars]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{source}: two tars would become {twice}. Convert them into two folders")
    manifest = Manifest(
        version=VERSION,
        samples=len(tars),
        shards=len(tars),
        input=_digest_of(base, tars),
        options=options,
        source_id=source_id(source),
        source=source_name(source),
    )
    there = to_go_on(target, manifest, names)
    moved = there is not None and there.source_id != manifest.source_id
    faults, looked_at = _all_repacked(dict(zip(names, tars, strict=True)), target, engine, progress, moved=moved)
    rejected = [
        Reject(str(path), "", "damaged tar", printable(faults[name]))
        for path, name in zip(tars, names, strict=True)
        if faults.get(name)
    ]
    index = None if len(rejected) == len(tars) else _described(target, names)
    write_rejects(target.folder, rejected)
    if moved or there is None or not there.done:
        write_manifest(target.folder, msgspec.structs.replace(manifest, done=True))
    entries = [] if index is None else index.shards
    told = "" if index is None else warning_of_links(target.name, index, range(len(entries)))
    samples, size = sum(entry.samples for entry in entries), sum(entry.size for entry in entries)
    return Report(samples, len(entries), size, rejected, 0, [told] if told else [], already=not looked_at)


def _all_repacked(
    tars: dict[str, Path],
    target: Target,
    engine: Engine | None,
    progress: Callable[[int, int, int], None],
    *,
    moved: bool,
) -> tuple[dict[str, str], int]:
    """The faults of those that were looked at, by name, and how many these are."""
    jobs = [
        _TarJob(
            name=name,
            **target.shard_paths,
            path=path.absolute(),
            there=(target.folder / name).stat().st_size if (target.folder / name).exists() else None,
        )
        for name, path in tars.items()
        if moved or not (target.folder / name).exists() or is_newer(path, target.folder / name)
    ]
    done, size = len(tars) - len(jobs), 0
    progress(done, len(tars), size)
    faults: dict[str, str] = {}
    for job, made in _repacked(jobs, target.folder / WORK, engine):
        faults[job.name] = made.fault
        done, size = done + 1, size + job.path.stat().st_size
        progress(done, len(tars), size)
    return faults, len(jobs)


def _described(target: Target, names: list[str]) -> TarIndex:
    """Write the index, of tars in a bucket of what was noted of each."""
    folder = target.folder
    if target.bucket is None:
        return describe(folder)
    noted = (folder / WORK / f"{name}.index" for name in sorted(names) if (folder / name).exists())
    return describe_tables(folder, folder / WORK, (TarIndex(path).table(0) for path in noted))


def _repacked(jobs: list[_TarJob], work: Path, engine: Engine | None) -> Iterator[tuple[_TarJob, _Repacked]]:
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
                note_shard(job, made.size, made.index)
            elif not made.fault:
                wait_until_seen(job.target / job.name, (job.target / job.name).exists)
            yield job, made


def _attempt(job: _TarJob) -> _Repacked:
    """`_repack_one`, by way of a folder of its own."""
    with own_folder(job) as own:
        return _repack_one(own)


def _repack_one(job: _TarJob) -> _Repacked:
    """Write one tar, and put it in its place if it is whole; or compare it with what is there."""
    aside = job.aside / "repacked.tar"
    with aside.open("wb") as file:
        try:
            with opened(job.path) as content:
                shutil.copyfileobj(content, file, _CHUNK)
        except ValueError as error:
            return _Repacked(f"{job.path.name}: {error}")
        file.flush()
        os.fsync(file.fileno())
    table = TARS.scan(job.aside, aside.name)
    size = table.entry.size
    if table.entry.fault:
        return _Repacked(table.entry.fault)
    if job.there is not None:
        if job.there != size or not filecmp.cmp(aside, job.target / job.name, shallow=False):
            raise SavableError(
                f"{job.target}/{job.name} is of an older {job.path.name} of the same size. Convert into another folder"
            )
        return _Repacked()
    if job.bucket is None:
        (job.target / job.name).parent.mkdir(parents=True, exist_ok=True)
        aside.replace(job.target / job.name)
        return _Repacked()
    (job.aside / job.name).parent.mkdir(parents=True, exist_ok=True)
    aside.replace(job.aside / job.name)
    put_in_place(job, msgspec.structs.replace(table, entry=msgspec.structs.replace(table.entry, name=job.name)))
    return _Repacked("", size, index_of(job))


def _plain_name(name: str) -> str:
    ending = next(ending for ending in TAR_ENDINGS if name.lower().endswith(ending))
    return f"{name[: -len(ending)]}.tar"


def _digest_of(base: Path, tars: list[Path]) -> str:
    """A hash of the names and sizes of the tars: a conversion that continues must have the same."""
    digest = hashlib.sha256()
    for path in tars:
        digest.update(
            f"{path.relative_to(base).as_posix()}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()
