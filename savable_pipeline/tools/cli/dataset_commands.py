"""Commands on a dataset: `savable info`, `index`, `check` and `preview`."""

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
from savable_pipeline.core.named_object import names_object
from savable_pipeline.core.wording import clean_address, counted, human_bytes
from savable_pipeline.tools.cli.console import (
    ClassesOption,
    FileFieldOption,
    FilesFromOption,
    JsonOption,
    KeyEndOption,
    KeyFieldOption,
    WorkersOption,
    check_output,
    err,
    errors_as_lines,
    escape_markup,
    exit_failed,
    input_option,
    out,
    output_option,
    print_counts,
    print_warnings,
    progress_shown,
)
from savable_pipeline.tools.cli.convert_command import EngineOption, engine_named

if TYPE_CHECKING:  # a command imports what it needs when it is called
    from savable_pipeline.data.dataset.info import Info
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.tools.check.dataset_check import CheckReport
    from savable_pipeline.tools.check.file_check import Problem

_MOST_LOCATIONS = 3  # most locations that are listed for further problems of the same kind
PathArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", help="A folder, file, glob, brace pattern or URL.")
]
SourceArgument: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="PATH|PIPELINE", help="A dataset as for info, or a pipeline: file.py:name or module:name."),
]
ColumnsOption: TypeAlias = Annotated[
    str | None, input_option(metavar="NAMES", help="Tables: only these columns, such as image,txt.")
]


def _open_settings(
    key_end: str | None,
    classes: bool,
    key_field: str | None,
    columns: str | None,
    file_field: list[str] | None,
    files_from: Path | None,
) -> dict[str, Any]:
    """Return the arguments of `sp.open_dataset` for these options. An option that is not used has None."""
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
    as_json: JsonOption = False,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    key_field: KeyFieldOption = None,
    columns: ColumnsOption = None,
    file_field: FileFieldOption = None,
    files_from: FilesFromOption = None,
) -> None:
    """Show the samples, parts and splits of a dataset."""
    from savable_pipeline.data.dataset.info import dataset_info

    with errors_as_lines():
        settings = _open_settings(key_end, classes, key_field, columns, file_field, files_from)
        _print_info(path, dataset_info(path, **settings), as_json=as_json)


def _print_info(path: str, info: Info, *, as_json: bool) -> None:
    """Print facts about the dataset at `path`, in tables or as one JSON object."""
    if as_json:
        out.print(json.dumps(_info_json(info), indent=2), markup=False)
        return
    out.print(escape_markup(f"{clean_address(path)}: {_size_text(len(info.shards), info.samples, info.size)}"))
    facts = Table("", "", show_header=False, box=None)
    if len(info.shards) > 1:
        smallest, largest = _smallest_and_largest(info)
        facts.add_row("smallest shard", _shard_text(smallest))
        facts.add_row("largest shard", _shard_text(largest))
    for split, count in info.splits.items():
        facts.add_row(f"split {escape_markup(split)}", f"{counted(count, 'sample')}")
    first = ", ".join(f"{extension} {human_bytes(size)}" for extension, size in info.first_parts.items())
    facts.add_row("first sample", escape_markup(f"{info.first_key}: {first}"))
    out.print(facts)
    scope = "" if info.examined == info.samples else f" (of {info.examined:,} looked at)"
    parts = Table("part", f"samples{scope}", "mean size")
    for extension, part in info.parts.items():
        parts.add_row(escape_markup(extension), f"{part.samples:,}", human_bytes(part.mean))
    out.print(parts)
    if info.media:
        media = Table("media", "parts", "hours", "size", "fps", "rate", "cannot be read")
        for extension, part_media in info.media.items():
            hours = f"{part_media.hours:,.2f}" if part_media.hours else ""
            broken = f"{part_media.broken:,}" if part_media.broken else ""
            shown = part_media.size, part_media.fps, part_media.rate, broken
            media.add_row(escape_markup(extension), f"{part_media.parts:,}", hours, *shown)
        out.print(media)
    print_counts(out, "null", info.nulls, scope)
    print_counts(out, "empty", {extension: part.empty for extension, part in info.parts.items()}, scope)
    print_warnings(out, info.warnings)


def _size_text(shards: int, samples: int, size: int) -> str:
    """Format sizes: `7 samples (3 shards, 30.7 kB)`. A single shard is not mentioned."""
    return f"{counted(samples, 'sample')} ({f'{shards:,} shards, ' * (shards > 1)}{human_bytes(size)})"


def _smallest_and_largest(info: Info) -> tuple[ShardEntry, ShardEntry]:
    """Return the smallest and the largest shard."""
    by_size = sorted(info.shards, key=lambda entry: (entry.size, entry.name))
    return by_size[0], by_size[-1]


