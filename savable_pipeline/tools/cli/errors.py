"""What all commands share: errors as lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from savable_pipeline.core.addresses import clean_address
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.console import err, printable


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print an error of the library, or Ctrl-C, as one line on stderr."""
    try:
        yield
    except (SavableError, ValueError, OSError) as error:
        line = clean_address(" ".join(str(error).split()))
        err.print(f"[bold red]error:[/] {printable(line)}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("stopped")
        raise typer.Exit(130) from None
