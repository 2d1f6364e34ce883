"""`savable plan`, and what it prints: tables, or one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from savable_pipeline.core.files import replace_file
from savable_pipeline.tools.cli.console import (
    TargetArgument,
    check_output,
    err,
    errors_as_lines,
    out,
    print_warnings,
    printable,
    progress_of,
)

if TYPE_CHECKING:  # a command imports what it needs when it is called
    from savable_pipeline.tools.plan.run_plan import RunPlan


def plan(
    target: TargetArgument,
    ranks: Annotated[int, typer.Option(help="The data-parallel ranks of the run.")] = 1,
    nodes: Annotated[int, typer.Option(help="The machines they run on, each with as many.")] = 1,
    samples: Annotated[int, typer.Option(help="Documents to look at for their lengths.")] = 500,
    hidden: Annotated[
        int, typer.Option(help="The model's hidden size, for the cost of a document, unless the pipeline has a cost.")
    ] = 2048,
    measure: Annotated[bool, typer.Option("--measure", help="Run the pipeline on this machine, too.")] = False,
    seconds: Annotated[float, typer.Option(help="With --measure: how long, for each number of workers.")] = 3.0,
    seed: Annotated[int | None, typer.Option(help="The seed, for a pipeline function. Default: 0.")] = None,
    lanes: Annotated[int | None, typer.Option(help="The lanes, for a pipeline function. Default: 96.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A page with pictures to write.")] = None,
) -> None:
    """Describe a run on many ranks before it begins.

    Steps an epoch and what the tail leaves, the lanes that fit, how well batches are mixed, memory, bytes each node
    fetches, and how long ranks wait for the slowest, with and without Balance and max_cost. TARGET is imported, so its
    code runs; a sample of its data is encoded. Each line says how it is known. With --measure one rank runs here:
    its rate by number of workers, the time of each stage, its state and its resume.
    """
    from savable_pipeline.tools.plan.report import plan_page
    from savable_pipeline.tools.plan.run_plan import Wanted, plan_run
    from savable_pipeline.tools.verify.target import load_target

    with errors_as_lines():
        check_output(output)
        wanted = Wanted(ranks, nodes, samples, hidden, seconds if measure else None)
        settings = load_target(target, seed=seed, lanes=lanes, default_lanes=96)
        with progress_of(err, f"planning {target}", "runs", "measuring") as progress:
            found = plan_run(settings, wanted, target, progress)
        if output is not None:
            replace_file(output, [plan_page(found)])
        _print_plan(found, as_json=as_json)
        if output is not None and not as_json:
            out.print(printable(f"page: {output}"))


def _print_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Each section of the plan in turn; last what to change."""
    from savable_pipeline.tools.plan.report import advice, sections

    if as_json:
        found = asdict(plan)
        if plan.lengths is not None:
            found["lengths"]["sizes"] = plan.lengths.totals
        out.print(json.dumps({**found, "advice": advice(plan)}, indent=2), markup=False)
        return
    for section in sections(plan):
        table = Table(section.title, "", "how it is known", box=None, title_justify="left")
        for fact in section.facts:
            table.add_row(*map(printable, fact))
        out.print(table)
    print_warnings(out, advice(plan))
