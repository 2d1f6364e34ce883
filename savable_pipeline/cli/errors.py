"""What all commands share: errors as lines, and the pipeline that an argument names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from savable_pipeline.cli.console import console, printable
from savable_pipeline.errors import SavableError

if TYPE_CHECKING:
    from savable_pipeline.stages.pipeline import Pipeline

_err = console(stderr=True)


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print an error of the library, or Ctrl-C, as one line on stderr."""
    try:
        yield
    except (SavableError, ValueError, OSError) as error:
        line = " ".join(str(error).split())
        _err.print(f"[bold red]error:[/] {printable(line)}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _err.print("stopped")
        raise typer.Exit(130) from None


def named_pipeline(text: str) -> Pipeline:
    """The pipeline function `module:name`. Raises as `named_object` does, and ValueError if it is no pipeline."""
    from savable_pipeline.core.named_object import named_object  # what only some commands need
    from savable_pipeline.stages.pipeline import check_pipeline

    found = named_object(text)
    check_pipeline(found)
    return found  # type: ignore[no-any-return]
