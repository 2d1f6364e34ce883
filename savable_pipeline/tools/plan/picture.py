"""The page of a plan: its tables, and bars drawn as SVG; one file, without scripts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from savable_pipeline.tools.plan.mixing import NEIGHBOURS
from savable_pipeline.tools.plan.run_plan import RunPlan
from savable_pipeline.tools.plan.words import advice, sections

_BINS = 24


class Bar(NamedTuple):
    """A bar of a chart: how long, from 0.0 to 1.0, and what is written beside it."""

    label: str
    share: float
    text: str


class Chart(NamedTuple):
    """Bars below a title."""

    title: str
    bars: list[Bar]


def plan_page(plan: RunPlan) -> bytes:
    """The page, HTML in UTF-8; every value is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("plan.html.jinja").render(
        plan=plan, sections=sections(plan), advice=advice(plan), charts=charts(plan)
    )
    return page.encode()


def charts(plan: RunPlan) -> list[Chart]:
    """The pictures of what the plan knows."""
    found = [_lengths(plan), _waits(plan), _mixing(plan), _rates(plan), _stages(plan)]
    return [chart for chart in found if chart.bars]


def _scaled(title: str, rows: Iterable[tuple[str, float, str]]) -> Chart:
    """A chart whose longest bar fills it."""
    taken = list(rows)
    most = max((value for _, value, _ in taken), default=0.0) or 1.0
    return Chart(title, [Bar(label, value / most, text) for label, value, text in taken])


def _lengths(plan: RunPlan) -> Chart:
    totals = [] if plan.lengths is None else plan.lengths.totals
    if not totals:
        return Chart("", [])
    counts, edges = np.histogram(np.maximum(totals, 1), bins=_edges(max(totals)))
    rows = [(f"up to {edge:,.0f}", float(count), f"{count:,}") for count, edge in zip(counts, edges[1:], strict=True)]
    first = next(i for i, (_, count, _) in enumerate(rows) if count)
    return _scaled(f"length of {len(totals):,} documents, tokens", rows[first:])


def _edges(longest: int) -> list[float]:
    """Edges of bins that grow by a factor."""
    factor = max(1.25, longest ** (1 / _BINS))
    edges = [1.0]
    while edges[-1] <= longest:
        edges.append(float(int(edges[-1] * factor) + 1))
    return edges


def _waits(plan: RunPlan) -> Chart:
    ways = [] if plan.waits is None or plan.wanted.ranks == 1 else plan.waits.ways
    bars = [Bar(way.name, way.share, f"{way.share:.1%}") for way in ways]
    return Chart(f"time that {plan.wanted.ranks} ranks wait for the slowest, simulated", bars)


def _mixing(plan: RunPlan) -> Chart:
    if plan.mixing is None:
        return Chart("", [])
    mixing = plan.mixing
    found = {
        "shards in a batch": mixing.batch_shards,
        f"stretches of {NEIGHBOURS} in a batch": mixing.batch_neighbours,
        "shards in a step": mixing.step_shards,
        f"stretches of {NEIGHBOURS} in a step": mixing.step_neighbours,
    }
    bars = [Bar(name, min(1.0, each.share), f"{each.share:.0%}") for name, each in found.items()]
    return Chart("mixing: entropy in units of a random draw's", bars)


def _rates(plan: RunPlan) -> Chart:
    rates = [] if plan.measured is None else plan.measured.rates
    rows = [(f"num_workers={rate.workers}", rate.batches_per_s, f"{rate.batches_per_s:,.1f}") for rate in rates]
    return _scaled("batches a second of one rank, measured", rows)


def _stages(plan: RunPlan) -> Chart:
    stages = {} if plan.measured is None else plan.measured.stages
    return _scaled("milliseconds of each stage a batch, measured", [(n, ms, f"{ms:.2f}") for n, ms in stages.items()])
