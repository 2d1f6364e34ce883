"""`RunPlan`: all that is predicted of a run; `plan_run` computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.tools.plan.measure import RankMeasurement, measure
from savable_pipeline.tools.plan.memory import RankMemory, SourceBytes, plan_bytes, plan_memory
from savable_pipeline.tools.plan.mixing import Mixing, measure_mixing
from savable_pipeline.tools.plan.path_parts import LaneBuilder, Lengths, PathParts, sample_lengths
from savable_pipeline.tools.plan.steps import (
    LanesChoice,
    Steps,
    better_lanes,
    count_steps,
    fitting_lanes,
    lanes_choices,
)
from savable_pipeline.tools.plan.waits import Waits, simulate_waiting

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Wanted:
    """What to plan for: `samples` documents are looked at, and `seconds` measured for each number of workers."""

    ranks: int = 1
    nodes: int = 1
    samples: int = 500
    hidden: int = 2048
    seconds: float | None = None
    """None measures nothing."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(
                f"--nodes must divide --ranks, so that each node has as many ranks: {self.ranks} ranks on {self.nodes} "
                "nodes"
            )
        if self.samples < 1 or self.hidden < 1 or (self.seconds is not None and self.seconds <= 0):
            raise ValueError("--samples and --hidden must be at least 1, and --seconds more than 0")


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run; see the fields' classes."""

    target: str
    wanted: Wanted
    lanes: int
    """Of the loader."""
    planned_lanes: int
    """The lanes of all other predictions: the loader's or, if the ranks do not divide them, the next that they do."""
    better_lanes: int
    path: str
    population: int
    lengths: Lengths | None
    steps: Steps
    choices: list[LanesChoice]
    mixing: Mixing | None
    memory: RankMemory
    sources: list[SourceBytes]
    waits: Waits | None
    measured: RankMeasurement | None


def plan_run(
    settings: LoaderSettings, wanted: Wanted, target: str = "", progress: Progress = lambda done, total: None
) -> RunPlan:
    """Work out the plan of a run with these settings on `wanted.ranks` ranks.

    Opens the data, and indexes them on first use; encodes a sample of them. Raises ValueError for wrong wishes, and
    what the pipeline raises.
    """
    lanes = fitting_lanes(settings.lanes, wanted.ranks)
    builder = LaneBuilder(settings)
    parts = builder.build(0, lanes)
    lengths = sample_lengths(builder, wanted.samples, of=lanes)
    waits = None
    if lengths is not None:
        waits = simulate_waiting(
            parts, lengths, ranks=wanted.ranks, hidden=wanted.hidden, seed=settings.seed % (1 << 32)
        )
    packed = 1.0 if waits is None else waits.items_a_pack
    batch = _items_a_batch(parts, waits)
    choices = lanes_choices(settings, builder, lengths, ranks=wanted.ranks, items_a_batch=batch)
    each = 1.0 if lengths is None else lengths.items_a_sample
    drawn = max(1, round((batch or 1) / max(each, 1e-9)))
    return RunPlan(
        target=target,
        wanted=wanted,
        lanes=settings.lanes,
        planned_lanes=lanes,
        better_lanes=better_lanes(settings, choices, planned=lanes),
        path=repr(parts.last),
        population=parts.population,
        lengths=lengths,
        steps=count_steps(settings, parts, lengths, ranks=wanted.ranks, items_a_batch=batch),
        choices=choices,
        mixing=measure_mixing(builder, parts, ranks=wanted.ranks, samples_a_batch=drawn),
        memory=plan_memory(
            settings,
            parts,
            lengths,
            ranks=wanted.ranks,
            open_items=0.0 if waits is None else waits.open_items,
            items_a_pack=packed,
        ),
        sources=plan_bytes(builder, parts, ranks=wanted.ranks, nodes=wanted.nodes),
        waits=waits,
        measured=_measured(settings, wanted, lanes, progress),
    )


def _items_a_batch(parts: PathParts, waits: Waits | None) -> float | None:
    """The mean number of items in a batch; None where it is not known: batches of buckets, packs of unknown lengths."""
    if parts.rows is None or (parts.packer is not None and waits is None):
        return None
    return parts.rows * (1.0 if waits is None else waits.items_a_pack)


def _measured(settings: LoaderSettings, wanted: Wanted, lanes: int, progress: Progress) -> RankMeasurement | None:
    if wanted.seconds is None:
        return None
    return measure(replace(settings, lanes=lanes), ranks=wanted.ranks, seconds=wanted.seconds, told=progress)
