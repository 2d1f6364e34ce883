"""`convert`, which is `sp.convert`: the same input gives the same bytes, and a killed run goes on where it ended.

    source ─ recognize ─ read names and sizes ─ plan ─ write shards, in any order, by any process ─ index, report

What is unfinished lies in `.nv-meta/savable.convert/`, which the last step removes. A shard found finished
there is not written again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.shards.part_types import dotted_parts, lacking_parts
from savable_pipeline.data.shards.tar_format import TarIndex
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.folder_store import class_names
from savable_pipeline.data.stores.sample_names import Classes
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.cluster import write_by_cluster
from savable_pipeline.tools.convert.describe import describe_tables
from savable_pipeline.tools.convert.mirror import Target, target_at
from savable_pipeline.tools.convert.model import Input, Options, Report
from savable_pipeline.tools.convert.plan import (
    CLASSES,
    MANIFEST,
    RECORDS,
    WORK,
    Plan,
    add_classes,
    classes_hint,
    keep_keys,
    keep_parts,
    make_plan,
    source_name,
)
from savable_pipeline.tools.convert.read import Reading, close_sources, read_source
from savable_pipeline.tools.convert.repack import repack
from savable_pipeline.tools.convert.resume import finished, write_manifest, write_rejects
from savable_pipeline.tools.convert.shard_job import ShardJob, WrittenShard, read_written, room_on
from savable_pipeline.tools.convert.sources import STORED, ConversionSource, recognize
from savable_pipeline.tools.convert.stored import INDEX, records_behind
from savable_pipeline.tools.convert.writer_processes import claimed, write_shards

if TYPE_CHECKING:
    from savable_pipeline.core.job_engine import Engine


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    kind: str | None = None,
    shard_bytes: int = 256_000_000,
    shard_samples: int | None = None,
    check_images: bool = True,
    allow_outside: bool = False,
    key_field: str | None = None,
    key_end: Literal["first", "last"] | None = None,
    classes: Classes = False,
    file_fields: Iterable[str] | None = None,
    files_from: str | os.PathLike[str] | None = None,
    split: Mapping[str, float | str] | None = None,
    only: Iterable[str] | None = None,
    keys: Iterable[str] | None = None,
    reshard: bool = False,
    unpacked_bytes: int = UNPACKED_BYTES,
    workers: int | None = None,
    engine: Literal["ray"] | Engine | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the samples of a source as WebDataset shards, as `savable convert` does: the same bytes.

    Damaged samples are left out and reported. The same call after one that was stopped continues it, and ends with
    the same bytes; after one that is done it writes nothing. With several processes a program needs the usual
    `if __name__ == "__main__":`.

    Args:
        source: A folder of files, JSONL, JSON, CSV, MDS, LitData, Parquet, Arrow or tars; or, as a str, a URL of some.
        target: The folder for the shards, made if it is missing; or, as a str, a URL (s3, gs, az).
        kind: What the source is, one of the words of `--as`. Default: found by its marks.
        shard_bytes: A shard is full before it grows longer than this, in bytes.
        shard_samples: A shard is full before it holds more samples than this. Default: no limit.
        check_images: Whether each image is decoded, and the headers of each sound and film are read where PyAV is
            installed; those that fail are rejected.
        allow_outside: Whether files outside the source that links or fields lead to are taken.
        key_field: Of records, the field with a sample's key. Default: the number of its record.
        key_end: The dot of a file's name that ends the key; with "last", dots before it become "_". None: the first,
            and an error where that seems to merge files that are samples of their own, and where few samples have two
            images, sounds or videos.
        classes: Of a folder, whether the name of a sample's top folder becomes its part `cls`, as a number: the place
            of the name in `classes.json`, a list that is written beside the shards. Or the names, as for `sp.read`.
        file_fields: Of records, the fields that name files, as "field" or "field=part"; none if empty. Default: the
            usual names.
        files_from: The folder that these fields are relative to, or that has the files which rows of Parquet and
            Arrow name without their bytes. Default: that of the source.
        split: Names and shares that add up to 1, such as {"train": 0.98, "val": 0.02}, by the hash of the keys.
        only: The parts to keep, such as ["jpg", "txt"]. Default: all.
        keys: The keys of the samples to keep. Default: all.
        reshard: Needed for tars, which are read as they are: write their samples into new shards.
        unpacked_bytes: The most bytes that a compressed shard, chunk, record, JSON array or line may become.
        workers: Processes that write; with `engine="ray"` the most tasks at a time. Default: one per core, but one for
            less than 100 MB.
        engine: "ray" for the nodes of a Ray cluster, on storage that they share with this machine. Default: processes
            of this machine.
        progress: Called with the samples done, all of them, and the bytes done.

    Returns:
        What was written: `samples`, `shards` and `size` in bytes; what was left out: `rejected`, each with `file`,
        `key`, `reason` and `detail`, and `hidden`, the number of hidden files and folders; `warnings`, texts; `nulls`,
        by column the number of rows without a value; `already`, whether all of it had been written before.

    Raises:
        ValueError: A setting is wrong, or the source cannot be converted.
        SavableError: `target` holds anything but this conversion, its disk is full, or the source changed meanwhile.
        RemoteError: A bucket or a web server cannot be read or written.
        OSError: A file cannot be read or written.

    Example:
        >>> report = sp.convert("shards/", "smaller/", reshard=True, shard_samples=100)
        >>> report.samples, report.shards, report.rejected
        (400, 4, [])
        >>> len(sp.open_dataset("smaller/"))
        400
    """
    options = Options(
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
        check_images=check_images,
        allow_outside=allow_outside,
        key_field=key_field,
        key_end=key_end,
        classes=classes if isinstance(classes, bool) else tuple(class_names(classes)),
        file_fields=_listed("file_fields", file_fields),
        split=tuple((name, _share(share)) for name, share in (split or {}).items()),
        only=_parts(only),
        unpacked_bytes=unpacked_bytes,
    )
    found = recognize(source if isinstance(source, str) else Path(source), kind)
    with _engine_of(engine, workers) as cluster:
        return run_conversion(
            found,
            target if isinstance(target, str) else Path(target),
            options,
            files_from=None if files_from is None else Path(files_from),
            keys=_listed("keys", keys),
            reshard=reshard,
            workers=workers,
            engine=cluster,
            progress=progress or _ignored,
        )


