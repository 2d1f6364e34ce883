"""The commands on a dataset, `savable info`, `index`, `check` and `preview`, and what they print."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.table import Table

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.wording import clean_address, counted, human_bytes
from savable_pipeline.tools.cli.console import (
    ClassesOption,
    FileFieldOption,
    FilesFromOption,
    KeyEndOption,
    KeyFieldOption,
    check_output,
    err,
    errors_as_lines,
    out,
    print_counts,
    print_warnings,
    printable,
    progress_of,
)
from savable_pipeline.tools.cli.convert_command import EngineOption, engine_named

if TYPE_CHECKING:  # a command imports what it needs when it is called
    from savable_pipeline.data.dataset.info import Info
    from savable_pipeline.data.dataset.media_indexing import MediaFaults
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.tools.check.dataset_check import CheckReport
    from savable_pipeline.tools.check.file_check import Problem

_NAMED = 3  # problems that are like the first of them
PathArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", help="Folder, glob, brace pattern, one file, or a URL.")
]
SourceArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="PATH|PIPELINE", help="Shards, also behind a URL, or a pipeline function: module:name or file.py:name."
    ),
]
ColumnsOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Parquet, Arrow: these columns alone: image,caption.")
]


def _settings(
    key_end: str | None,
    classes: bool,
    key_field: str | None,
    columns: str | None,
    file_field: list[str] | None,
    files_from: Path | None,
) -> dict[str, Any]:
    """The settings of a store that these options are, as `sp.open_dataset` takes them; None where one is not given."""
    if key_end not in ("first", "last", None):
        raise ValueError(f"key_end must be 'first' or 'last', not {key_end!r}")
    return {
        "key_end": key_end,
        "classes": classes or None,
        "key": key_field,
        "columns": None if columns is None else tuple(columns.split(",")),
        "file_fields": None if file_field is None else tuple(file_field),
        "files_from": None if files_from is None else str(files_from.absolute()),
    }


def info(
    path: PathArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    key_field: KeyFieldOption = None,
    columns: ColumnsOption = None,
    file_field: FileFieldOption = None,
    files_from: FilesFromOption = None,
) -> None:
    """Show what a dataset holds: shards, samples, parts and their sizes, splits."""
    from savable_pipeline.data.dataset.info import dataset_info

    with errors_as_lines():
        settings = _settings(key_end, classes, key_field, columns, file_field, files_from)
        _print_info(path, dataset_info(path, **settings), as_json=as_json)


def _print_info(path: str, info: Info, *, as_json: bool) -> None:
    """The dataset at `path` in tables, or as one JSON object."""
    if as_json:
        out.print(json.dumps(_info_object(info), indent=2), markup=False)
        return
    smallest, largest = _extremes(info)
    facts = Table("", "", show_header=False, box=None)
    facts.add_row("dataset", printable(clean_address(path)))
    facts.add_row("shards", f"{len(info.shards):,}")
    facts.add_row("samples", f"{info.samples:,}")
    facts.add_row("size", human_bytes(info.size))
    facts.add_row("smallest shard", _shard_text(smallest))
    facts.add_row("largest shard", _shard_text(largest))
    for split, count in info.splits.items():
        facts.add_row(f"split {printable(split)}", f"{counted(count, 'sample')}")
    first = ", ".join(f"{extension} {human_bytes(size)}" for extension, size in info.first_parts.items())
    facts.add_row("first sample", printable(f"{info.first_key}: {first}"))
    out.print(facts)
    some = "" if info.looked_at == info.samples else f" (of {info.looked_at:,} looked at)"
    parts = Table("part", f"samples{some}", "mean size")
    for extension, part in info.parts.items():
        parts.add_row(printable(extension), f"{part.samples:,}", human_bytes(part.mean))
    out.print(parts)
    if info.media:
        media = Table("media", "parts", "hours", "size", "fps", "rate", "cannot be read")
        for extension, found in info.media.items():
            hours, broken = f"{found.hours:,.2f}" if found.hours else "", f"{found.broken:,}" if found.broken else ""
            media.add_row(printable(extension), f"{found.parts:,}", hours, found.size, found.fps, found.rate, broken)
        out.print(media)
    print_counts(out, "null", info.nulls, some)
    print_counts(out, "empty", {extension: part.empty for extension, part in info.parts.items()}, some)
    print_warnings(out, info.warnings)


def _extremes(info: Info) -> tuple[ShardEntry, ShardEntry]:
    return min(info.shards, key=lambda e: (e.size, e.name)), max(info.shards, key=lambda e: (e.size, e.name))


def _shard_text(entry: ShardEntry) -> str:
    return printable(f"{entry.name}: {counted(entry.samples, 'sample')}, {human_bytes(entry.size)}")


def _info_object(info: Info) -> dict[str, object]:
    smallest, largest = _extremes(info)
    return {
        "root": info.root,
        "shards": len(info.shards),
        "samples": info.samples,
        "bytes": info.size,
        "samples_looked_at": info.looked_at,
        "smallest_shard": {"name": smallest.name, "samples": smallest.samples, "bytes": smallest.size},
        "largest_shard": {"name": largest.name, "samples": largest.samples, "bytes": largest.size},
        "warnings": info.warnings,
        "parts": {e: {"samples": part.samples, "mean_bytes": part.mean} for e, part in info.parts.items()},
        "empty": {e: part.empty for e, part in info.parts.items() if part.empty},
        "nulls": info.nulls,
        "media": {extension: asdict(found) for extension, found in info.media.items()},
        "first_sample": {"key": info.first_key, "parts": info.first_parts},
        "splits": info.splits,
    }


def index(
    path: PathArgument,
    workers: Annotated[int | None, typer.Option(help="Processes that read. Default: one per core.")] = None,
    engine: EngineOption = "local",
    media: Annotated[
        bool, typer.Option("--media", help="Also store length and size of audio, video and images, by their headers.")
    ] = False,
) -> None:
    """Index the shards of a dataset, so that the first run starts at once.

    The index is written beside the shards, or to the cache if their folder is read-only. Shards whose index is up to
    date are not read again. Shards that cannot be read to the end are listed; the exit code is then 1.

    Tars behind a URL are downloaded once, unless they have an index already; so are JSONL files, and of others only
    what the index needs. The index is written to the cache (SAVABLE_CACHE). Upload it beside the shards, as
    .nv-meta/savable.index (of Parquet .nv-meta/savable.parquet.index, and so on), and no other node does it again.

    What the parts of sp.ShardWriter wrote is joined, without reading the shards again.

    With --engine ray the nodes of a Ray cluster read, each shard a task. PATH must be storage that all nodes share, or
    a URL: then each node downloads what it reads, and keeps none of it.

    With --media the headers of all audio, video and images are read too, and what they say is stored beside the index,
    for `sample.media()`. Parts whose headers cannot be read are listed; the exit code is then 1.
    """
    from savable_pipeline.data.dataset.media_indexing import refuse_remote
    from savable_pipeline.data.dataset.opening import index_any
    from savable_pipeline.data.shards.metadata import unfinished
    from savable_pipeline.tools.convert.describe import describe_indexed, is_written

    with errors_as_lines():
        if media:
            refuse_remote(path)
        with engine_named(engine, workers) as cluster, progress_of(err, "indexing", "shards") as progress:
            index_path, faults = index_any(path, processes=workers, engine=cluster, progress=progress)
            if is_written(Path(path)) and not faults:
                describe_indexed(Path(path), index_path)
        _print_index(index_path, faults)
        if text := unfinished(Path(path)):
            err.print(printable(f"warning: {text}"))
        broken = media and _index_media(path, workers)
    if faults or broken:
        raise typer.Exit(1)


def _index_media(path: str, workers: int | None) -> bool:
    """Make the table of media; whether some could not be read."""
    from savable_pipeline.data.dataset.media_indexing import index_media

    with progress_of(err, "reading headers", "shards") as progress:
        index_path, faults = index_media(path, processes=workers, progress=progress)
    _print_media_table(index_path, faults)
    return bool(faults.count)


def _print_index(index_path: Path, entries: list[ShardEntry]) -> None:
    """Where the index is, and the shards that could not be read to the end."""
    out.print(printable(f"index: {index_path}"))
    for entry in entries:
        out.print(printable(f"{entry.fault} ({counted(entry.samples, 'sample')} before it)"))


def _print_media_table(index_path: Path, faults: MediaFaults) -> None:
    """Where the table of media is, and the parts whose headers cannot be read."""
    out.print(printable(f"media table: {index_path}"))
    for message in faults.messages:
        out.print(printable(message))
    if faults.count > len(faults.messages):
        out.print(f"and {faults.count - len(faults.messages):,} more that cannot be read")


def check(
    path: PathArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that read. Default: one per core.")] = None,
    decode: Annotated[float, typer.Option(help="Share of the audio and video to decode, 0 to 1.")] = 1.0,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    key_field: KeyFieldOption = None,
    columns: ColumnsOption = None,
    file_field: FileFieldOption = None,
    files_from: FilesFromOption = None,
) -> None:
    """Read every byte of a dataset and list its faults: damaged tars, images, media, JSON and text, wrong indexes.

    Audio and video are decoded to their end: also found are times that go back, and media that end before their header
    says.

    Nothing is changed. The exit code is 1 if there is a fault. This also finds a shard that was rewritten with the same
    size after it was indexed. Shards behind a URL are downloaded one by one, and not kept.
    """
    from savable_pipeline.tools.check.dataset_check import check as check_dataset

    with errors_as_lines():
        settings = _settings(key_end, classes, key_field, columns, file_field, files_from)
        with progress_of(err, "checking", "shards") as progress:
            report = check_dataset(path, processes=workers, decode=decode, progress=progress, **settings)
        _print_check(report, as_json=as_json)
    if report.problems:
        raise typer.Exit(1)


def _print_check(report: CheckReport, *, as_json: bool) -> None:
    """The problems by reason, then one by one; or all as one JSON object."""
    if as_json:
        import msgspec

        out.print_json(msgspec.json.encode(report, enc_hook=str).decode(), highlight=False, ensure_ascii=True)
        return
    out.print(
        f"{counted(report.shards, 'shard')}, {counted(report.samples, 'sample')}, {human_bytes(report.size)}: "
        + (counted(len(report.problems), "problem") if report.problems else "nothing wrong")
    )
    print_counts(out, "null", report.nulls)
    print_counts(out, "empty", report.empty)
    if report.with_alpha:
        out.print(
            f"warning: {counted(report.with_alpha, 'image has', 'images have')} alpha: sample.image() lays them over "
            "white, or over its background="
        )
    print_warnings(out, report.warnings)
    for reason, count in Counter(problem.reason for problem in report.problems).most_common():
        out.print(f"  {count:>7,} × {printable(reason)}")
    for alike in _alike(report.problems):
        about = f"{where}: " if (where := _where(alike[0])) else ""  # else of the dataset
        more = ", ".join(_where(problem) for problem in alike[1 : 1 + _NAMED])
        more += f" and {len(alike) - 1 - _NAMED:,} more" if len(alike) > 1 + _NAMED else ""
        more = f" ({len(alike):,} times; also {more})" if more else ""
        out.print(printable(f"{about}{alike[0].reason}: {alike[0].detail}{more}"))


def _alike(problems: list[Problem]) -> list[list[Problem]]:
    """The problems that differ in nothing but in where they are, and in numbers, such as offsets, that say it."""
    found: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        found.setdefault((problem.reason, re.sub(r"[0-9]+", "0", problem.detail)), []).append(problem)
    return list(found.values())


def _where(problem: Problem) -> str:
    """The file and the sample, if it has them; a folder of files is one shard, "."."""
    names = [problem.shard * (problem.shard != "."), problem.key and f"{problem.key}.{problem.part}"]
    return " ".join(filter(None, names)) + ("" if problem.offset is None else f" at byte {problem.offset}")


def preview(
    source: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("preview.html"),
    samples: Annotated[int, typer.Option(help="Dataset: samples of a page, at most 500.")] = 24,
    pages: Annotated[
        int, typer.Option(help="Dataset: pages at most, linked to each other: preview.html, preview-2.html, …")
    ] = 1,
    part: Annotated[str, typer.Option(help="Dataset: only samples with such a part: mp4, or '*.jpg'.")] = "",
    key: Annotated[str, typer.Option(help="Dataset: only samples with such a key: 'cat*'.")] = "",
    batches: Annotated[int, typer.Option(help="Pipeline: batches to show.")] = 3,
    seed: Annotated[int, typer.Option(help="Dataset: the seed that draws samples. Pipeline: the seed of the run.")] = 0,
    lane: Annotated[int, typer.Option(help="Pipeline: the lane whose batches are shown.")] = 0,
    lanes: Annotated[int, typer.Option(help="Pipeline: the number of lanes of the run.")] = 1,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    key_field: KeyFieldOption = None,
    columns: ColumnsOption = None,
    file_field: FileFieldOption = None,
    files_from: FilesFromOption = None,
) -> None:
    """Write an HTML page that shows the samples of a dataset, or the batches of a pipeline.

    Dataset: its numbers, and samples drawn from all shards, in the order of the dataset; --part and --key look at all
    samples first. Pipeline: the first batches of a lane, with images, tokens coloured by their loss, and the borders of
    packed documents. A page is one file without scripts. It is written, too, if a batch cannot be made; then the exit
    code is 1.
    """
    from savable_pipeline.core.named_object import names_object
    from savable_pipeline.tools.preview.dataset_page import SampleChoice, dataset_pages

    sizes, fault = [], ""
    with errors_as_lines():
        check_output(output)
        if names_object(source):
            page, fault = _pipeline_page(source, batches=batches, seed=seed, lane=lane, lanes=lanes)
            written = iter([(output.name, page)])
        else:
            choice = SampleChoice(samples, pages, seed, part, key)
            settings = _settings(key_end, classes, key_field, columns, file_field, files_from)
            written = dataset_pages(source, choice, output.name, **settings)
        for name, page in written:
            replace_file(output.with_name(name), [page])
            sizes.append(len(page))
    more = f" and {counted(len(sizes) - 1, 'page')} more" if len(sizes) > 1 else ""
    out.print(printable(f"{output}{more}: {human_bytes(sum(sizes))}"))
    if fault:
        err.print(f"[bold red]error:[/] a batch could not be made: {printable(fault)}")
        raise typer.Exit(1)


def _pipeline_page(source: str, **settings: int) -> tuple[bytes, str]:
    """The page of the pipeline of this name, and the error that ended its batches."""
    from savable_pipeline.stages.pipeline import named_pipeline
    from savable_pipeline.tools.preview.pipeline_page import preview_pipeline

    return preview_pipeline(named_pipeline(source), source, **settings)
