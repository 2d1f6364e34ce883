"""`convert`: a conversion whose output depends only on its input.

    source ─ recognize ─ open ─ cut ranges of rows ─ write each range, in any order ─ join small shards ─ name, index

Unfinished work is in `.nv-meta/savable.convert/`, which the last step removes. After a kill, the same call continues.
It writes only the ranges that are not finished.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.folder_store import class_names
from savable_pipeline.data.stores.sample_names import Classes
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.finish import finish, jobs_with_repeats
from savable_pipeline.tools.convert.jobs import claimed, do_jobs
from savable_pipeline.tools.convert.manifest import (
    Manifest,
    changed_files,
    check_same,
    finished_report,
    manifest_of,
    may_have_changed,
    read_manifest,
    write_manifest,
)
from savable_pipeline.tools.convert.options import HASHES, MANIFEST, WORK, Options, Report
from savable_pipeline.tools.convert.prepare import Prepared, prepare_source
from savable_pipeline.tools.convert.range_job import RECORD_FILE, Hashes, RangeJob
from savable_pipeline.tools.convert.shard_series import room_on
from savable_pipeline.tools.convert.source import SourceFiles, close_all, find_files
from savable_pipeline.tools.convert.target import Target, target_at

if TYPE_CHECKING:
    from savable_pipeline.core.job_engine import Engine


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
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
    progress: SampleProgress | None = None,
) -> Report:
    """Write the samples of a source as WebDataset shards.

    The bytes are those of `savable convert`.

    Damaged samples are skipped and reported. Repeating an interrupted call continues it, with the same bytes in the
    end. Repeating a finished call writes nothing. With several processes, a program needs the usual
    `if __name__ == "__main__":`.

    Args:
        source: A folder, a file, a glob or, as a str, a URL: of any format that `sp.read` reads, also compressed.
        target: The folder for the shards, created if missing; or, as a str, a URL (s3, gs, az).
        format: The format of the source, as for `sp.read`. Default: it is recognized.
        shard_bytes: The most bytes of a shard.
        shard_samples: The most samples of a shard. Default: no limit.
        check_images: Whether each image is decoded, and the headers of each sound and video are read where PyAV is
            installed; those that fail are rejected.
        allow_outside: Whether to read files outside the source that links or fields name.
        key_field: Of records, the field with a sample's key. Default: the index of the record.
        key_end: The dot of a file's name that ends the key; with "last", dots earlier it become "_". None: the first,
            and an error if that seems to merge separate samples, or if only a few samples have two images, recordings
            or videos.
        classes: Of a folder, whether a sample's top folder becomes its part `cls`, as a number: the position in
            `classes.json`, a list that is written next to the shards. Or the names, as for `sp.read`.
        file_fields: Of records, the fields that name files, as "field" or "field=part"; none if empty. Default: the
            usual names.
        files_from: The folder that these fields are relative to, or that has the files which rows of Parquet and
            Arrow name without their bytes. Default: that of the source.
        split: Names and fractions that add up to 1, such as {"train": 0.98, "val": 0.02}, by the hash of the keys.
        only: The parts to keep, such as ["jpg", "txt"]. Default: all.
        keys: The keys of the samples to keep. Default: all.
        reshard: Write the samples of tars into new shards. It is required for tars, which need no conversion.
        unpacked_bytes: The most decompressed bytes of a shard, chunk, record, JSON array or line.
        workers: Processes that write; with `engine="ray"` the most tasks at a time. Default: one per core, but one for
            less than 100 MB.
        engine: "ray" for the nodes of a Ray cluster, which share storage with this machine. Default: processes of this
            machine.
        progress: Called with the samples done, all of them, and the bytes done.

    Returns:
        A report. The output is `samples`, `shards` and `size` in bytes. Skipped are `rejected`, each with `file`,
        `key`, `reason` and `detail`, and `hidden`, the number of hidden files and folders. `warnings` are strings,
        `nulls` has by column the number of rows without a value, and `already` says whether everything existed earlier.

    Raises:
        ValueError: A setting is wrong, or the source cannot be converted.
        SavableError: `target` has anything but this conversion, its disk is full, or the source changed in the
            meantime.
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
        file_fields=_as_tuple("file_fields", file_fields),
        split=tuple((name, _as_decimal(fraction)) for name, fraction in (split or {}).items()),
        only=_as_tuple("only", only) or (),
        unpacked_bytes=unpacked_bytes,
    )
    files = find_files(source, format)
    with _engine_of(engine, workers) as cluster:
        return run_conversion(
            files,
            target if isinstance(target, str) else Path(target),
            options,
            files_from=None if files_from is None else Path(files_from),
            keys=_as_tuple("keys", keys),
            reshard=reshard,
            workers=workers,
            engine=cluster,
            progress=progress or (lambda done, total, size: None),
        )


