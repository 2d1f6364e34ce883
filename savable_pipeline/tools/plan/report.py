"""A plan as a report: sections of facts, each with its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.plan.run_plan import RunPlan, SourceBytes

_WORLDS = 8  # numbers of ranks in a line of the table


class Fact(NamedTuple):
    """One line: a name, a value, and how the value is known."""

    name: str
    value: str
    how: str


class Section(NamedTuple):
    """Facts that belong together."""

    title: str
    facts: list[Fact]


def sections(plan: RunPlan) -> list[Section]:
    """Return all numbers of a plan except those of lanes, by section."""
    found = [
        Section("data", [Fact("samples", f"{plan.population:,}", "index")]),
        Section("steps", list(_steps(plan))),
        Section("memory of a rank", list(_memory(plan))),
        Section("workers", list(_workers(plan))),
        Section("traffic of a node", [fact for source in plan.sources for fact in _traffic(source)]),
    ]
    return [section for section in found if section.facts]


def verdict(plan: RunPlan) -> str:
    """Return whether the run can start, with its steps."""
    if plan.lanes != plan.planned_lanes:
        return (
            f"{plan.target} cannot start: {plan.ranks} ranks do not divide its {plan.lanes} lanes. This plan is for "
            f"lanes={plan.planned_lanes}."
        )
    steps, ranks = plan.steps, counted(plan.ranks, "rank")
    if steps.how == "unknown":
        number = "the steps depend on lengths, so see loader.stats() of a short run"
    elif not steps.endless and steps.steps < 1:
        return f"{plan.target} has no step on {ranks}: it needs more data, fewer lanes or a smaller batch."
    else:
        number = f"{steps.steps:,.0f} {_per_epoch(plan)}"
    return f"{plan.target} runs on {ranks} with {counted(plan.lanes, 'lane')}: {number}"


def advice(plan: RunPlan) -> list[str]:
    """Return possible improvements, a sentence each."""
    return [_advise_lanes(plan)] if plan.better_lanes != plan.planned_lanes else []


def lanes_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return the names of columns, then a row for each choice of lanes.

    Columns without a value are dropped.
    """
    rows: list[tuple[str, ...]] = [("lanes", "ranks", "workers per rank", "steps", "left over")]
    yours = " (default)" if plan.by_default else " (yours)"
    for each in plan.choices:
        mark = yours if each.lanes == plan.lanes else " (better)" if each.lanes == plan.better_lanes else ""
        known = each.steps is not None and each.unused_share is not None and plan.steps.how != "unknown"
        numbers = (f"{each.steps:,.0f}", f"{each.unused_share:.2%}" * bool(each.unused_share)) if known else ("", "")
        shown = ", ".join(map(str, each.worlds[-_WORLDS:]))
        ranks = f"{'… ' if len(each.worlds) > _WORLDS else ''}{shown}" + f"; not {plan.ranks}" * (not each.fits)
        rows.append((f"{each.lanes}{mark}", ranks, str(each.workers) if each.fits else "", *numbers))
    return list(zip(*(column for column in zip(*rows, strict=True) if any(column[1:])), strict=True))


def _advise_lanes(plan: RunPlan) -> str:
    """Return why a new run should have other lanes. A started run cannot change them."""
    choices = {choice.lanes: choice for choice in plan.choices}
    ours, better = choices[plan.planned_lanes], choices[plan.better_lanes]
    reasons = []
    if more := sorted(set(better.worlds) - set(ours.worlds)):
        reasons.append(f"also serves {', '.join(map(str, more))} ranks")
    if (better.unused_share or 0.0) < (ours.unused_share or 0.0):
        reasons.append(f"leaves {better.unused_share or 0.0:.2%} of an epoch over instead of {ours.unused_share:.2%}")
    if better.workers > ours.workers:
        reasons.append(f"lets a rank have {counted(better.workers, 'worker')}")
    fewer = f", though a rank then has at most {counted(better.workers, 'worker')}"
    return (
        f"a new run could use lanes={better.lanes}, which {' and '.join(reasons)}"
        f"{fewer if better.workers < ours.workers else ''}"
    )


def _workers(plan: RunPlan) -> Iterator[Fact]:
    """Yield facts about the workers that are needed."""
    if plan.workers is not None:
        yield Fact("workers per rank", str(plan.workers.a_rank), "--batch-s ÷ --step-s")
        yield Fact("CPU nodes for remote workers", str(plan.workers.nodes), f"{plan.workers.a_node} workers on each")


def _per_epoch(plan: RunPlan) -> str:
    return "steps per epoch" if not plan.steps.endless or plan.steps.epoch_slots else "steps to read the data once"


def _steps(plan: RunPlan) -> Iterator[Fact]:
    """Yield facts about the steps of an epoch."""
    steps = plan.steps
    if steps.how == "unknown":
        return
    how = "if each sample is one item" if steps.how == "one item a sample" else "counted"
    yield Fact(_per_epoch(plan), f"{steps.steps:,.0f}", how)
    if steps.filler_rows:
        yield Fact("padding rows", f"{steps.filler_rows:,.0f}", how)
    if steps.unused_samples:
        share = steps.unused_samples / max(1, plan.population)
        unused = f"{counted(round(steps.unused_samples), 'sample')} ({share:.2%})"
        yield Fact('left over by tail="stop"', unused, how)


def _memory(plan: RunPlan) -> Iterator[Fact]:
    """Yield facts about the memory for buffers."""
    memory = plan.memory
    if memory.refs:
        name = f"sample IDs in shuffle buffers, {counted(memory.lanes, 'lane')}"
        yield Fact(name, human_bytes(memory.refs), "12 bytes each")
    if memory.limit is not None:
        text = human_bytes(memory.limit) + f" in each of {memory.processes} processes" * (memory.processes > 1)
        yield Fact("items in buffers, at most", text, "max_buffer_bytes=")


def _traffic(source: SourceBytes) -> Iterator[Fact]:
    """Yield facts about what is read and downloaded from a source."""
    of_source = f" of {source.name}" if source.name else ""
    how = "mean sample size"
    yield Fact(f"all samples{of_source}", human_bytes(source.bytes), "index")
    if not source.remote:
        yield Fact(f"reads{of_source} per epoch", human_bytes(source.node_bytes), how)
        return
    yield Fact(f"cache for all shards{of_source}", human_bytes(source.whole_cache), "index")
    yield Fact("  then downloads in the first epoch", human_bytes(source.first_pass), "index, 8 MiB pieces")
    later = max(0.0, source.bytes - source.first_pass)
    yield Fact("  and in all later ones, at most", human_bytes(later), "index")
    yield Fact(f"least cache{of_source} that fetches nothing twice", human_bytes(source.least_cache), how)
    yield Fact("  then downloads per epoch", human_bytes(source.node_bytes), how)
