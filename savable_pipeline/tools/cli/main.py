"""The command `savable`: one function for each subcommand, which calls the library and prints the result.

Results go to stdout, progress and errors to stderr. The exit code is 0 if all is well, 1 if the data or the run has a
fault, 2 if the command failed, 130 after Ctrl-C.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from savable_pipeline import __version__
from savable_pipeline.core.files import replace_file
from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.cli.console import check_output, err, errors_as_lines, out, printable, progress_of
from savable_pipeline.tools.cli.convert_command import EngineOption, convert, engine_named
from savable_pipeline.tools.cli.ledger_command import ledger_app
from savable_pipeline.tools.cli.output import (
    print_check,
    print_differences,
    print_index,
    print_info,
    print_media_table,
    print_state,
)
from savable_pipeline.tools.cli.plan_command import plan
from savable_pipeline.tools.cli.serve_command import serve
from savable_pipeline.tools.cli.verify_command import verify_resume

app = typer.Typer(
    help="Make and inspect datasets for savable_pipeline.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"savable_pipeline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Make and inspect datasets for savable_pipeline."""


app.command()(convert)
app.command()(plan)
app.command()(serve)
app.add_typer(ledger_app, name="ledger")
_Path = Annotated[str, typer.Argument(metavar="PATH", help="Folder, glob, brace pattern, one file, or a URL.")]
# Each command imports what it needs when it is called: `savable convert` starts without the loader and the downloader.


@app.command()
def info(
    path: _Path,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what a dataset holds: shards, samples, parts and their sizes, splits."""
    from savable_pipeline.data.dataset.info import dataset_info

    with errors_as_lines():
        print_info(out, dataset_info(path), as_json=as_json)


@app.command()
def index(
    path: _Path,
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
            place, faults = index_any(path, processes=workers, engine=cluster, progress=progress)
            if is_written(Path(path)) and not faults:
                describe_indexed(Path(path), place)
        print_index(out, place, faults)
        if text := unfinished(Path(path)):
            err.print(printable(f"warning: {text}"))
        broken = media and _index_media(path, workers)
    if faults or broken:
        raise typer.Exit(1)


def _index_media(path: str, workers: int | None) -> bool:
    """Make the table of media; whether some could not be read."""
    from savable_pipeline.data.dataset.media_indexing import index_media

    with progress_of(err, "reading headers", "shards") as progress:
        place, faults = index_media(path, processes=workers, progress=progress)
    print_media_table(out, place, faults)
    return bool(faults.count)


@app.command()
def check(
    path: _Path,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that read. Default: one per core.")] = None,
    decode: Annotated[float, typer.Option(help="Share of the audio and video to decode, 0 to 1.")] = 1.0,
) -> None:
    """Read every byte of a dataset and list its faults: damaged tars, images, media, JSON and text, wrong indexes.

    Audio and video are decoded to their end: also found are times that go back, and media that end before their header
    says.

    Nothing is changed. The exit code is 1 if there is a fault. This also finds a shard that was rewritten with the same
    size after it was indexed. Shards behind a URL are downloaded one by one, and not kept.
    """
    from savable_pipeline.tools.check.dataset_check import check as check_dataset

    with errors_as_lines():
        with progress_of(err, "checking", "shards") as progress:
            report = check_dataset(path, processes=workers, decode=decode, progress=progress)
        print_check(out, report, as_json=as_json)
    if report.problems:
        raise typer.Exit(1)


@app.command()
def preview(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH|PIPELINE",
            help="Shards, also behind a URL, or a pipeline function: module:name or file.py:name.",
        ),
    ],
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
) -> None:
    """Write an HTML page that shows the samples of a dataset, or the batches of a pipeline.

    Dataset: its numbers, and samples drawn from all shards, in the order of the dataset; --part and --key look at all
    samples first. Pipeline: the first batches of a lane, with images, tokens coloured by their loss, and the borders of
    packed documents. A page is one file without scripts. It is written, too, if a batch cannot be made; then the exit
    code is 1.
    """
    from savable_pipeline.core.named_object import names_object
    from savable_pipeline.tools.preview.chosen_samples import SampleChoice
    from savable_pipeline.tools.preview.dataset_page import dataset_pages

    size, count, fault = 0, 0, ""
    with errors_as_lines():
        check_output(output)
        if names_object(source):
            from savable_pipeline.stages.pipeline import named_pipeline
            from savable_pipeline.tools.preview.pipeline_page import preview_pipeline

            pipeline = named_pipeline(source)
            page, fault = preview_pipeline(pipeline, source, batches=batches, seed=seed, lane=lane, lanes=lanes)
            written = iter([(output.name, page)])
        else:
            written = dataset_pages(source, SampleChoice(samples, pages, seed, part, key), output.name)
        for name, page in written:
            replace_file(output.with_name(name), [page])
            size, count = size + len(page), count + 1
    more = f" and {counted(count - 1, 'page')} more" if count > 1 else ""
    out.print(printable(f"{output}{more}: {human_bytes(size)}"))
    if fault:
        err.print(f"[bold red]error:[/] a batch could not be made: {printable(fault)}")
        raise typer.Exit(1)


@app.command()
def state(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A state, or a checkpoint that holds one.")],
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="Another one to compare FILE with.")] = None,
) -> None:
    """Show where a saved run stands: its slot, and each lane's epoch, position, buffer, packs and random counters.

    With two files, show where they differ; the exit code is 1 if they do.
    """
    from savable_pipeline.run.state.summary import differences, read_checkpoint, summarize

    with errors_as_lines():
        summary = summarize(read_checkpoint(file))
        if other is None:
            print_state(out, summary, file.stat().st_size)
            return
        found = differences(summary, summarize(read_checkpoint(other)))
    print_differences(out, found, file.name, other.name)
    if found:
        raise typer.Exit(1)


app.command("verify-resume")(verify_resume)

if __name__ == "__main__":
    app()
