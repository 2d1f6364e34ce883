"""A plan as a report: sections of facts, and how each is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.plan.run_plan import LanesChoice, RunPlan, SourceBytes, Steps

_WORLDS = 8  # numbers of ranks that are listed


class Fact(NamedTuple):
    """One line: what, how much, and how that is known."""

    name: str
    value: str
    how: str


class Section(NamedTuple):
    """Facts that belong together."""

    title: str
    facts: list[Fact]


def sections(plan: RunPlan) -> list[Section]:
    """All that a plan tells, section by section; those without a fact are left out."""
    found = [
        Section("data", [Fact("samples", f"{plan.population:,}", "index")]),
        Section("steps", list(_steps(plan))),
        Section("lanes", [_choice(plan, choice) for choice in plan.choices]),
        Section("memory of a rank", list(_memory(plan))),
        Section("workers", list(_workers(plan))),
        Section("bytes of a node", [fact for source in plan.sources for fact in _bytes(source)]),
    ]
    return [section for section in found if section.facts]


def advice(plan: RunPlan) -> list[str]:
    """What to change, a sentence each."""
    ranks, found = plan.ranks, []
    if plan.lanes != plan.planned_lanes:
        found.append(
            f"{ranks} ranks do not divide the {plan.lanes} lanes of the run, so it cannot start: this plan is for "
            f"lanes={plan.planned_lanes}"
        )
    if plan.better_lanes != plan.planned_lanes:
        found.append(_better(plan))
    if plan.steps.how != "unknown" and not plan.steps.endless and plan.steps.steps < 1:
        found.append("an epoch has no step: this is too little data for so many lanes and this batch size")
    return found


def _better(plan: RunPlan) -> str:
    """Why other lanes would be better, for a run that has not begun: they are fixed from its start."""
    choices = {choice.lanes: choice for choice in plan.choices}
    ours, better = choices[plan.planned_lanes], choices[plan.better_lanes]
    reasons = []
    if more := sorted(set(better.worlds) - set(ours.worlds)):
        reasons.append(f"serves {', '.join(map(str, more))} ranks too")
    if (better.left_share or 0.0) < (ours.left_share or 0.0):
        reasons.append(f"leaves {better.left_share or 0.0:.2%} of an epoch instead of {ours.left_share:.2%}")
    if better.workers > ours.workers:
        reasons.append(f"lets a rank have {counted(better.workers, 'worker')}")
    fewer = f", though a rank then has at most {counted(better.workers, 'worker')}"
    return (
        f"for a new run, use lanes={better.lanes}: it {' and '.join(reasons)}"
        f"{fewer if better.workers < ours.workers else ''}"
    )


def _workers(plan: RunPlan) -> Iterator[Fact]:
    if plan.workers is not None:
        yield Fact("workers a rank", str(plan.workers.a_rank), "seconds of a batch ÷ seconds of a step, as measured")
        yield Fact(
            "CPU nodes, if they run elsewhere", str(plan.workers.nodes), f"{plan.workers.a_node} workers on each"
        )


def _how(steps: Steps) -> str:
    return "index, for one item a sample" if steps.how == "one item a sample" else "counted"


def _steps(plan: RunPlan) -> Iterator[Fact]:
    steps = plan.steps
    name = "steps a pass over the data" if steps.endless and steps.epoch_slots is None else "steps an epoch"
    if steps.how == "unknown":
        yield Fact(name, "not known", "depends on lengths, which no index holds: loader.stats() of a short run")
        return
    how = _how(steps)
    yield Fact(name, f"{steps.steps:,.0f}", how)
    if steps.endless:
        yield Fact("left at the end", "nothing", "the run never ends")
    elif steps.filler_rows:
        yield Fact("rows that only fill up", f"{steps.filler_rows:,.0f}", how)
    else:
        text = f"{steps.left_batches:,.0f} batches, {steps.left_samples:,.0f} samples"
        share = steps.left_samples / max(1, plan.population)
        yield Fact("left by the tail", f"{text} ({share:.2%})", how)


def _choice(plan: RunPlan, choice: LanesChoice) -> Fact:
    worlds = _listed(choice.worlds)
    marks = "".join(
        mark
        for mark, holds in ((", yours", choice.lanes == plan.lanes), (", better", choice.lanes == plan.better_lanes))
        if holds and not (mark == ", better" and choice.lanes == plan.lanes)
    )
    name = f"lanes={choice.lanes}{marks}"
    if not choice.fits:
        return Fact(name, f"not for {plan.ranks} ranks; {worlds}", "counted")
    parts = [f"up to {counted(choice.workers, 'worker')} a rank", worlds]
    if choice.steps is not None and choice.left_share is not None and plan.steps.how != "unknown":
        parts.append(f"{choice.steps:,.0f} steps, {choice.left_share:.2%} left")
    return Fact(name, "; ".join(parts), _how(plan.steps))


def _listed(worlds: list[int]) -> str:
    shown = ", ".join(map(str, worlds[-_WORLDS:]))
    return f"serves {'… ' if len(worlds) > _WORLDS else ''}{shown} ranks" if worlds else "serves none near"


def _memory(plan: RunPlan) -> Iterator[Fact]:
    memory = plan.memory
    yield Fact(f"refs in shuffle buffers of {memory.lanes} lanes", human_bytes(memory.refs), "12 bytes each")
    if memory.limit is not None:
        text = f"{human_bytes(memory.limit)} in each of {memory.processes}"
        yield Fact("limit of held items (max_buffer_bytes)", text, "the stages' settings; the rest is made again")


def _bytes(source: SourceBytes) -> Iterator[Fact]:
    of = f" of {source.name}" if source.name else ""
    how = "index; the mean size of a sample"
    yield Fact(f"all chosen samples{of}", human_bytes(source.bytes), "index")
    if not source.remote:
        yield Fact(f"reads{of} in a pass", human_bytes(source.node_bytes), how)
        return
    yield Fact(f"kept whole{of} by a cache of", human_bytes(source.whole_cache), "index")
    yield Fact(f"then fetches{of} in the first pass", human_bytes(source.first_pass), "index; pieces of 8 MiB")
    yield Fact("and in all later ones at most", human_bytes(max(0.0, source.bytes - source.first_pass)), "index")
    yield Fact(f"a smaller cache fetches{of} in each pass", human_bytes(source.node_bytes), how)
    yield Fact(f"and nothing twice{of} with at least", human_bytes(source.least_cache), how)
