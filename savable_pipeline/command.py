"""The command `savable`: thin doors to the library, one function a command.

What a command was asked for goes to stdout, progress and errors to stderr. It exits with 0 if all is well,
1 if something was found wrong with the data, 2 if it could not do its work, 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from savable_pipeline.check import check as check_dataset
from savable_pipeline.command_output import (
    human_bytes,
    print_check,
    print_differences,
    print_index,
    print_info,
    print_report,
    print_state,
    progress_of,
)
from savable_pipeline.convert import REJECTED, Options
from savable_pipeline.convert import convert as convert_files
from savable_pipeline.convert.jsonl import FILE_FIELDS
from savable_pipeline.errors import SavableError
from savable_pipeline.indexing import index_shards
from savable_pipeline.info import dataset_info
from savable_pipeline.named_object import named_pipeline, names_object
from savable_pipeline.remote import is_remote
from savable_pipeline.remote_index import index_remote
from savable_pipeline.shard_index import replace_file
from savable_pipeline.state_summary import differences, read_checkpoint, summarize
from savable_pipeline.verify import Plan, verify
from savable_pipeline.verify_output import print_verdict

app = typer.Typer(
    help="Make and inspect datasets for savable_pipeline.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


@app.callback()
def _root() -> None:
    """Make and inspect datasets for savable_pipeline."""


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Tell the errors of the library, and Ctrl-C, in one line on stderr."""
    try:
        yield
    except (SavableError, ValueError, OSError) as error:
        line = " ".join(str(error).split())
        _err.print(f"[bold red]error:[/] {escape(line)}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _err.print("stopped")
        raise typer.Exit(130) from None


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of files, or a .jsonl file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder for the shards; made if it is missing.")],
    shard_bytes: Annotated[int, typer.Option(help="Longest a shard may grow, in bytes.")] = 256_000_000,
    shard_samples: Annotated[int | None, typer.Option(help="Most samples in a shard.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that write; by default one a processor, or one for little.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Exit with 0 even if something was rejected.")] = False,
    check_images: Annotated[bool, typer.Option(help="Decode each image once, and reject what fails.")] = True,
    allow_outside: Annotated[
        bool, typer.Option("--allow-outside", help="Take files outside SRC that links or fields lead to.")
    ] = False,
    key_field: Annotated[
        str | None, typer.Option(help="JSONL: the field with a sample's key; by default its line number.")
    ] = None,
    file_field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD[=PART]",
            help=f"JSONL: a field that names a file; repeatable. By default {', '.join(FILE_FIELDS)}.",
        ),
    ] = None,
    no_files: Annotated[bool, typer.Option("--no-files", help="JSONL: no field names a file.")] = False,
    files_from: Annotated[
        Path | None, typer.Option(help="JSONL: the folder of the files; by default where SRC lies.")
    ] = None,
) -> None:
    """Write the samples of SRC as WebDataset shards into DST.

    In a folder, files that share a path up to the first dot of their name are one sample: cat.jpg, cat.txt.
    In a .jsonl file each line is one, written as its json part beside the files that it names.
    Compressed tars (.tar.gz, .tgz, .tar.bz2, .tar.xz), alone or in a folder, are re-packed as plain ones.

    What is bad is left out and reported, and the exit code is 1, or 0 with --skip-bad. A conversion that was
    stopped goes on where it stopped when the same command is given again, and ends with the same bytes.
    """
    with errors_as_lines():
        if no_files and file_field:
            raise ValueError("--no-files and --file-field exclude each other")
        options = Options(
            shard_bytes=shard_bytes,
            shard_samples=shard_samples,
            check_images=check_images,
            allow_outside=allow_outside,
            key_field=key_field,
            file_fields=() if no_files else tuple(file_field) if file_field else None,
        )
        with progress_of(_err, f"reading {source}", "samples", "converting") as progress:
            report = convert_files(source, target, options, files_from=files_from, workers=workers, progress=progress)
        print_report(_out, report, target / REJECTED)
        if not report.samples:
            raise ValueError(f"{target} holds no shard: everything in {source} was rejected")
    if report.rejected and not skip_bad:
        raise typer.Exit(1)


