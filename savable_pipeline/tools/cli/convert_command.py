"""`savable convert`, what it prints, and the option `--engine`: the processes of this machine, or a cluster."""

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
    err,
    errors_as_lines,
    out,
    print_counts,
    print_warnings,
    printable,
    progress_of,
)
from savable_pipeline.tools.convert import WORDS

if TYPE_CHECKING:
    from savable_pipeline.core.job_engine import Engine
    from savable_pipeline.tools.convert import Report


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Folder of files, .jsonl, .json, .csv, MDS, LitData, Parquet, Arrow, or tars; or a URL of some.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="Folder for the shards; made if it is missing. Or a URL: s3://, gs://, az://."
        ),
    ],
    shard_bytes: Annotated[int, typer.Option(help="Most bytes in a shard.")] = 256_000_000,
    shard_samples: Annotated[int | None, typer.Option(help="Most samples in a shard.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that write. Default: one per core, but one for less than 100 MB.")
    ] = None,
    engine: EngineOption = "local",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Exit with 0 even if something was rejected.")] = False,
    check_images: Annotated[bool, typer.Option(help="Decode images, read headers of media; reject what fails.")] = True,
    allow_outside: Annotated[
        bool, typer.Option("--allow-outside", help="Also take files outside SRC that links or fields lead to.")
    ] = False,
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHARE", help="By the hash of the keys; repeatable: train=0.98, val=0.02."),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="PARTS", help="Keep these parts alone: jpg,txt.")] = None,
    keys: Annotated[Path | None, typer.Option(help="A text file: the keys of the samples to keep, one a line.")] = None,
    reshard: Annotated[bool, typer.Option("--reshard", help="Tars: write their samples into new shards.")] = False,
    unpacked_bytes: Annotated[
        int, typer.Option(help="Most bytes that a compressed shard, record, JSON array or line may become.")
    ] = 1 << 30,
    as_kind: Annotated[
        str | None, typer.Option("--as", metavar="KIND", help=f"Do not guess what SRC is: {', '.join(WORDS)}.")
    ] = None,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    classes_from: ClassesFromOption = None,
    key_field: KeyFieldOption = None,
    file_field: FileFieldOption = None,
    no_files: Annotated[bool, typer.Option("--no-files", help="JSONL, JSON, CSV: no field names a file.")] = False,
    files_from: FilesFromOption = None,
) -> None:
    """Write the samples of SRC as WebDataset shards into DST. SRC is recognized by its marks.

    In a folder, files that share a path up to the first dot of their name are one sample: cat.jpg, cat.txt;
    with --key-end last, up to the last.
    In .jsonl, .json and .csv each record is a sample: it becomes the part json, and the files that it names become the
    others. Tables and JSON may be compressed (.gz, .zst).
    In MDS and LitData each record is a sample: values become the part json, images and arrays parts of their own.
    In Parquet and Arrow, also as HF datasets writes them, each row is a sample; with --files-from FOLDER the files
    below it that rows name by a path are read.
    Tars are read as they are; --reshard writes other shards of them. Compressed tars become plain ones. Tars
    with links, which are no parts of samples, are not written anew: pack their files with tar --dereference.

    Damaged samples are left out and reported; the exit code is then 1, or 0 with --skip-bad. If a conversion was
    stopped, the same command goes on with it, and ends with the same bytes.

    SRC may lie behind a URL (s3, gs, az, http): JSONL, JSON and CSV, MDS and LitData, tars, Parquet and Arrow. It is
    read through the cache (SAVABLE_CACHE).

    With --engine ray the nodes of a Ray cluster write, each shard a task: the same bytes. SRC and DST must each be
    storage that all nodes share, or a URL; RAY_ADDRESS names the cluster, unless it runs on this machine too.
    """
    from savable_pipeline.data.stores.folder_store import class_names
    from savable_pipeline.tools.convert import REJECTED, Options, recognize, run_conversion
    from savable_pipeline.tools.convert.conversion import check_reshard

    with errors_as_lines():
        options = Options(
            shard_bytes=shard_bytes,
            shard_samples=shard_samples,
            check_images=check_images,
            allow_outside=allow_outside,
            key_field=key_field,
            classes=tuple(class_names(classes_from)) if classes_from else classes,
            key_end=key_end,  # type: ignore[arg-type]  # Options checks it
            file_fields=_file_fields(no_files, file_field),
            split=tuple(_share(share) for share in split or ()),
            only=_only(only),
            unpacked_bytes=unpacked_bytes,
        )
        found = recognize(source, as_kind)
        check_reshard(found, options, reshard, keys is not None)
        with (
            engine_named(engine, workers) as cluster,
            progress_of(err, f"reading {source}: {found.words}", "samples", "converting") as progress,
        ):
            report = run_conversion(
                found,
                target,
                options,
                files_from=files_from,
                keys=None if keys is None else _keys(keys),
                reshard=reshard,
                workers=workers,
                engine=cluster,
                progress=progress,
            )
        print_report(out, report, f"{target.rstrip('/')}/{REJECTED}")
        if not report.samples:
            lost = files_from is None and {reject.reason for reject in report.rejected} == {"missing file"}
            hint = "--files-from FOLDER says where the files are; " if lost else ""
            cure = f"{hint}remove {target} before another try"
            raise ValueError(f"{target} has no shard: everything in {source} was rejected; {cure}")
    if report.rejected and not skip_bad:
        raise typer.Exit(1)