def _shard_text(entry: ShardEntry) -> str:
    """Format a shard: `000000.tar: 7 samples, 30.7 kB`."""
    return escape_markup(f"{entry.name}: {counted(entry.samples, 'sample')}, {human_bytes(entry.size)}")


def _info_json(info: Info) -> dict[str, object]:
    """Return the facts about a dataset as JSON."""
    smallest, largest = _smallest_and_largest(info)
    return {
        "root": info.root,
        "shards": len(info.shards),
        "samples": info.samples,
        "bytes": info.size,
        "samples_looked_at": info.examined,
        "smallest_shard": {"name": smallest.name, "samples": smallest.samples, "bytes": smallest.size},
        "largest_shard": {"name": largest.name, "samples": largest.samples, "bytes": largest.size},
        "warnings": info.warnings,
        "parts": {name: {"samples": part.samples, "mean_bytes": part.mean} for name, part in info.parts.items()},
        "empty": {name: part.empty for name, part in info.parts.items() if part.empty},
        "nulls": info.nulls,
        "media": {extension: asdict(found) for extension, found in info.media.items()},
        "first_sample": {"key": info.first_key, "parts": info.first_parts},
        "splits": info.splits,
    }


def index(
    path: PathArgument,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    media: Annotated[bool, input_option("--media", help="Also read the headers of audio, video and images.")] = False,
) -> None:
    """Index the shards of a dataset before a run.

    The index of shards and tables is written beside them. That of other files, read-only or remote data is in your
    cache. Shards whose index is up to date are skipped. The exit code is 1 if a shard or a header cannot be read.
    """
    from savable_pipeline.data.dataset.media_indexing import reject_remote
    from savable_pipeline.data.shards.metadata import WRITTEN, unfinished
    from savable_pipeline.data.stores.opening import index_any
    from savable_pipeline.tools.convert.describe import write_energon_files

    with errors_as_lines():
        if media:
            reject_remote(path)
        with engine_named(engine, workers) as cluster, progress_shown(err, "indexing", "shards") as progress:
            index_path, faults = index_any(path, processes=workers, engine=cluster, progress=progress)
            if (Path(path) / WRITTEN).is_dir() and not faults:
                write_energon_files(Path(path), index_path)
        out.print(escape_markup(f"index: {index_path}"))
        for entry in faults:
            out.print(escape_markup(f"{entry.fault} ({counted(entry.samples, 'sample')} before it)"))
        if text := unfinished(Path(path)):
            err.print(escape_markup(f"warning: {text}"))
        broken = _index_media(path, workers) if media else 0
    counts = (len(faults), "damaged shard"), (broken, "unreadable header")
    if reasons := [counted(count, word) for count, word in counts if count]:
        exit_failed(" and ".join(reasons))


def _index_media(path: str, workers: int | None) -> int:
    """Write the table of media, and print its path and unreadable headers. Returns the number of these."""
    from savable_pipeline.data.dataset.media_indexing import index_media

    with progress_shown(err, "reading headers", "shards") as progress:
        index_path, faults = index_media(path, processes=workers, progress=progress)
    out.print(escape_markup(f"media table: {index_path}"))
    for message in faults.messages:
        out.print(escape_markup(message))
    if faults.count > len(faults.messages):
        out.print(f"and {faults.count - len(faults.messages):,} more that cannot be read")
    return faults.count


def check(
    path: PathArgument,
    as_json: JsonOption = False,
    workers: WorkersOption = None,
    decode: Annotated[float, input_option(help="The fraction of audio and video to decode.")] = 1.0,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    key_field: KeyFieldOption = None,
    columns: ColumnsOption = None,
    file_field: FileFieldOption = None,
    files_from: FilesFromOption = None,
) -> None:
    """Read a whole dataset and list what cannot be read.

    Nothing is changed. Audio and video are decoded to their end. The exit code is 1 if there is a problem.
    """
    from savable_pipeline.tools.check.dataset_check import check_dataset

    with errors_as_lines():
        settings = _open_settings(key_end, classes, key_field, columns, file_field, files_from)
        with progress_shown(err, "checking", "shards") as progress:
            report = check_dataset(path, processes=workers, decode=decode, progress=progress, **settings)
        _print_check(report, as_json=as_json)
    if report.problems:
        exit_failed(counted(len(report.problems), "problem"), as_json=as_json)


