"""`RunPlan`: all that the index says of a run; `plan_run` computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.tools.plan.memory import RankMemory, SourceBytes, plan_bytes, plan_memory
from savable_pipeline.tools.plan.path_parts import LaneBuilder
from savable_pipeline.tools.plan.steps import (
    LanesChoice,
    Steps,
    better_lanes,
    count_steps,
    fitting_lanes,
    lanes_choices,
)


@dataclass(frozen=True)
class WorkersNeeded:
    """What keeps up with the trainers, by what was measured."""

    a_rank: int
    a_node: int
    nodes: int

    @classmethod
    def of(cls, batch_s: float, step_s: float, *, ranks: int, a_node: int) -> WorkersNeeded:
        """For batches that take a worker so long, a batch of each rank a step. Raises ValueError for none."""
        if not (batch_s > 0 and step_s > 0 and a_node > 0):
            raise ValueError("--batch-s, --step-s and --node-workers are given together, each more than 0")
        busy = round(batch_s / step_s, 9)
        return cls(math.ceil(busy), a_node, math.ceil(ranks * busy / a_node))


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run; see the fields' classes."""

    target: str
    ranks: int
    nodes: int
    lanes: int
    """Of the loader."""
    planned_lanes: int
    """The lanes of all that follows: the loader's or, if the ranks do not divide them, the next that they do."""
    better_lanes: int
    path: str
    population: int
    steps: Steps
    choices: list[LanesChoice]
    memory: RankMemory
    sources: list[SourceBytes]
    workers: WorkersNeeded | None = None


def plan_run(
    settings: LoaderSettings, *, ranks: int = 1, nodes: int = 1, target: str = "", workers: WorkersNeeded | None = None
) -> RunPlan:
    """Work out the plan of a run with these settings on this many ranks, spread over the nodes.

    Opens the data, and indexes them on first use; encodes nothing. Raises ValueError for wrong wishes, and what the
    pipeline raises.
    """
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ValueError(
            f"--nodes must divide --ranks, so that each node has as many ranks: {ranks} ranks on {nodes} nodes"
        )
    lanes = fitting_lanes(settings.lanes, ranks)
    builder = LaneBuilder(settings)
    parts = builder.build(0, lanes)
    choices = lanes_choices(settings, builder, ranks=ranks)
    return RunPlan(
        target=target,
        ranks=ranks,
        nodes=nodes,
        lanes=settings.lanes,
        planned_lanes=lanes,
        better_lanes=better_lanes(settings, choices, planned=lanes),
        path=repr(parts.last),
        population=parts.population,
        steps=count_steps(settings, parts, ranks=ranks),
        choices=choices,
        memory=plan_memory(settings, parts, ranks=ranks),
        sources=plan_bytes(builder, parts, ranks=ranks, nodes=nodes),
        workers=workers,
    )
