"""The commands `savable ledger …`: what a run was given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from savable_pipeline.core.files import replace_file
from savable_pipeline.tools.cli.console import check_output, errors_as_lines, out, printable

ledger_app = typer.Typer(help="Show what a run was given, from the ledger that its loader wrote.", no_args_is_help=True)

_Folder = Annotated[Path, typer.Argument(metavar="LEDGER", help="The folder that SavableLoader(ledger=…) names.")]


@ledger_app.command()
def find(
    folder: _Folder,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of samples.")],
    source: Annotated[str | None, typer.Option(help="Only this source of a Blend.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Where the samples of the source are now. Default: where the run read them.")
    ] = None,
) -> None:
    """Show when samples were given: epoch, slot, step and rank at that time, and what was acknowledged of them.

    What was given after a place from which the run was later resumed is marked as lost: the model that saw it is gone.
    Keys are read in the data as the run opened them. The exit code is 1 if a sample was not given.
    """
    from savable_pipeline.run.loader.ledger import Ledger

    with errors_as_lines():
        missing = False
        for key, found in Ledger(folder).find(keys, source=source, data=data).items():
            missing |= not found
            if not found:
                out.print(printable(f"{key}: not given" if found == [] else f"{key}: no sample has this key"))
            for each in found or ():
                of = f" of {each.source}" if each.source else ""
                lost = ", lost: the run was resumed from a place before it" if each.lost else ""
                where = f"slot {each.slot}, step {each.step}, rank {each.rank} of {each.world_size}"
                became = f"{', again' if each.again else ''}{', ' if each.outcome else ''}{each.outcome}"
                out.print(printable(f"{key}{of}: epoch {each.epoch}, {where}{became}{lost}"))
    if missing:
        raise typer.Exit(1)


@ledger_app.command("batch")
def again(
    folder: _Folder,
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="The run's pipeline function: module:name or file.py:name.")
    ],
    slot: Annotated[int, typer.Option(help="The slot of the batch.")],
    epoch: Annotated[int, typer.Option(help="Its epoch.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a page that shows it.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the batch itself, by torch.save.")] = None,
) -> None:
    """Make a batch again that the run was given, byte for byte, on any machine that has the data."""
    from savable_pipeline.run.ledger.reader import LedgerFiles
    from savable_pipeline.run.loader.made_again import make_again  # with torch, which takes seconds
    from savable_pipeline.stages.pipeline import named_pipeline
    from savable_pipeline.tools.preview.pipeline_page import batch_page

    with errors_as_lines():
        if output is None and save is None:
            raise ValueError("nothing to write: give -o page.html, --save batch.pt, or both")
        check_output(output, save)
        made = make_again(named_pipeline(pipeline), LedgerFiles(folder), epoch, slot)
        title = f"{pipeline}, epoch {epoch}, slot {slot}"
        if output is not None:
            number = slot // made.given.start.lanes
            replace_file(output, [batch_page(made.stage, made.stage.lane, title, number, made.batch)])
            out.print(printable(str(output)))
        if save is not None:
            import torch

            torch.save(made.batch, save)
            out.print(printable(str(save)))


@ledger_app.command()
def report(
    folder: _Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write: one file of HTML.")],
) -> None:
    """Write a page of the run: waiting for data and what would help, sources, packs, ranks, starts, skips."""
    from savable_pipeline.run.ledger.reader import LedgerFiles
    from savable_pipeline.tools.preview.report_page import report_page

    with errors_as_lines():
        check_output(output)
        replace_file(output, [report_page(LedgerFiles(folder))])
        out.print(printable(str(output)))
