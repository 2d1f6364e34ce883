"""Converting files into shards: the same input gives the same bytes, and a killed run goes on where it ended.

    source ─ recognize ─ read names and sizes ─ plan ─ write shards, in any order, by any process ─ index, report

What is unfinished lies in `.nv-meta/savable.convert/`, which the last step removes. A shard found finished
there is not written again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from savable_pipeline.core.addresses import clean_address
from savable_pipeline.core.files import replace_file
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME, META
from savable_pipeline.data.shards.index_writer import write_index
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.data.shards.tar_links import links_told
from savable_pipeline.data.shards.uneven_parts import uneven_parts
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.changed import check_unchanged
from savable_pipeline.tools.convert.choose import keep_keys, keep_parts
from savable_pipeline.tools.convert.elsewhere import write_elsewhere
from savable_pipeline.tools.convert.energon import energon_files
from savable_pipeline.tools.convert.file_reader import records_behind
from savable_pipeline.tools.convert.linked_tars import holds_links
from savable_pipeline.tools.convert.mirror import Mirror, mirrored
from savable_pipeline.tools.convert.model import Input, Options, Reject
from savable_pipeline.tools.convert.plan import (
    MANIFEST,
    RECORDS,
    WORK,
    Manifest,
    Plan,
    PlannedShard,
    check_manifest,
    make_plan,
    place_of,
    read_manifest,
    source_name,
)
from savable_pipeline.tools.convert.read import Reading, close_sources, read_source
from savable_pipeline.tools.convert.repack import digest_of, packed_tars, repack
from savable_pipeline.tools.convert.shard_job import Job, ShardPlace, Written, read_written, room_on
from savable_pipeline.tools.convert.sources import STORED, Source, recognize
from savable_pipeline.tools.convert.writer_processes import claimed, write_shards

REJECTED = f"{META}/savable.rejected.jsonl"
Progress: TypeAlias = Callable[[int, int, int], None]  # samples done, all samples, bytes done
_LITTLE_BYTES = 100_000_000  # converted before other processes would have started


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a conversion: what is in the shards, and what was left out."""

    samples: int
    shards: int
    size: int
    rejected: list[Reject]
    hidden: int  # hidden files and folders, skipped
    warnings: list[str] = field(default_factory=list)  # about samples that are not as the others
    nulls: dict[str, int] = field(default_factory=dict)  # by column: the rows that have nothing there, and so no part
    already: bool = field(default=False, compare=False)  # all of it was there before, and nothing was written


def run_conversion(
    source: Path | str | Source,
    target: Path | str,
    options: Options,
    *,
    files_from: Path | None = None,
    keys: Iterable[str] | None = None,
    reshard: bool = False,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Progress = lambda done, total, size: None,
) -> Report:
    """Write the samples of a source as shards into `target`, a folder or a URL; or re-pack compressed tars.

    `source` is a file, a folder or a URL, told by its marks (`recognize`). `files_from` is the folder that fields of
    records are relative to (None: that of the source), or in which the files lie that rows of Parquet and Arrow name
    without their bytes. `keys` are those of the samples to take (None: all), and
    `reshard` is needed to write tars again, which are read as they are. `workers` is the number of processes (None: one
    per core, but one for less than 100 MB); with an `engine` its machines write instead, on storage that they share
    with this one. `progress` is called with the samples done, all of them, and the bytes done.

    Damaged samples are left out and reported. Raises ValueError for a wrong source or setting, `SavableError` if
    `target` holds anything but this conversion or its disk is full, OSError for files that cannot be read or written,
    `RemoteError` for a bucket or a web server that cannot.
    """
    how = _How(options, files_from, keys, reshard, workers, engine, progress)
    source = source if isinstance(source, Source) else recognize(source)
    if isinstance(target, Path) and re.match("[a-z0-9]+:/", str(target)):
        raise ValueError(f"{clean_address(str(target))}: a Path cannot hold a URL; give it as a str")
    if "://" not in str(target):
        return _convert(source, Path(target), how, None)
    with mirrored(str(target)) as mirror:
        return _convert(source, mirror.folder, how, mirror)


