"""The application `savable`."""

from __future__ import annotations

from typing import Annotated

import typer

from savable_pipeline import __version__
from savable_pipeline.tools.cli.console import out

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