def _as_tuple(name: str, values: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the values of the argument `name` as a tuple. Raises ValueError for a str, which is no list."""
    if isinstance(values, str):
        raise ValueError(f"{name} must be a list, not a str. Pass [{values!r}]")
    found = None if values is None else tuple(values)
    if name == "only" and found == ():
        raise ValueError("only= names no part. Pass extensions, such as jpg and txt, or None for all")
    return found


def _as_decimal(fraction: float | str) -> str:
    """Return a fraction as `Options.split` has it: 0.00001, never 1e-05."""
    return fraction if isinstance(fraction, str) else f"{Decimal(str(fraction)):f}"


def _engine_of(
    engine: Literal["ray"] | Engine | None, workers: int | None
) -> contextlib.AbstractContextManager[Engine | None]:
    """Return a context with the engine, or with None for processes of this machine."""
    if not isinstance(engine, str):
        return contextlib.nullcontext(engine)
    if engine != "ray":
        raise ValueError(f'engine must be "ray", or None for processes of this machine, not {engine!r}')
    from savable_pipeline.tools.convert.ray_engine import RayEngine  # Ray is only needed if it is requested

    return RayEngine(workers)


SampleProgress: TypeAlias = Callable[[int, int, int], None]  # samples done, all samples, bytes done
_ALONE_BYTES = 100_000_000  # one process converts so many bytes before others would have started


def run_conversion(
    source: Path | str | SourceFiles,
    target: Path | str,
    options: Options,
    *,
    files_from: Path | None = None,
    keys: Iterable[str] | None = None,
    reshard: bool = False,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: SampleProgress = lambda done, total, size: None,
) -> Report:
    """Write the samples of a source as shards; see `convert`.

    Raises ValueError for a wrong source or setting, `SavableError` if `target` has another conversion or its disk is
    full, OSError for files that cannot be read or written, `RemoteError` for a bucket or a web server.
    """
    source = source if isinstance(source, SourceFiles) else find_files(source)
    with target_at(target) as output:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be 1 or more, not {workers}")
        if engine is not None:  # the machines of an engine have other current folders
            output = replace(output, folder=output.folder.absolute())
        _check_source(source, output.folder if output.bucket is None else output.bucket.url, reshard)
        _reject_other_shards(output)
        chosen = None if keys is None else frozenset(keys)
        if chosen is not None and not chosen:
            raise ValueError("keys= is empty. Name the samples to take, or pass None for all")
        with room_on(output.folder), _work_in(output):
            prepared = prepare_source(source, options, files_from, output, chosen)
            manifest, newest_ns = manifest_of(prepared, options, chosen)
            earlier = read_manifest(output.folder)
            jobs = _jobs(output, prepared, options, chosen)
            workers = workers or (1 if prepared.size < _ALONE_BYTES else os.cpu_count() or 1)

            def do(jobs: list[RangeJob]) -> set[str]:
                return do_jobs(jobs, output.work, workers, engine, progress)

            report = None if earlier is None else _resumed(output, manifest, earlier, newest_ns, jobs, do)
            if report is None:
                write_manifest(output.folder, manifest)
                output.start_again()
                do(jobs)
                jobs = jobs_with_repeats(jobs)
                do(jobs)
                report = finish(output, prepared, options, jobs, manifest)
        return report


def _check_source(source: SourceFiles, target: Path | str, reshard: bool) -> None:
    """Raise ValueError for tars without `reshard`, other formats with it, and a target in the source or around it."""
    if source.form == TARS and not source.packed and not reshard:  # packed: compressed as a whole
        raise ValueError(
            f'{source.path}: tars need no conversion. Read them by sp.read("{source.path}"), or pass '
            "--reshard for other sizes, parts, keys or splits"
        )
    if reshard and source.form != TARS:
        raise ValueError(f"{source.path} has the {source.words}: --reshard is only for tars")  # words: "format csv"
    if "://" in source.path and isinstance(target, str):
        inner, outer = f"{source.path.rstrip('/')}/", f"{target.rstrip('/')}/"
        if inner.startswith(outer) or outer.startswith(inner):
            raise ValueError(f"{target} and {source.path} must not contain each other. Convert to another URL")
    elif "://" not in source.path and not isinstance(target, str):
        first, second = Path(source.path).resolve(), target.resolve()
        if first.is_dir() and (first == second or second in first.parents or first in second.parents):
            raise ValueError(f"{target} and {source.path} must not contain each other. Convert into another folder")


@contextlib.contextmanager
def _work_in(output: Target) -> Iterator[None]:
    """Yield the work folder for one conversion at a time. Remove it if nothing was finished in it."""
    folder, work = output.folder, output.work
    existed, is_new = folder.exists(), not (folder / META).exists()
    (folder / META).mkdir(parents=True, exist_ok=True)
    with claimed(folder / META, work):
        try:
            yield
        except BaseException as error:
            if isinstance(error, ValueError) or not any(work.glob(f"*/{RECORD_FILE}")):
                shutil.rmtree(folder / META if is_new else work)
                if not existed:
                    folder.rmdir()
            raise
        finally:
            close_all()
        shutil.rmtree(work)


def _jobs(output: Target, prepared: Prepared, options: Options, keys: frozenset[str] | None) -> list[RangeJob]:
    """Return a job for each range."""
    job = RangeJob(
        name="", source=prepared.source, spans=(), options=options, work=output.work, keys=keys, bucket=output.bucket
    )
    return [replace(job, name=f"{number:06d}", spans=spans) for number, spans in enumerate(prepared.ranges)]


def _resumed(
    output: Target,
    manifest: Manifest,
    earlier: Manifest,
    newest_ns: int,
    jobs: list[RangeJob],
    do: Callable[[list[RangeJob]], set[str]],
) -> Report | None:
    """Return the report of the conversion in this folder, or None if it is not finished.

    Files that may have been written since it started are compared with what it converted. `do` does jobs, and returns
    the names of files that differ. Raises `SavableError` if the folder has another conversion.
    """
    if output.bucket is None or earlier.done:  # otherwise an unfinished conversion starts again
        check_same(output.folder, manifest, earlier)
    report = finished_report(output, earlier)
    if may_have_changed(output.folder, manifest, earlier, newest_ns):
        starts = itertools.accumulate((8 * count for count in earlier.hashes), initial=0)  # in bytes
        known: Iterable[Hashes | None] = map(Hashes, itertools.repeat(output.folder / HASHES), starts, earlier.hashes)
        if report is None:
            known = (job.content_hashes() if job.is_finished and job.bucket is None else None for job in jobs)
        compared = [replace(job, hashes=hashes) for job, hashes in zip(jobs, known, strict=True) if hashes is not None]
        if changed := sorted(do(compared)):
            raise changed_files(output.folder, manifest, earlier, changed)
        if report is not None:
            same = msgspec.structs.replace(earlier, versions=manifest.versions, source_id=manifest.source_id)
            write_manifest(output.folder, same)
    return report


def _reject_other_shards(output: Target) -> None:
    """Raise `SavableError` for shards that `savable convert` did not write."""
    folder = output.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Give a folder, or a name for a new one")
    if (folder / MANIFEST).exists():
        return
    paths = [*folder.rglob("*.tar"), *folder.glob(f"{META}/.info.*")]
    for name in [*(path.relative_to(folder).as_posix() for path in paths), *output.objects]:
        if (name.endswith(".tar") or name.startswith(f"{META}/.info.")) and WORK not in name:
            raise SavableError(f"{folder} has {Path(name).name} of another origin. Convert into another folder")