def _print_check(report: CheckReport, *, as_json: bool) -> None:
    """Print problems by reason and then one by one, or all as one JSON object."""
    if as_json:
        import msgspec

        out.print_json(msgspec.json.encode(report, enc_hook=str).decode(), highlight=False, ensure_ascii=True)
        return
    verdict = counted(len(report.problems), "problem") if report.problems else "no problem"
    out.print(f"{verdict} found in {_size_text(report.shards, report.samples, report.size)}")
    print_counts(out, "null", report.nulls)
    print_counts(out, "empty", report.empty)
    if report.with_alpha:
        out.print(
            f"warning: {counted(report.with_alpha, 'image has', 'images have')} alpha: sample.image() lays them over "
            "white, or over its background="
        )
    print_warnings(out, report.warnings)
    reasons = Counter(problem.reason for problem in report.problems).most_common()
    for reason, count in reasons if len(reasons) > 1 else ():
        out.print(f"  {count:>7,} × {escape_markup(reason)}")
    for first, *others in _group_alike(report.problems):
        location = _location(first)  # "" for a problem of the whole dataset
        is_in_detail = f"{first.reason}:" in first.detail  # as in an error of a table
        text = first.detail if is_in_detail else f"{first.reason}: {first.detail}".removesuffix(": ")
        also = ", ".join(_location(problem) for problem in others[:_MOST_LOCATIONS])
        also += f" and {len(others) - _MOST_LOCATIONS:,} more" if len(others) > _MOST_LOCATIONS else ""
        repeats = f" ({1 + len(others):,} times; also {also})" if also else ""
        out.print(escape_markup(f"{location}: {text}{repeats}" if location else f"{text}{repeats}"))


def _group_alike(problems: list[Problem]) -> list[list[Problem]]:
    """Group problems that differ only in their location and in numbers, such as offsets."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.reason, re.sub(r"[0-9]+", "0", problem.detail)), []).append(problem)
    return list(groups.values())


def _location(problem: Problem) -> str:
    """Format the shard, the part of a sample and the byte offset of a problem, as far as it has them."""
    shard = "" if problem.shard == "." else problem.shard  # the shard of a folder of files is "."
    names = [shard, problem.key and f"{problem.key}.{problem.part}".removesuffix(".")]
    return " ".join(filter(None, names)) + ("" if problem.offset is None else f" at byte {problem.offset}")


def preview(
    source: SourceArgument,
    output: Annotated[Path, output_option("--output", "-o", help="The page to write.")] = Path("preview.html"),
    samples: Annotated[int, output_option(help="Dataset: samples per page, at most 500.")] = 24,
    pages: Annotated[int, output_option(help="Dataset: linked pages at most.")] = 1,
    part: Annotated[str, input_option(help="Dataset: only samples with this part.")] = "",
    key: Annotated[str, input_option(help="Dataset: only samples with this key: 'cat*'.")] = "",
    batches: Annotated[int, output_option(help="Pipeline: batches to show.")] = 3,
    seed: Annotated[int, input_option(help="The seed of the choice or of the run.")] = 0,
    lane: Annotated[int, input_option(help="Pipeline: the lane to show.")] = 0,
    lanes: Annotated[int, input_option(help="Pipeline: the number of lanes.")] = 1,
    key_end: KeyEndOption = None,
    classes: ClassesOption = False,
    key_field: KeyFieldOption = None,
    columns: ColumnsOption = None,
    file_field: FileFieldOption = None,
    files_from: FilesFromOption = None,
) -> None:
    """Write an HTML page of samples or of batches.

    Of a dataset, the page shows its numbers and a choice of samples. Of a pipeline, it shows the first batches of a
    lane. The page is one file without scripts. The exit code is 1 if a batch cannot be built.
    """
    from savable_pipeline.tools.preview.dataset_page import SampleChoice, dataset_pages

    sizes = []
    fault = ""  # the error of a pipeline's batch
    with errors_as_lines():
        check_output(output)
        if names_object(source):
            from savable_pipeline.stages.pipeline import named_pipeline
            from savable_pipeline.tools.preview.pipeline_page import preview_pipeline

            pipeline = named_pipeline(source)
            page, fault = preview_pipeline(pipeline, source, batches=batches, seed=seed, lane=lane, lanes=lanes)
            named_pages = iter([(output.name, page)])
        else:
            settings = _open_settings(key_end, classes, key_field, columns, file_field, files_from)
            named_pages = dataset_pages(source, SampleChoice(samples, pages, seed, part, key), output.name, **settings)
        for name, page in named_pages:
            replace_file(output.with_name(name), [page])
            sizes.append(len(page))
    more = f" and {counted(len(sizes) - 1, 'page')} more" if len(sizes) > 1 else ""
    out.print(escape_markup(f"{output}{more}: {human_bytes(sum(sizes))}"))
    if fault:
        err.print(f"[bold red]error:[/] a batch could not be built: {escape_markup(fault)}")
        raise typer.Exit(1)
