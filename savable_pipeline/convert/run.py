"""Converting files into shards: the same input gives the same bytes, and a killed run goes on where it ended.

    source ─ read names and sizes ─ plan ─ write shards, in any order, by any process ─ index, Energon, report

What is unfinished lies in `.nv-meta/savable.convert/`, which the last step removes. A shard found finished
there is not written again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from savable_pipeline.convert.energon import energon_files
from savable_pipeline.convert.jsonl import read_jsonl
from savable_pipeline.convert.plan import MANIFEST, Manifest, Plan, check_manifest, make_plan, read_manifest
from savable_pipeline.convert.pool import claimed, write_shards
from savable_pipeline.convert.repack import digest_of, packed_tars, repack
from savable_pipeline.convert.shard import Job, Written, read_written, replace_bytes
from savable_pipeline.convert.source import Input, Options, Reject, read_folder
from savable_pipeline.errors import SavableError
from savable_pipeline.indexing import INDEX_NAME
from savable_pipeline.shard_index import ShardIndex, write_index

META = ".nv-meta"
REJECTED = ".nv-meta/savable.rejected.jsonl"
_WORK = ".nv-meta/savable.convert"
_LITTLE_BYTES = 100_000_000  # is converted sooner than other processes have started


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion came to: what is in the shards, their bytes, and what was left out."""

    samples: int
    shards: int
    size: int
    rejected: list[Reject]
    hidden: int  # hidden files and folders, passed over