def _listed(name: str, texts: Iterable[str] | None) -> tuple[str, ...] | None:
    """Raises ValueError for one str, whose letters would be taken for the texts."""
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a list, not a str. Pass [{texts!r}]")
    return None if texts is None else tuple(texts)


def _parts(only: Iterable[str] | None) -> tuple[str, ...]:
    names = _listed("only", only)
    if names == ():
        raise ValueError("only= names no part. Pass extensions, such as jpg and txt, or None for all")
    return names or ()


def _share(share: float | str) -> str:
    """A share as the command takes it: 0.00001, never 1e-05."""
    return share if isinstance(share, str) else f"{Decimal(str(share)):f}"


def _engine_of(
    engine: Literal["ray"] | Engine | None, workers: int | None
) -> contextlib.AbstractContextManager[Engine | None]:
    if not isinstance(engine, str):
        return contextlib.nullcontext(engine)
    if engine != "ray":
        raise ValueError(f'engine must be "ray", or None for processes of this machine, not {engine!r}')
    from savable_pipeline.tools.convert.ray_engine import RayEngine  # only who asks for it needs Ray

    return RayEngine(workers)


def _ignored(done: int, total: int, size: int) -> None:
    """Nobody asked for the progress."""


Progress: TypeAlias = Callable[[int, int, int], None]  # samples done, all samples, bytes done
_LITTLE_BYTES = 100_000_000  # converted before other processes would have started


