"""`savable plan`, and what it prints: tables, or one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from savable_pipeline.tools.cli.console import TargetArgument, errors_as_lines, out, print_warnings, printable

if TYPE_CHECKING:  # a command imports what it needs when it is called
    from savable_pipeline.tools.plan.run_plan import RunPlan


def plan(
    target: TargetArgument,
    ranks: Annotated[int, typer.Option(help="The data-parallel ranks of the run.")] = 1,
    nodes: Annotated[int, typer.Option(help="The machines they run on, each with as many.")] = 1,
    batch_s: Annotated[
        float | None, typer.Option(help="Seconds to make a batch, as measured: work_s / batches of loader.stats().")
    ] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds of a training step, with --batch-s.")] = None,
    node_workers: Annotated[int, typer.Option(help="Workers on a node of savable serve, with --batch-s.")] = 16,
    seed: Annotated[int | None, typer.Option(help="The seed, for a pipeline function. Default: 0.")] = None,
    lanes: Annotated[int | None, typer.Option(help="The lanes, for a pipeline function. Default: 96.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Describe a run on many ranks before it begins, from the index alone.

    Steps an epoch and what the tail leaves, the lanes that fit, refs in memory, and the bytes that each node fetches.
    TARGET is imported, so its code runs; no sample is encoded, so lengths, mixing and speed are not said: see
    loader.stats() of a short run. Each line says how it is known.
    """
    from savable_pipeline.tools.plan.run_plan import WorkersNeeded, plan_run
    from savable_pipeline.tools.verify.target import load_target

    with errors_as_lines():
        needed = None
        if batch_s is not None or step_s is not None:
            needed = WorkersNeeded.of(batch_s or 0.0, step_s or 0.0, ranks=ranks, a_node=node_workers)
        settings = load_target(target, seed=seed, lanes=lanes, default_lanes=96)
        _print_plan(plan_run(settings, ranks=ranks, nodes=nodes, target=target, workers=needed), as_json=as_json)


def _print_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Each section of the plan in turn; last what to change."""
    from savable_pipeline.tools.plan.report import advice, sections

    if as_json:
        out.print(json.dumps({**asdict(plan), "advice": advice(plan)}, indent=2), markup=False)
        return
    for section in sections(plan):
        table = Table(section.title, "", "how it is known", box=None, title_justify="left")
        for fact in section.facts:
            table.add_row(*map(printable, fact))
        out.print(table)
    print_warnings(out, advice(plan))