def convert(
    source: Path,
    target: Path,
    options: Options,
    *,
    files_from: Path | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Write the samples of a folder or a JSONL file as shards into the folder `target`; or re-pack compressed tars.

    `files_from` is the folder that a JSONL's fields are relative to (None: where it lies), `workers` the
    number of processes (None: one a processor, but one for little); `progress` hears samples done and in all.
    What is bad is left out and reported. Raises `ValueError` for a source that is none and settings that
    cannot be, `SavableError` if `target` holds anything but this conversion, `OSError` for files that cannot
    be read or written.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be 1 or more, not {workers}")
    tars = packed_tars(source)
    if tars:
        return _repack(source, tars, target, options, progress)
    found = _read(source, target, files_from, options)
    plan = make_plan(found, options)
    _refuse_strangers(target)
    (target / META).mkdir(parents=True, exist_ok=True)
    with claimed(target / META, target / _WORK):
        report = _finished(target, plan)
        if report is None:
            _write(target, plan, workers or _workers(found), progress)
            report = _finish(target, plan)
        shutil.rmtree(target / _WORK)
    return report


def _repack(
    source: Path, tars: list[Path], target: Path, options: Options, progress: Callable[[int, int], None]
) -> Report:
    """Compressed tars as plain ones; `progress` hears tars, not samples."""
    _check_apart(source, target)
    _refuse_strangers(target)
    (target / META).mkdir(parents=True, exist_ok=True)
    manifest = Manifest(version=1, samples=len(tars), shards=len(tars), input=digest_of(source, tars), options=options)
    with claimed(target / META, target / _WORK):
        there = read_manifest(target)
        if there is None:
            replace_bytes(target / MANIFEST, _pretty(manifest))
        else:
            check_manifest(target, manifest, there)
        rejected, index = repack(source, tars, target, target / _WORK, progress)
        replace_bytes(target / REJECTED, b"".join(msgspec.json.encode(reject) + b"\n" for reject in rejected))
        shutil.rmtree(target / _WORK)
    entries = [] if index is None else index.shards
    return Report(sum(e.samples for e in entries), len(entries), sum(e.size for e in entries), rejected, 0)


def _check_apart(source: Path, target: Path) -> None:
    if source.is_dir() and (source.resolve() == target.resolve() or _within(source, target) or _within(target, source)):
        raise ValueError(f"{source} and {target} lie one within the other; convert into a folder beside the source")


def _read(source: Path, target: Path, files_from: Path | None, options: Options) -> Input:
    _check_apart(source, target)
    if source.is_dir():
        if options.key_field or options.file_fields or files_from:
            raise ValueError(f"{source} is a folder: fields and the place of their files are for a JSONL file")
        found = read_folder(source, options.allow_outside)
    elif not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    elif source.suffix.lower() in (".jsonl", ".ndjson"):
        found = read_jsonl(source, files_from, options)
    else:
        raise ValueError(f"{source}: expected a folder of files, a .jsonl file, or a compressed tar")
    if not found.samples and not found.rejected:
        raise ValueError(f"{source} holds no samples: expected files named KEY.EXTENSION, or a JSON object a line")
    return found


def _workers(found: Input) -> int:
    size = sum(part.size for sample in found.samples for part in sample.parts)
    return 1 if size < _LITTLE_BYTES else os.cpu_count() or 1


def _within(inner: Path, outer: Path) -> bool:
    return outer.resolve() in inner.resolve().parents


def _refuse_strangers(target: Path) -> None:
    """Raise `SavableError` if the folder holds shards that no conversion of ours wrote."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; expected a folder, or a name for a new one")
    if (target / MANIFEST).exists():
        return
    strangers = [*target.rglob("*.tar"), *target.glob(f"{META}/.info.*")]
    strangers = [path for path in strangers if _WORK not in path.as_posix()]
    if strangers:
        raise SavableError(
            f"{target} holds {strangers[0].name} already, of another origin; convert into another folder"
        )


def _finished(target: Path, plan: Plan) -> Report | None:
    """The report of a conversion that is done; else None, with the manifest in place.

    Raises `SavableError` if the folder holds another conversion.
    """
    there = read_manifest(target)
    if there is None:
        replace_bytes(target / MANIFEST, _pretty(plan.manifest))
        return None
    check_manifest(target, plan.manifest, there)
    if not there.done:
        return None
    rejected = [msgspec.json.decode(line, type=Reject) for line in (target / REJECTED).open("rb")]
    entries = ShardIndex(target / INDEX_NAME).shards if (target / INDEX_NAME).exists() else []
    if not all((target / e.name).exists() and (target / e.name).stat().st_size == e.size for e in entries):
        replace_bytes(target / MANIFEST, _pretty(plan.manifest))
        return None
    samples, size = sum(entry.samples for entry in entries), sum(entry.size for entry in entries)
    return Report(samples, len(entries), size, rejected, plan.input.hidden)


def _write(target: Path, plan: Plan, workers: int, progress: Callable[[int, int], None]) -> None:
    work = target / _WORK
    jobs = []
    for shard in plan.shards:
        if read_written(target, work, shard.name) is None:
            samples = plan.input.samples[shard.first : shard.last]
            jobs.append(Job(shard.name, samples, plan.input.root, target, work, plan.options.check_images))
    total = len(plan.input.samples)
    before = total - sum(len(job.samples) for job in jobs)
    import webdataset.writer  # noqa: F401  # here: other commands need not wait for it, and no shard does

    progress(before, total)
    write_shards(jobs, work, workers, lambda done: progress(before + done, total))


def _finish(target: Path, plan: Plan) -> Report:
    """Write what describes the shards: index, report, Energon's files, and that it is done, in this order."""
    work = target / _WORK
    shards: dict[str, Written] = {}
    for shard in plan.shards:
        written = read_written(target, work, shard.name)
        assert written is not None, shard.name
        shards[shard.name] = written
    rejected = [*plan.input.rejected, *(reject for written in shards.values() for reject in written.rejected)]
    replace_bytes(target / REJECTED, b"".join(msgspec.json.encode(reject) + b"\n" for reject in rejected))
    counts = {name: written.samples for name, written in shards.items() if written.samples}
    if counts:
        _describe(target, plan, counts)
    replace_bytes(target / MANIFEST, _pretty(msgspec.structs.replace(plan.manifest, done=True)))
    size = sum(written.size for written in shards.values())
    return Report(sum(counts.values()), len(counts), size, rejected, plan.input.hidden)


def _describe(target: Path, plan: Plan, counts: dict[str, int]) -> None:
    work = target / _WORK
    index = work / "savable.index"
    tables = [ShardIndex(work / f"{name}.index").table(name) for name in counts]
    write_index(index, tables)
    index.replace(target / INDEX_NAME)
    layouts = {frozenset(extension for extension, _ in layout) for table in tables for layout in table.layouts}
    for name, content in energon_files(counts, layouts, plan.input.texts).items():
        replace_bytes(target / META / name, content.encode())


def _pretty(manifest: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
