"""`savable convert`, its output, and the option `--engine`."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.cli.console import (
    ClassesFromOption,
    ClassesOption,
    FileFieldOption,
    FilesFromOption,
    KeyEndOption,
    KeyFieldOption,
    WorkersOption,
    byte_count,
    err,
    errors_as_lines,
    escape_markup,
    exit_failed,
    input_option,
    out,
    output_option,
    parallel_option,
    print_counts,
    print_warnings,
    progress_shown,
)

if TYPE_CHECKING:
    from savable_pipeline.core.job_engine import Engine
    from savable_pipeline.tools.convert import Report


def convert_source(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder of files, a table, records, tars, or a URL of some.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="The folder for the shards, or its URL: s3://, gs://, az://.")
    ],
    format: Annotated[str | None, input_option(help="The format of SRC, such as folder or jsonl.")] = None,
    only: Annotated[str | None, input_option(metavar="PARTS", help="Only these parts, such as jpg,txt.")] = None,
    keys: Annotated[Path | None, input_option(help="A file of keys: only their samples.")] = None,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    classes_from: ClassesFromOption = None,
    key_field: KeyFieldOption = None,
    file_field: FileFieldOption = None,
    no_files: Annotated[bool, input_option("--no-files", help="Records: no field names a file.")] = False,
    files_from: FilesFromOption = None,
    allow_outside: Annotated[bool, input_option("--allow-outside", help="Also read linked files outside SRC.")] = False,
    no_check_images: Annotated[bool, input_option("--no-check-images", help="Do not decode images and media.")] = False,
    unpacked_bytes: Annotated[
        str, input_option(metavar="SIZE", help="Most bytes of a decompressed shard or record.")
    ] = "1GiB",
    shard_bytes: Annotated[str, output_option(metavar="SIZE", help="Most bytes in a shard.")] = "256MB",
    shard_samples: Annotated[int | None, output_option(help="Most samples in a shard.")] = None,
    split: Annotated[
        list[str] | None, output_option(metavar="NAME=FRACTION", help="A split by key hash (repeatable).")
    ] = None,
    reshard: Annotated[bool, output_option("--reshard", help="Tars: write new shards.")] = False,
    skip_bad: Annotated[bool, output_option("--skip-bad", help="Exit with 0 despite rejects.")] = False,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
) -> None:
    """Convert a dataset to WebDataset shards.

    Files of a folder that share a name up to its first dot are one sample, as are cat.jpg and cat.txt. Each record of
    a table or of JSON is one sample.

    Damaged samples are rejected and listed. The exit code is then 1, or 0 with --skip-bad. The same command continues
    a conversion that was interrupted.
    """
    from savable_pipeline.data.stores.folder_store import class_names
    from savable_pipeline.tools.convert import REJECTED, Options, find_files, run_conversion

    with errors_as_lines():
        options = Options(
            shard_bytes=byte_count(shard_bytes),
            shard_samples=shard_samples,
            check_images=not no_check_images,
            allow_outside=allow_outside,
            key_field=key_field,
            classes=tuple(class_names(classes_from)) if classes_from else classes,
            key_end=key_end,  # type: ignore[arg-type]  # Options checks it
            file_fields=_file_fields(no_files, file_field),
            split=tuple((name, fraction) for name, _, fraction in (text.partition("=") for text in split or ())),
            only=_parse_parts(only),
            unpacked_bytes=byte_count(unpacked_bytes),
        )
        files = find_files(source, format)
        err.print(escape_markup(f"reading {source}: {files.words}"))
        with (
            engine_named(engine, workers) as cluster,
            progress_shown(err, "reading", "samples", "converting") as progress,
        ):
            report = run_conversion(
                files,
                target,
                options,
                files_from=files_from,
                keys=None if keys is None else _read_keys(keys),
                reshard=reshard,
                workers=workers,
                engine=cluster,
                progress=progress,
            )
        print_report(out, report, f"{target.rstrip('/')}/{REJECTED}")
        if not report.samples:
            files_missing = files_from is None and {reject.reason for reject in report.rejected} == {"missing file"}
            hint = "--files-from FOLDER says where the files are; " if files_missing else ""
            advice = f"{hint}remove {target} before another try"
            raise ValueError(f"{target} has no shard: everything in {source} was rejected; {advice}")
    if report.rejected and not skip_bad:
        exit_failed(f"{len(report.rejected):,} rejected; --skip-bad accepts this")


def _file_fields(no_files: bool, named: list[str] | None) -> tuple[str, ...] | None:
    """Return the fields that name files, from the two options: () for none, and None for the default."""
    if no_files and named:
        raise ValueError("--no-files and --file-field exclude each other")
    return () if no_files else tuple(named) if named else None


def _parse_parts(text: str | None) -> tuple[str, ...]:
    """Split the names of parts in an option."""
    names = tuple(stripped for name in (text or "").split(",") if (stripped := name.strip()))
    if text is not None and not names:
        raise ValueError("--only names no part. Pass extensions, such as jpg,txt")
    return names


def _read_keys(path: Path) -> list[str]:
    """Read the keys of samples, one per line."""
    keys = [key for key in path.read_text().split("\n") if key]
    if not keys:
        raise ValueError(f"{path}: no key in it; expected the keys of samples, one a line")
    return keys


ENGINES = ("local", "ray")
EngineOption: TypeAlias = Annotated[
    str, parallel_option(metavar="|".join(ENGINES), help="Local processes or a Ray cluster.")
]


@contextlib.contextmanager
def engine_named(name: str, workers: int | None) -> Iterator[Engine | None]:
    """Yield the engine of this name, or None for local processes.

    It runs at most `workers` tasks at a time. Raises ValueError for an unknown name.
    """
    if name not in ENGINES:
        raise ValueError(f"--engine is one of {', '.join(ENGINES)}, not {name!r}")
    if name == "local":
        yield None
        return
    from savable_pipeline.tools.convert.ray_engine import RayEngine  # imported here, because only this option needs Ray

    with contextlib.redirect_stdout(sys.stderr), RayEngine(workers) as engine:  # Ray reports lost nodes on stdout
        yield engine


_MOST_SHOWN = 10  # rejects that are printed one by one


def print_report(console: Console, report: Report, path: str) -> None:
    """Print how much was written, and which samples were rejected and why.

    `path` is the file that lists all rejects.
    """
    if report.already:
        console.print("all is there already, nothing was written:")
    console.print(
        f"{counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}, {human_bytes(report.size)}"
    )
    if report.hidden:
        console.print(f"{counted(report.hidden, 'hidden file or folder', 'hidden files or folders')} skipped")
    print_warnings(console, report.warnings)
    print_counts(console, "null, and so no part", report.nulls)
    if not report.rejected:
        console.print("no sample rejected" if report.nulls else "nothing rejected")
        return
    console.print(f"{len(report.rejected):,} rejected:")
    for reason, count in Counter(reject.reason for reject in report.rejected).most_common():
        console.print(f"  {count:>7,} × {escape_markup(reason)}")
    for reject in report.rejected[:_MOST_SHOWN]:
        detail = f" ({reject.detail})" if reject.detail else ""
        console.print(escape_markup(f"  {reject.file}: {reject.reason}{detail}"))
    if len(report.rejected) > _MOST_SHOWN:
        console.print(f"  … {len(report.rejected) - _MOST_SHOWN:,} more")
    console.print(escape_markup(f"all of them: {path}"))
