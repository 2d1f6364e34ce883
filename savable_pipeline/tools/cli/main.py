"""The command `savable`, with one function for each subcommand.

The function calls the library and prints the result. Results go to stdout, progress and errors to stderr. The exit code
is 0 if all is well, 1 if the data or the run has an error, 2 if the command failed, 130 after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from savable_pipeline import __version__
from savable_pipeline.tools.cli.console import log_once, out
from savable_pipeline.tools.cli.convert_command import convert_source
from savable_pipeline.tools.cli.dataset_commands import check, index, info, preview
from savable_pipeline.tools.cli.ledger_command import ledger_app
from savable_pipeline.tools.cli.loader_commands import plan, serve_workers, state, verify_resume

_COMMANDS: list[tuple[str, Callable[..., None], str]] = [  # panel, command and example, in the order of use
    ("Look", info, "savable info photos/"),
    ("Look", preview, "savable preview photos/ -o photos.html"),
    ("Look", check, "savable check s3://bucket/shards/ --workers 8"),
    ("Prepare", convert_source, "savable convert photos/ shards/ --split train=0.98 --split val=0.02"),
    ("Prepare", index, "savable index shards/"),
    ("Run", plan, "savable plan train.py:loader --ranks 8 --nodes 2"),
    ("Run", verify_resume, "savable verify-resume train.py:loader --steps 20"),
    ("Run", state, "savable state checkpoint.pt"),
    ("Cluster", serve_workers, "savable serve --listen 10.0.0.5:7000 --key-file key --workers 16"),
]


class _InOrderOfUse(TyperGroup):
    """Group of commands that lists them in the order in which a user needs them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of `_COMMANDS`.

        Typer would list groups of commands first.
        """
        names = [name for name in self.commands if name != "ledger"]
        names.insert(names.index("serve"), "ledger")
        return names


app = typer.Typer(cls=_InOrderOfUse, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if requested."""
    if wanted:
        out.print(f"savable_pipeline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Inspect and convert datasets, and check runs that resume exactly."""
    log_once()


# Each command imports what it needs when it is called: `savable convert` starts without the loader and the downloader.
for panel, command, example in _COMMANDS:
    app.command(example.split()[1], rich_help_panel=panel, epilog=f"Example: `{example}`")(command)
app.add_typer(ledger_app, name="ledger", rich_help_panel="Run")

if __name__ == "__main__":
    app()