@dataclass(frozen=True, slots=True)
class _How:
    """The settings of `run_conversion`."""

    options: Options
    files_from: Path | None
    keys: Iterable[str] | None
    reshard: bool
    workers: int | None
    engine: Engine | None
    progress: Progress


def _convert(source: Source, target: Path, how: _How, mirror: Mirror | None) -> Report:
    options, files_from, keys, workers, engine = how.options, how.files_from, how.keys, how.workers, how.engine
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be 1 or more, not {workers}")
    if engine is not None:  # whose machines have other current folders
        target = target.absolute()
        if isinstance(source.path, Path) and source.kind != "packed":
            source = replace(source, path=source.path.absolute())
        files_from = None if files_from is None else files_from.absolute()
    check_reshard(source, options, how.reshard, keys is not None)
    if source.kind == "packed":
        _check_repack(source, options, files_from=files_from, workers=workers if engine is None else None)
    _check_apart(source.path, target if mirror is None else mirror.bucket.url)
    _refuse_other_shards(target)
    with room_on(target), _work_in(target):
        if source.kind == "packed":
            assert isinstance(source.path, Path)  # `recognize` refuses others
            return _repack(source.path, target, how, mirror)
        found = read_source(Reading(source, options, files_from, target / RECORDS))
        if options.only:
            keep_parts(found, options.only)
        if keys is not None:
            keep_keys(found, keys)
        plan = make_plan(found, options, source_name(source.path))
        report = _finished(target, plan, mirror)
        if report is None:
            _write(target, plan, workers or _workers(found), engine, mirror, how.progress)
            report = _finish(target, plan)
    warnings = [*_warnings(found), *_subset_warning(source, options)]
    return replace(report, warnings=warnings, nulls=found.nulls)


def check_reshard(source: Source, options: Options, reshard: bool, keys: bool = False) -> None:
    """Raises ValueError for tars that nothing asks to write again, and for what does not fit the kind of a source."""
    chosen = bool(reshard or options.only or options.split or keys)
    if source.kind == "packed" and chosen:
        raise ValueError(
            f"{source.path}: compressed tars are re-packed as they are; convert them first, then give the folder with "
            "their plain ones and --reshard for other sizes, parts or keys"
        )
    if source.kind == "tars" and not reshard and not (isinstance(source.path, Path) and holds_links(source.path)):
        raise ValueError(
            f'{source.path}: tars are read as they are, with nothing to convert: sp.TarShardReader("{source.path}", '
            "lane). To write their samples into shards of another size, of some parts or keys, or by split, give "
            "--reshard"
        )
    if reshard and source.kind != "tars":
        raise ValueError(f"{source.path} is {source.words}: --reshard is for tars")


def _check_repack(source: Source, options: Options, **more: object) -> None:
    """Raises ValueError for settings that compressed tars do not heed."""
    usual = msgspec.structs.asdict(Options())
    given = [name for name, value in msgspec.structs.asdict(options).items() if value != usual[name]]
    given += [name for name, value in more.items() if value is not None]
    if given:
        raise ValueError(
            f"{source.path}: compressed tars are re-packed as they are, one by one: leave out "
            f"{', '.join(sorted(given))}; for other shards convert the folder with their plain ones, with --reshard"
        )


@contextlib.contextmanager
def _work_in(target: Path) -> Iterator[Path]:
    """The folder for what is unfinished, for one conversion at a time. If nothing was begun, nothing stays."""
    is_new = not (target / META).exists()
    was_there = target.exists()
    (target / META).mkdir(parents=True, exist_ok=True)
    with claimed(target / META, target / WORK):
        try:
            yield target / WORK
        except BaseException:
            if is_new and not (target / MANIFEST).exists():
                shutil.rmtree(target / META)
                if not was_there:
                    target.rmdir()
            raise
        finally:
            close_sources()
        shutil.rmtree(target / WORK)


