"""What `savable plan` prints: a table, or one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from savable_pipeline.tools.cli.console import print_warnings, printable
from savable_pipeline.tools.plan.report import advice, sections
from savable_pipeline.tools.plan.run_plan import RunPlan


def print_plan(console: Console, plan: RunPlan, *, as_json: bool) -> None:
    """Each section of the plan in turn; last what had better be changed."""
    if as_json:
        console.print(json.dumps(_object(plan), indent=2), markup=False)
        return
    for section in sections(plan):
        table = Table(section.title, "", "how it is known", box=None, title_justify="left")
        for fact in section.facts:
            table.add_row(*map(printable, fact))
        console.print(table)
    print_warnings(console, advice(plan))


def _object(plan: RunPlan) -> dict[str, Any]:
    found = asdict(plan)
    if plan.lengths is not None:
        found["lengths"]["sizes"] = plan.lengths.totals
    return {**found, "advice": advice(plan)}