def run_conversion(
    source: Path | str | ConversionSource,
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
    source = source if isinstance(source, ConversionSource) else recognize(source)
    with target_at(target) as out:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be 1 or more, not {workers}")
        if engine is not None:  # whose machines have other current folders
            out = replace(out, folder=out.folder.absolute())
            if isinstance(source.path, Path) and source.kind != "packed":
                source = replace(source, path=source.path.absolute())
            files_from = None if files_from is None else files_from.absolute()
        check_reshard(source, options, reshard, keys is not None)
        if source.kind == "packed":
            _check_repack(source, options, files_from=files_from, workers=workers if engine is None else None)
        _check_apart(source.path, out.folder if out.bucket is None else out.name)
        _refuse_other_shards(out)
        with room_on(out.folder), _work_in(out.folder):
            if source.kind == "packed":
                assert isinstance(source.path, Path)  # `recognize` refuses others
                return repack(source.path, out, options, engine, progress)
            found = _chosen(read_source(Reading(source, options, files_from, out.folder)), options, keys)
            plan = make_plan(found, options, source_name(source.path))
            report = finished(out, plan)
            if report is None:
                _write(out, plan, workers or _workers(found), engine, progress)
                report = _finish(out.folder, plan)
        return replace(report, warnings=_warnings(source, found, options), nulls=found.nulls)


def check_reshard(source: ConversionSource, options: Options, reshard: bool, keys: bool = False) -> None:
    """Raises ValueError for tars that nothing asks to write again, and for what does not fit the kind of a source."""
    chosen = bool(reshard or options.only or options.split or keys)
    if source.kind == "packed" and chosen:
        raise ValueError(
            f"{source.path}: compressed tars are re-packed as they are. Convert them first, then their plain tars with "
            "--reshard"
        )
    if source.kind == "tars" and not reshard:
        raise ValueError(
            f'{source.path}: tars need no conversion. Read them by sp.TarShardReader("{source.path}", lane), or pass '
            "--reshard for other sizes, parts, keys or splits"
        )
    if reshard and source.kind != "tars":
        raise ValueError(f"{source.path} is {source.words}: --reshard is only for tars")


def _check_repack(source: ConversionSource, options: Options, **more: object) -> None:
    """Raises ValueError for settings that compressed tars do not heed."""
    usual = msgspec.structs.asdict(Options())
    given = [name for name, value in msgspec.structs.asdict(options).items() if value != usual[name]]
    given += [name for name, value in more.items() if value is not None]
    if given:
        raise ValueError(
            f"{source.path}: compressed tars are re-packed one by one. Leave out {', '.join(sorted(given))}, or "
            "convert their plain tars with --reshard"
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
            for index in (target / WORK).glob(f"source.*{INDEX}"):
                index.unlink()
        shutil.rmtree(target / WORK)


def _chosen(found: Input, options: Options, keys: Iterable[str] | None) -> Input:
    """The samples of a source that are asked for, with their classes: numbered before keys are chosen."""
    if options.only:
        keep_parts(found, options.only)
    if options.classes:
        add_classes(found)
    if keys is not None:
        keep_keys(found, keys)
    return found


def _warnings(source: ConversionSource, found: Input, options: Options) -> list[str]:
    """What is odd about the samples; of dots in names nothing, where it was said which of them ends a key."""
    counts = Counter(part.extension for sample in found.samples for part in sample.parts)
    most = max((len(sample.parts) for sample in found.samples), default=0)
    dotted = [] if options.key_end else dotted_parts(len(found.samples), counts, most)
    hint = classes_hint(found.samples) if source.kind == "folder" and not options.classes else []
    lacking = lacking_parts(len(found.samples), counts)
    return [*found.warnings, *lacking, *dotted, *_subset_warning(source, options), *hint]


def _subset_warning(source: ConversionSource, options: Options) -> list[str]:
    """Of what can be read in place too, where somebody may have drawn a part of it."""
    compressed = str(source.path).endswith((".gz", ".zst"))
    if options.split or compressed or source.kind not in (*STORED, "jsonl"):
        return []
    return [
        "subset= draws shares of shards as they lie, so others here than of the source: to keep a part apart, --split"
    ]


def _check_apart(source: Path | str, target: Path | str) -> None:
    if isinstance(source, str) and isinstance(target, str):
        inner, outer = f"{source.rstrip('/')}/", f"{target.rstrip('/')}/"
        if inner.startswith(outer) or outer.startswith(inner):
            raise ValueError(f"{target} and {source} must not contain each other. Convert to another URL")
    if isinstance(source, str) or isinstance(target, str):
        return
    here, there = source.resolve(), target.resolve()
    if source.is_dir() and (here == there or there in here.parents or here in there.parents):
        raise ValueError(f"{target} and {source} must not contain each other. Convert into another folder")


def _workers(found: Input) -> int:
    size = sum(part.size for sample in found.samples for part in sample.parts)
    return 1 if size < _LITTLE_BYTES else os.cpu_count() or 1


def _refuse_other_shards(target: Target) -> None:
    """Raise `SavableError` if the folder or bucket has shards that `savable convert` did not write."""
    folder = target.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Give a folder, or a name for a new one")
    if (folder / MANIFEST).exists():
        return
    here = (path.relative_to(folder).as_posix() for path in [*folder.rglob("*.tar"), *folder.glob(f"{META}/.info.*")])
    for name in [*here, *target.there]:
        if (name.endswith(".tar") or name.startswith(f"{META}/.info.")) and WORK not in name:
            raise SavableError(f"{folder} has {Path(name).name} of another origin. Convert into another folder")


def _write(target: Target, plan: Plan, workers: int, engine: Engine | None, progress: Progress) -> None:
    folder, reader, bucket = target.folder, plan.input.reader, target.bucket
    for name in RECORDS.values():
        if engine is not None and bucket is not None and (folder / name).exists():
            bucket.upload(name, folder / name)
            reader = records_behind(f"{bucket.url}/{name}", reader)
    jobs = [
        ShardJob(
            name=shard.name,
            **target.shard_paths,
            samples=plan.input.samples[shard.first : shard.last],
            reader=reader,
            check_images=plan.options.check_images,
        )
        for shard in plan.shards
        if read_written(folder, folder / WORK, shard.name) is None
    ]
    total = len(plan.input.samples)
    before = total - sum(len(job.samples) for job in jobs)
    progress(before, total, 0)

    def so_far(done: int, size: int) -> None:
        progress(before + done, total, size)

    if engine is None:
        write_shards(jobs, folder / WORK, workers, so_far)
    else:
        write_by_cluster(engine, jobs, folder / WORK, so_far)


def _finish(folder: Path, plan: Plan) -> Report:
    """Write the index, the rejects, Energon's files, and that the conversion is done, in this order."""
    work = folder / WORK
    shards: dict[str, WrittenShard] = {}
    for shard in plan.shards:
        written = read_written(folder, work, shard.name)
        assert written is not None, shard.name
        shards[shard.name] = written
    rejected = [*plan.input.rejected, *(reject for written in shards.values() for reject in written.rejected)]
    write_rejects(folder, rejected)
    counts = {name: written.samples for name, written in shards.items() if written.samples}
    if counts:
        tables = (TarIndex(work / f"{name}.index").table(0) for name in sorted(counts))
        splits = tuple(name for name, _ in plan.options.split)
        describe_tables(folder, work, tables, counts, plan.input.texts, splits)
    if plan.input.classes:
        replace_file(folder / CLASSES, [json.dumps(plan.input.classes, ensure_ascii=False).encode()], sync=True)
    write_manifest(folder, msgspec.structs.replace(plan.manifest, done=True))
    size = sum(written.size for written in shards.values())
    return Report(sum(counts.values()), len(counts), size, rejected, plan.input.hidden)