def _warnings(found: Input) -> list[str]:
    counts = Counter(part.extension for sample in found.samples for part in sample.parts)
    most = max((len(sample.parts) for sample in found.samples), default=0)
    return [*found.warnings, *uneven_parts(len(found.samples), counts, most)]


def _subset_warning(source: Source, options: Options) -> list[str]:
    """Of what can be read in place too, where somebody may have drawn a part of it."""
    compressed = str(source.path).endswith((".gz", ".zst"))
    if options.split or compressed or source.kind not in (*STORED, "jsonl"):
        return []
    return [
        "subset= draws shares of shards as they lie, so others here than of the source: to keep a part apart, --split"
    ]


def _repack(source: Path, target: Path, how: _How, mirror: Mirror | None) -> Report:
    """Write compressed tars as plain ones; progress counts tars."""
    tars = packed_tars(source)
    manifest = Manifest(
        version=1,
        samples=len(tars),
        shards=len(tars),
        input=digest_of(source, tars),
        options=how.options,
        place=place_of(source),
        source=source_name(source),
    )
    there = read_manifest(target)
    if there is None:
        _begin(target, manifest, mirror)
    else:
        check_manifest(target, manifest, there)
    moved = there is not None and there.place != manifest.place
    bucket = None if mirror is None else mirror.bucket
    place = ShardPlace(name="", target=target, work=target / WORK, aside=target / WORK, bucket=bucket)
    rejected, index, written = repack(source, tars, place, how.engine, how.progress, moved=moved)
    if moved:
        replace_file(target / MANIFEST, [_pretty(manifest)], sync=True)
    replace_file(target / REJECTED, (msgspec.json.encode(reject) + b"\n" for reject in rejected), sync=True)
    entries = [] if index is None else index.shards
    place_name = str(target) if mirror is None else mirror.bucket.url
    told = "" if index is None else links_told(place_name, index, range(len(entries)))
    samples, size = sum(entry.samples for entry in entries), sum(entry.size for entry in entries)
    return Report(samples, len(entries), size, rejected, 0, [told] if told else [], already=not written)


def _check_apart(source: Path | str, target: Path | str) -> None:
    if isinstance(source, str) and isinstance(target, str):
        inner, outer = f"{source.rstrip('/')}/", f"{target.rstrip('/')}/"
        if inner.startswith(outer) or outer.startswith(inner):
            raise ValueError(f"{source} and {target} lie one within the other; convert to a URL beside the source")
    if isinstance(source, str) or isinstance(target, str):
        return
    if source.is_dir() and (source.resolve() == target.resolve() or _within(source, target) or _within(target, source)):
        raise ValueError(f"{source} and {target} lie one within the other; convert into a folder beside the source")


def _workers(found: Input) -> int:
    size = sum(part.size for sample in found.samples for part in sample.parts)
    return 1 if size < _LITTLE_BYTES else os.cpu_count() or 1


def _within(inner: Path, outer: Path) -> bool:
    return outer.resolve() in inner.resolve().parents


