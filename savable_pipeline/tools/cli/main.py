"""The command `savable`: one function for each subcommand, which calls the library and prints the result.

Results go to stdout, progress and errors to stderr. The exit code is 0 if all is well, 1 if the data or the run has a
fault, 2 if the command failed, 130 after Ctrl-C.
"""

from __future__ import annotations

from typing import Annotated

import typer

from savable_pipeline import __version__
from savable_pipeline.tools.cli.console import out
from savable_pipeline.tools.cli.convert_command import convert
from savable_pipeline.tools.cli.dataset_commands import check, index, info, preview
from savable_pipeline.tools.cli.ledger_command import ledger_app
from savable_pipeline.tools.cli.loader_commands import plan, serve, state, verify_resume

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


# Each command imports what it needs when it is called: `savable convert` starts without the loader and the downloader.
for command in (convert, plan, serve, info, index, check, preview, state, verify_resume):
    app.command()(command)
app.add_typer(ledger_app, name="ledger")

if __name__ == "__main__":
    app()
