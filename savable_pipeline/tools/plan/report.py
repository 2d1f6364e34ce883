"""A plan as a report: sections of facts, each with its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.plan.run_plan import RunPlan, SourceBytes

_SHOWN_WORLDS = 8  # numbers of ranks in a line of the table


class Fact(NamedTuple):
    """One line: a name, a value, and from what the value is known."""

    name: str
    value: str
    known_from: str


class Section(NamedTuple):
    """Facts that belong together."""

    title: str
    facts: list[Fact]


def sections(plan: RunPlan) -> list[Section]:
    """Return all numbers of a plan except those of lanes, by section."""
    all_sections = [
        Section("data", [Fact("samples", f"{plan.population:,}", "index")]),
        Section("steps", list(_steps(plan))),
        Section("memory of a rank", list(_memory(plan))),
        Section("workers", list(_workers(plan))),
        Section("traffic of a node", [fact for source in plan.sources for fact in _traffic(source)]),
    ]
    return [section for section in all_sections if section.facts]


def verdict(plan: RunPlan) -> str:
    """Return whether the run can start, with its steps."""
    if plan.lanes != plan.planned_lanes:
        return (
            f"{plan.target} cannot start: {plan.ranks} ranks do not divide its {plan.lanes} lanes. This plan is for "
            f"lanes={plan.planned_lanes}."
        )
    steps, ranks = plan.steps, counted(plan.ranks, "rank")
    if steps.how == "unknown":
        result = "the steps depend on lengths, so see loader.stats() of a short run"
    elif not steps.endless and steps.steps < 1:
        return f"{plan.target} has no step on {ranks}: it needs more data, fewer lanes or a smaller batch."
    else:
        result = f"{steps.steps:,.0f} {_steps_name(plan)}"
    return f"{plan.target} runs on {ranks} with {counted(plan.lanes, 'lane')}: {result}"


def advice(plan: RunPlan) -> list[str]:
    """Return possible improvements, a sentence each."""
    return [_advise_lanes(plan)] if plan.better_lanes != plan.planned_lanes else []


def lanes_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return a table: the names of its columns, then a row for each choice of lanes.

    Columns without any value are dropped.
    """
    rows: list[tuple[str, ...]] = [("lanes", "ranks", "workers per rank", "steps", "left over")]
    current = " (default)" if plan.by_default else " (yours)"
    for choice in plan.choices:
        lanes = f"{choice.lanes}"
        lanes += current if choice.lanes == plan.lanes else " (better)" if choice.lanes == plan.better_lanes else ""
        ranks = "… " if len(choice.worlds) > _SHOWN_WORLDS else ""
        ranks += ", ".join(map(str, choice.worlds[-_SHOWN_WORLDS:])) + ("" if choice.fits else f"; not {plan.ranks}")
        is_known = choice.steps is not None and choice.unused_share is not None and plan.steps.how != "unknown"
        steps = f"{choice.steps:,.0f}" if is_known else ""
        unused = f"{choice.unused_share:.2%}" if is_known and choice.unused_share else ""
        rows.append((lanes, ranks, str(choice.workers) if choice.fits else "", steps, unused))
    return list(zip(*(column for column in zip(*rows, strict=True) if any(column[1:])), strict=True))


def _advise_lanes(plan: RunPlan) -> str:
    """Return why a new run should have another number of lanes. A started run cannot change its number."""
    choices = {choice.lanes: choice for choice in plan.choices}
    ours, better = choices[plan.planned_lanes], choices[plan.better_lanes]
    reasons = []
    if more := sorted(set(better.worlds) - set(ours.worlds)):
        reasons.append(f"also serves {', '.join(map(str, more))} ranks")
    if (better.unused_share or 0.0) < (ours.unused_share or 0.0):
        reasons.append(f"leaves {better.unused_share or 0.0:.2%} of an epoch over instead of {ours.unused_share:.2%}")
    if better.workers > ours.workers:
        reasons.append(f"lets a rank have {counted(better.workers, 'worker')}")
    limit = ""
    if better.workers < ours.workers:
        limit = f", though a rank then has at most {counted(better.workers, 'worker')}"
    return f"a new run could use lanes={better.lanes}, which {' and '.join(reasons)}{limit}"


def _workers(plan: RunPlan) -> Iterator[Fact]:
    """Yield facts about the workers that are needed."""
    if plan.workers is not None:
        yield Fact("workers per rank", str(plan.workers.per_rank), "--batch-s ÷ --step-s")
        yield Fact("CPU nodes for remote workers", str(plan.workers.nodes), f"{plan.workers.per_node} workers on each")


def _steps_name(plan: RunPlan) -> str:
    """Return what the number of steps is called: of an epoch, or to read endless data once."""
    return "steps per epoch" if not plan.steps.endless or plan.steps.epoch_slots else "steps to read the data once"


def _steps(plan: RunPlan) -> Iterator[Fact]:
    """Yield facts about the steps of an epoch."""
    steps = plan.steps
    if steps.how == "unknown":  # how their number is known
        return
    known_from = "if each sample is one item" if steps.how == "one item a sample" else "counted"
    yield Fact(_steps_name(plan), f"{steps.steps:,.0f}", known_from)
    if steps.filler_rows:  # rows that only pad the last steps
        yield Fact("padding rows", f"{steps.filler_rows:,.0f}", known_from)
    if steps.unused_samples:
        share = steps.unused_samples / max(1, plan.population)
        unused = f"{counted(round(steps.unused_samples), 'sample')} ({share:.2%})"
        yield Fact('left over by tail="stop"', unused, known_from)


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
    known_from = "mean sample size"
    yield Fact(f"all samples{of_source}", human_bytes(source.bytes), "index")
    if not source.remote:
        yield Fact(f"reads{of_source} per epoch", human_bytes(source.node_bytes), known_from)
        return
    yield Fact(f"cache for all shards{of_source}", human_bytes(source.whole_cache), "index")
    yield Fact("  then downloads in the first epoch", human_bytes(source.first_pass), "index, 8 MiB pieces")
    later = max(0.0, source.bytes - source.first_pass)
    yield Fact("  and in all later ones, at most", human_bytes(later), "index")
    # with this cache, no sample is downloaded twice in an epoch
    yield Fact(f"least cache{of_source} that fetches nothing twice", human_bytes(source.least_cache), known_from)
    yield Fact("  then downloads per epoch", human_bytes(source.node_bytes), known_from)