@app.command()
def info(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder, glob, brace pattern, one tar, or a URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Say what a dataset holds: shards, samples, parts and their sizes, splits."""
    with errors_as_lines():
        print_info(_out, dataset_info(path), as_json=as_json)


@app.command()
def index(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder, glob, brace pattern, one tar, or a URL.")],
    workers: Annotated[int | None, typer.Option(help="Processes that read; by default one a processor.")] = None,
) -> None:
    """Index the shards of a dataset, so that the first run begins at once.

    The index lies beside the shards, or in a cache where they are read-only. Shards that are indexed as they are now
    are not read again; one that was stopped goes on where it stopped. What cannot be read to its end is listed, and
    the exit code is 1.

    Shards behind a URL are fetched once for it, unless they have an index; it lies in the cache (SAVABLE_CACHE), and
    spares every other node that when it is uploaded beside them as .nv-meta/savable.index.
    """
    with errors_as_lines():
        with progress_of(_err, "indexing", "shards") as progress:
            if is_remote(path):
                place, faults = index_remote(path, progress)
            else:
                place, faults = index_shards(path, processes=workers, progress=progress)
        print_index(_out, place, faults)
    if faults:
        raise typer.Exit(1)


@app.command()
def check(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder, glob, brace pattern, one tar, or a URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that read; by default one a processor.")] = None,
) -> None:
    """Read all of a dataset and list what a run would stumble over: bad tars, images, JSON and text, wrong indexes.

    Nothing is changed. The exit code is 1 if something was found. A shard that was rewritten to the same size since it
    was indexed is found here, and nowhere else. Shards behind a URL are fetched one by one, and not kept.
    """
    with errors_as_lines():
        with progress_of(_err, "checking", "shards") as progress:
            report = check_dataset(path, processes=workers, progress=progress)
        print_check(_out, report, as_json=as_json)
    if report.problems:
        raise typer.Exit(1)


@app.command()
def preview(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PATH|PIPELINE",
            help="Shards, also behind a URL, or a pipeline: module:function, train.py:function.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("preview.html"),
    samples: Annotated[int, typer.Option(help="Samples of a dataset to show.")] = 24,
    batches: Annotated[int, typer.Option(help="Batches of a pipeline to show.")] = 3,
    seed: Annotated[int, typer.Option(help="Draws the samples; of a pipeline, the seed of its run.")] = 0,
    lane: Annotated[int, typer.Option(help="Pipeline: the lane whose batches are shown.")] = 0,
    lanes: Annotated[int, typer.Option(help="Pipeline: the lanes of its run.")] = 1,
) -> None:
    """Show a dataset, or what a pipeline makes of it, on one HTML page.

    Of a dataset: what it holds, and samples drawn from all shards. Of a pipeline: the first batches of a lane, with
    images, tokens coloured by their loss, and the borders of documents in packs. The page is one file without scripts.
    """
    from savable_pipeline.preview import preview_dataset, preview_pipeline  # with torch, which takes seconds

    with errors_as_lines():
        if names_object(what):
            page = preview_pipeline(named_pipeline(what), what, batches=batches, seed=seed, lane=lane, lanes=lanes)
        else:
            page = preview_dataset(what, samples=samples, seed=seed)
        replace_file(output, [page])
    _out.print(escape(f"{output}: {human_bytes(len(page))}"))


@app.command()
def state(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What torch.save wrote: a state, or a checkpoint.")],
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="Another, to be compared with FILE.")] = None,
) -> None:
    """Say where a saved run stands: slot, and of each lane its epoch, position, buffer, packs and random counters.

    With two files, say what differs, and exit with 1 if anything does.
    """
    with errors_as_lines():
        summary = summarize(read_checkpoint(file))
        if other is None:
            print_state(_out, summary, file.stat().st_size)
            return
        found = differences(summary, summarize(read_checkpoint(other)))
    print_differences(_out, found, file.name, other.name)
    if found:
        raise typer.Exit(1)


@app.command("verify-resume")
def verify_resume(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="module:name or file.py:name of a SavableLoader, a function that makes one, or a pipeline function.",
        ),
    ],
    steps: Annotated[int | None, typer.Option(help="Batches to compare; by default two of each lane.")] = None,
    cut: Annotated[list[int] | None, typer.Option(help="Cut after so many batches; repeatable.")] = None,
    random_cuts: Annotated[int, typer.Option(help="Cuts at random steps besides.")] = 3,
    draw: Annotated[int, typer.Option(help="Another number draws other random steps.")] = 0,
    workers: Annotated[
        list[int] | None, typer.Option(help="Workers of the legs, in turn; repeatable. By default 2, then 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of a pipeline function: its seed; by default 0.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Of a pipeline function: its lanes; by default 12.")] = None,
    pictures: Annotated[Path, typer.Option(help="Folder for the picture of two images that differ.")] = Path(),
) -> None:
    """Run your own loader uninterrupted, and cut and resumed, and compare every byte of every batch.

    TARGET is imported: it is your code. Each leg of the run that is cut is a fresh interpreter with another
    PYTHONHASHSEED and another number of workers, and goes on from a state that passed through torch.save and
    torch.load. The first difference is told with slot, sample, field and both values, and the exit code is 1.
    """
    with errors_as_lines():
        plan = Plan(
            target,
            steps=steps,
            cuts=tuple(cut or ()),
            random_cuts=random_cuts,
            draw=draw,
            workers=tuple(workers or (2, 0)),
            seed=seed,
            lanes=lanes,
            pictures=pictures,
        )
        with progress_of(_err, f"importing {target}", "batches", "comparing") as progress:
            verdict = verify(plan, progress)
        print_verdict(_out, plan, verdict)
    if verdict.finding:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
