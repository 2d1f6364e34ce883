"""The commands `savable ledger …`, which query the ledger of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from savable_pipeline.core.files import replace_file
from savable_pipeline.tools.cli.console import (
    check_output,
    errors_as_lines,
    escape_markup,
    input_option,
    out,
    output_option,
)

ledger_app = typer.Typer(help="Look up what a run received, in its ledger.", no_args_is_help=True)

_Folder = Annotated[Path, typer.Argument(metavar="LEDGER", help="The folder of SavableLoader(ledger=...).")]


@ledger_app.command(epilog="Example: `savable ledger find runs/ledger cat-0001 cat-0002`")
def find(
    folder: _Folder,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of samples.")],
    source: Annotated[str | None, input_option(help="Only this source of a Blend.")] = None,
    data: Annotated[str | None, input_option(help="Where the data of the source is now.")] = None,
) -> None:
    """Show when samples reached the trainer.

    Each line has epoch, slot, step, rank and what was acknowledged. A batch is marked as lost if the run was later
    resumed from before it. The exit code is 1 if a sample was not yielded.
    """
    from savable_pipeline.run.loader.ledger import Ledger

    with errors_as_lines():
        missing = False
        for key, uses in Ledger(folder).find(keys, source=source, data=data).items():
            missing |= not uses
            if not uses:  # [] if the sample was not yielded, None if there is no such sample
                out.print(escape_markup(f"{key}: not given" if uses == [] else f"{key}: no sample has this key"))
            for use in uses or ():
                source_name = f" of {use.source}" if use.source else ""
                lost = ", lost: the run was resumed from a place before it" if use.lost else ""
                where = f"slot {use.slot}, step {use.step}, rank {use.rank} of {use.world_size}"
                outcome = f"{', again' if use.again else ''}{', ' if use.outcome else ''}{use.outcome}"
                out.print(escape_markup(f"{key}{source_name}: epoch {use.epoch}, {where}{outcome}{lost}"))
    if missing:
        raise typer.Exit(1)


@ledger_app.command("batch", epilog="Example: `savable ledger batch runs/ledger train.py:data --slot 7 -o page.html`")
def batch(
    folder: _Folder,
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="The pipeline of the run: file.py:name or module:name.")
    ],
    slot: Annotated[int, input_option(help="The slot of the batch.")],
    epoch: Annotated[int, input_option(help="The epoch of the batch.")] = 0,
    output: Annotated[Path | None, output_option("--output", "-o", help="The page to write.")] = None,
    save: Annotated[Path | None, output_option(help="The file for the batch, by torch.save.")] = None,
) -> None:
    """Rebuild a batch of a run, byte for byte."""
    from savable_pipeline.run.ledger.reader import LedgerFiles

    # imported here, because it imports torch, which takes seconds
    from savable_pipeline.run.loader.ledger import rebuild_batch
    from savable_pipeline.stages.pipeline import named_pipeline
    from savable_pipeline.tools.preview.pipeline_page import batch_page

    with errors_as_lines():
        if output is None and save is None:
            raise ValueError("nothing to write. Pass -o page.html, --save batch.pt, or both")
        check_output(output, save)
        rebuilt = rebuild_batch(named_pipeline(pipeline), LedgerFiles(folder), epoch, slot)
        title = f"{pipeline}, epoch {epoch}, slot {slot}"
        if output is not None:
            number_in_lane = slot // rebuilt.recorded.start.lanes
            replace_file(output, [batch_page(rebuilt.stage, rebuilt.stage.lane, title, number_in_lane, rebuilt.batch)])
            out.print(escape_markup(str(output)))
        if save is not None:
            import torch

            torch.save(rebuilt.batch, save)
            out.print(escape_markup(str(save)))


@ledger_app.command(epilog="Example: `savable ledger report runs/ledger -o report.html`")
def report(
    folder: _Folder, output: Annotated[Path, output_option("--output", "-o", help="The page to write.")]
) -> None:
    """Write an HTML report of a run."""
    from savable_pipeline.run.ledger.reader import LedgerFiles
    from savable_pipeline.tools.preview.report_page import report_page

    with errors_as_lines():
        check_output(output)
        replace_file(output, [report_page(LedgerFiles(folder))])
        out.print(escape_markup(str(output)))
