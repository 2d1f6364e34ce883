"""A plan as a report: sections of facts, and how each is known (counted, estimated, simulated, measured); a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.plan.memory import RankMemory, SourceBytes
from savable_pipeline.tools.plan.mixing import NEIGHBOURS, Entropy, Mixing
from savable_pipeline.tools.plan.run_plan import RunPlan
from savable_pipeline.tools.plan.steps import LanesChoice
from savable_pipeline.tools.preview.page import render
from savable_pipeline.tools.preview.pictures import Bar, scaled_bars

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
        Section("data", list(_data(plan))),
        Section("steps", list(_steps(plan))),
        Section("lanes", [_choice(plan, choice) for choice in plan.choices]),
        Section("mixing", list(_mixing(plan.mixing, plan.wanted.ranks))),
        Section("memory of a rank", list(_memory(plan))),
        Section("bytes of a node", [fact for source in plan.sources for fact in _bytes(source)]),
        Section("waiting for the slowest rank", list(_waits(plan))),
        Section("measured on this machine", list(_measured(plan))),
    ]
    return [section for section in found if section.facts]


def advice(plan: RunPlan) -> list[str]:
    """What to change, a sentence each."""
    ranks, found = plan.wanted.ranks, []
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


def _of_samples(plan: RunPlan) -> str:
    return "" if plan.lengths is None else f"estimated from {plan.lengths.items:,} documents"


def _data(plan: RunPlan) -> Iterator[Fact]:
    yield Fact("samples", f"{plan.population:,}", "index")
    lengths = plan.lengths
    if lengths is None:
        return
    how = f"{lengths.items:,} documents of {lengths.samples:,} samples"
    yield Fact("documents a sample", f"{lengths.items_a_sample:.3g}", how)
    if lengths.totals:
        ordered = sorted(lengths.totals)
        median, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        told = "from length_of" if lengths.told else "encoded"
        text = f"mean {sum(ordered) / len(ordered):,.0f}, median {median:,}, 99 % {p99:,}, longest {ordered[-1]:,}"
        yield Fact("length of a document", text, f"{how}, {told}")
    for reason, number in lengths.skipped.items():
        yield Fact(f"skipped: {reason}", f"{number:,}", how)


def _steps(plan: RunPlan) -> Iterator[Fact]:
    steps = plan.steps
    name = "steps a pass over the data" if steps.endless and steps.epoch_slots is None else "steps an epoch"
    if steps.how == "unknown":
        yield Fact(name, "not known", "the last stage is no Batcher, or no length is known")
        return
    how = "counted" if steps.how == "counted" else _of_samples(plan)
    error = f" ± {steps.error:,.0f}" if steps.error >= 0.5 else ""
    yield Fact(name, f"{steps.steps:,.0f}{error}", how)
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
        return Fact(name, f"not for {plan.wanted.ranks} ranks; {worlds}", "counted")
    parts = [f"up to {choice.workers} workers a rank", worlds]
    if choice.steps is not None and choice.left_share is not None and plan.steps.how != "unknown":
        parts.append(f"{choice.steps:,.0f} steps, {choice.left_share:.2%} left")
    return Fact(name, "; ".join(parts), "counted" if plan.steps.how == "counted" else _of_samples(plan) or "counted")


def _listed(worlds: list[int]) -> str:
    shown = ", ".join(map(str, worlds[-_WORLDS:]))
    return f"serves {'… ' if len(worlds) > _WORLDS else ''}{shown} ranks" if worlds else "serves none near"


def _mixing(mixing: Mixing | None, ranks: int) -> Iterator[Fact]:
    if mixing is None:
        return
    how = f"the order of {mixing.lanes:,} lanes, in bits"
    for name, samples, shards, neighbours in (
        ("a batch", mixing.samples_a_batch, mixing.batch_shards, mixing.batch_neighbours),
        ("a step", mixing.samples_a_batch * mixing.lanes, mixing.step_shards, mixing.step_neighbours),
    ):
        of = f" of {mixing.lanes} ranks" if name == "a step" and mixing.lanes < ranks else ""
        yield Fact(f"shards in {name}{of} ({samples:,} samples)", _beside(shards), how)
        yield Fact(f"neighbours in {name}{of} (stretches of {NEIGHBOURS})", _beside(neighbours), how)


def _beside(entropy: Entropy) -> str:
    return f"{entropy.ours:.2f} of {entropy.random:.2f} at random ({entropy.share:.0%})"


def _memory(plan: RunPlan) -> Iterator[Fact]:
    memory: RankMemory = plan.memory
    yield Fact(f"refs in shuffle buffers of {memory.lanes} lanes", human_bytes(memory.refs), "12 bytes each")
    how = _of_samples(plan)
    for name, size in (
        ("items in buffers", memory.buffered_items),
        ("items in open packs", memory.open_packs),
        ("packs held by Balance", memory.balance),
        ("batches made ahead", memory.batches_ahead),
    ):
        if size:
            yield Fact(name, human_bytes(size), how)
    if memory.limit is not None:
        text = f"{human_bytes(memory.limit)} in each of {memory.processes}"
        yield Fact("limit of held items (max_held_bytes)", text, "the stages' settings; the rest is made again")


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


def _waits(plan: RunPlan) -> Iterator[Fact]:
    waits, ranks = plan.waits, plan.wanted.ranks
    if waits is None or ranks == 1:
        return
    assert plan.lengths is not None
    drawn = f"simulated, {waits.steps:,} steps, lengths of {plan.lengths.items:,} documents"
    for way in waits.ways:
        fill = "" if way.fill is None else f"; packs {way.fill:.1%} full"
        yield Fact(way.name, f"{way.share:.1%} of all ranks' time{fill}", drawn)
    yield Fact("cost of a document", waits.cost, "assumed" if waits.cost.startswith("attention") else "given")


def _measured(plan: RunPlan) -> Iterator[Fact]:
    measured = plan.measured
    if measured is None:
        return
    how = f"one rank, {measured.cores} cores"
    for rate in measured.rates:
        items = f", {rate.items_per_s:,.0f} items" if rate.items_per_s else ""
        text = f"{rate.batches_per_s:,.1f} batches{items} a second; first batch after {rate.first_s:.2f} s"
        yield Fact(f"num_workers={rate.workers}", text, f"{how}, {rate.batches:,} batches")
    for name, ms in measured.stages.items():
        yield Fact(f"{name}", f"{ms:.2f} ms a batch", f"{measured.stages_of} batches, no workers")
    yield Fact("state of a rank", f"{human_bytes(measured.state_bytes)}, taken in {measured.state_ms:.2f} ms", how)
    yield Fact("resume to its first batch", f"{measured.resume_s:.2f} s", f"{how}, no workers")


_BINS = 24


def plan_page(plan: RunPlan) -> bytes:
    """The plan as a page with pictures: HTML in UTF-8."""
    pictures = {title: bars for title, bars in _pictures(plan) if bars}
    return render(
        "plan.html.jinja",
        title=plan.target,
        wanted=plan.wanted,
        path=plan.path,
        sections=sections(plan),
        advice=advice(plan),
        pictures=pictures,
    )


def _pictures(plan: RunPlan) -> Iterator[tuple[str, list[Bar]]]:
    """A title and the bars below it, for all that may be known."""
    totals = [] if plan.lengths is None else plan.lengths.totals
    yield f"length of {len(totals):,} documents, tokens", _length_bars(totals)
    waits = [] if plan.waits is None or plan.wanted.ranks == 1 else plan.waits.ways
    title = f"time that {plan.wanted.ranks} ranks wait for the slowest, simulated"
    yield title, [Bar(way.name, way.share, f"{way.share:.1%}") for way in waits]
    yield "mixing: entropy in units of a random draw's", _mixing_bars(plan.mixing)
    if plan.measured is not None:
        rates = [(f"num_workers={each.workers}", each.batches_per_s) for each in plan.measured.rates]
        yield "batches a second of one rank, measured", scaled_bars(rates, "{:,.1f}")
        stages = list(plan.measured.stages.items())
        yield "milliseconds of each stage a batch, measured", scaled_bars(stages, "{:.2f}")


def _length_bars(totals: list[int]) -> list[Bar]:
    """How many documents are of about each length; the bins grow by a factor."""
    if not totals:
        return []
    factor, edges = max(1.25, max(totals) ** (1 / _BINS)), [1.0]
    while edges[-1] <= max(totals):
        edges.append(float(int(edges[-1] * factor) + 1))
    counts: list[int] = np.histogram(np.maximum(totals, 1), bins=edges)[0].tolist()
    rows = [(f"up to {edge:,.0f}", count) for count, edge in zip(counts, edges[1:], strict=True)]
    return scaled_bars(rows[next(i for i, count in enumerate(counts) if count) :], "{:,}")


def _mixing_bars(mixing: Mixing | None) -> list[Bar]:
    if mixing is None:
        return []
    found = {
        "shards in a batch": mixing.batch_shards,
        f"stretches of {NEIGHBOURS} in a batch": mixing.batch_neighbours,
        "shards in a step": mixing.step_shards,
        f"stretches of {NEIGHBOURS} in a step": mixing.step_neighbours,
    }
    return [Bar(name, min(1.0, each.share), f"{each.share:.0%}") for name, each in found.items()]