def _file_fields(no_files: bool, named: list[str] | None) -> tuple[str, ...] | None:
    if no_files and named:
        raise ValueError("--no-files and --file-field exclude each other")
    return () if no_files else tuple(named) if named else None


def _share(text: str) -> tuple[str, str]:
    name, _, share = text.partition("=")
    return name, share


def _only(text: str | None) -> tuple[str, ...]:
    names = tuple(name for part in (text or "").split(",") if (name := part.strip()))
    if text is not None and not names:
        raise ValueError("--only names no part; expected extensions, such as jpg,txt")
    return names


def _keys(path: Path) -> list[str]:
    keys = [key for key in path.read_text().split("\n") if key]
    if not keys:
        raise ValueError(f"{path}: no key in it; expected the keys of samples, one a line")
    return keys


ENGINES = ("local", "ray")
EngineOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="|".join(ENGINES), help="Who does it: processes of this machine, or the nodes of a Ray cluster."
    ),
]


@contextlib.contextmanager
def engine_named(name: str, workers: int | None) -> Iterator[Engine | None]:
    """The engine of this name, with at most `workers` tasks at once; None for local processes. Raises ValueError."""
    if name not in ENGINES:
        raise ValueError(f"--engine is one of {', '.join(ENGINES)}, not {name!r}")
    if name == "local":
        yield None
        return
    from savable_pipeline.tools.convert.ray_engine import RayEngine  # only who asks for it needs Ray

    with contextlib.redirect_stdout(sys.stderr), RayEngine(workers) as engine:  # Ray tells on stdout of lost nodes
        yield engine


_SHOWN = 10  # rejects printed one by one; the file has all


def print_report(console: Console, report: Report, path: str) -> None:
    """How much was written, what was rejected, and why; `path` is the file with all rejects."""
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
    console.print(f"{len(report.rejected):,} rejected and left out:")
    for reason, count in Counter(reject.reason for reject in report.rejected).most_common():
        console.print(f"  {count:>7,} × {printable(reason)}")
    for reject in report.rejected[:_SHOWN]:
        detail = f" ({reject.detail})" if reject.detail else ""
        console.print(printable(f"  {reject.file}: {reject.reason}{detail}"))
    if len(report.rejected) > _SHOWN:
        console.print(f"  … {len(report.rejected) - _SHOWN:,} more")
    console.print(printable(f"all of them: {path}"))