def _refuse_other_shards(target: Path) -> None:
    """Raise `SavableError` if the folder has shards that `savable convert` did not write."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; expected a folder, or a name for a new one")
    if (target / MANIFEST).exists():
        return
    others = [*target.rglob("*.tar"), *target.glob(f"{META}/.info.*")]
    others = [path for path in others if WORK not in path.as_posix()]
    if others:
        raise SavableError(f"{target} holds {others[0].name} already, of another origin; convert into another folder")


def _finished(target: Path, plan: Plan, mirror: Mirror | None) -> Report | None:
    """The report of a conversion that is done; else None, with the manifest in place.

    Raises `SavableError` if the folder holds another conversion.
    """
    there = read_manifest(target)
    if there is None:
        _begin(target, plan.manifest, mirror)
        return None
    check_manifest(target, plan.manifest, there)
    if not there.done:
        written = [shard for shard in plan.shards if read_written(target, target / WORK, shard.name) is not None]
        _check_unchanged(target, plan, there, written, mirror)
        return None
    rejected = [msgspec.json.decode(line, type=Reject) for line in (target / REJECTED).open("rb")]
    entries = TarIndex(target / INDEX_NAME).shards if (target / INDEX_NAME).exists() else []
    if not all((target / e.name).exists() and (target / e.name).stat().st_size == e.size for e in entries):
        _begin(target, plan.manifest, mirror)
        return None
    _check_unchanged(target, plan, there, plan.shards, mirror)
    samples, size = sum(entry.samples for entry in entries), sum(entry.size for entry in entries)
    return Report(samples, len(entries), size, rejected, plan.input.hidden, already=True)


def _begin(target: Path, manifest: Manifest, mirror: Mirror | None) -> None:
    replace_file(target / MANIFEST, [_pretty(manifest)], sync=True)
    if mirror is not None:
        mirror.bucket.upload(MANIFEST, target / MANIFEST)


def _check_unchanged(
    target: Path, plan: Plan, there: Manifest, shards: list[PlannedShard], mirror: Mirror | None
) -> None:
    """See `check_unchanged`; from then on the source may lie where it lies now."""
    check_unchanged(target, plan, shards, there, mirror)
    here = msgspec.structs.replace(there, place=plan.manifest.place, source=plan.manifest.source)
    if here != there:
        replace_file(target / MANIFEST, [_pretty(here)], sync=True)


def _write(
    target: Path, plan: Plan, workers: int, engine: Engine | None, mirror: Mirror | None, progress: Progress
) -> None:
    work, reader = target / WORK, plan.input.reader
    jobs = []
    bucket = None if mirror is None else mirror.bucket
    if engine is not None and bucket is not None and (target / RECORDS).exists():
        bucket.upload(RECORDS, target / RECORDS)
        reader = records_behind(f"{bucket.url}/{RECORDS}", reader)
    for shard in plan.shards:
        if read_written(target, work, shard.name) is None:
            samples = plan.input.samples[shard.first : shard.last]
            jobs.append(
                Job(
                    name=shard.name,
                    target=target,
                    work=work,
                    aside=work,
                    bucket=bucket,
                    samples=samples,
                    reader=reader,
                    check_images=plan.options.check_images,
                )
            )
    total = len(plan.input.samples)
    before = total - sum(len(job.samples) for job in jobs)
    progress(before, total, 0)

    def so_far(done: int, size: int) -> None:
        progress(before + done, total, size)

    if engine is None:
        write_shards(jobs, work, workers, so_far)
    else:
        write_elsewhere(engine, jobs, work, so_far)


def _finish(target: Path, plan: Plan) -> Report:
    """Write the index, the rejects, Energon's files, and that the conversion is done, in this order."""
    work = target / WORK
    shards: dict[str, Written] = {}
    for shard in plan.shards:
        written = read_written(target, work, shard.name)
        assert written is not None, shard.name
        shards[shard.name] = written
    rejected = [*plan.input.rejected, *(reject for written in shards.values() for reject in written.rejected)]
    replace_file(target / REJECTED, (msgspec.json.encode(reject) + b"\n" for reject in rejected), sync=True)
    counts = {name: written.samples for name, written in shards.items() if written.samples}
    if counts:
        _describe(target, plan, counts)
    replace_file(target / MANIFEST, [_pretty(msgspec.structs.replace(plan.manifest, done=True))], sync=True)
    size = sum(written.size for written in shards.values())
    return Report(sum(counts.values()), len(counts), size, rejected, plan.input.hidden)


def _describe(target: Path, plan: Plan, counts: dict[str, int]) -> None:
    work = target / WORK
    index = work / "savable.index"
    write_index(index, (TarIndex(work / f"{name}.index").table(0) for name in sorted(counts)))
    layouts = {frozenset(layout.position) for layout in TarIndex(index).layouts}
    index.replace(target / INDEX_NAME)
    splits = tuple(name for name, _ in plan.options.split)
    for name, content in energon_files(counts, layouts, plan.input.texts, splits).items():
        replace_file(target / META / name, [content.encode()], sync=True)


def _pretty(manifest: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
