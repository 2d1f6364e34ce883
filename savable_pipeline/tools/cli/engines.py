"""The option `--engine`: the processes of this machine, or a cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from savable_pipeline.core.job_engine import Engine

ENGINES = ("local", "ray")
EngineOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="|".join(ENGINES), help="Who does it: processes of this machine, or the nodes of a Ray cluster."
    ),
]


@contextlib.contextmanager
def engine_named(name: str, workers: int | None) -> Iterator[Engine | None]:
    """The engine of this name, with at most `workers` tasks at once; None for local processes. Raises ValueError."""
    if name not in ENGINES:
        raise ValueError(f"--engine is one of {', '.join(ENGINES)}, not {name!r}")
    if name == "local":
        yield None
        return
    from savable_pipeline.tools.convert.ray_engine import RayEngine  # only who asks for it needs Ray

    with contextlib.redirect_stdout(sys.stderr), RayEngine(workers) as engine:  # Ray tells on stdout of lost nodes
        yield engine
