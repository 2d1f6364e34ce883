"""`Steps`: how many steps an epoch has, and what its tail leaves, counted where stages can count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from savable_pipeline.run.loader.epoch_end import counted_end
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.tools.plan.path_parts import LaneBuilder, PathParts

How = Literal["counted", "one item a sample", "unknown"]
_MULTIPLES = (1, 2, 3, 4, 6)  # of the ranks: numbers of lanes to choose from
_NEAR = 2  # times fewer or more ranks that are shown


@dataclass(frozen=True)
class Steps:
    """The steps of an epoch for these ranks: those of a pass over the data where the run never ends."""

    how: How
    endless: bool
    steps: float
    left_batches: float
    """That no rank receives: of lanes that have more than the others (`tail="stop"`)."""
    left_samples: float
    filler_rows: float
    """Rows that only fill up the last steps (`tail="pad"`)."""
    epoch_slots: int | None = None


@dataclass(frozen=True)
class LanesChoice:
    """What a number of lanes would mean; `steps` is None where the ranks do not divide it."""

    lanes: int
    fits: bool
    worlds: list[int] = field(repr=False)
    """The numbers of ranks near the wanted one that could go on with the run."""
    workers: int
    """That a rank can have at most."""
    steps: float | None
    left_share: float | None


def count_steps(settings: LoaderSettings, parts: PathParts, *, ranks: int) -> Steps:
    """The steps of an epoch; where encoders may leave samples out or make several items, as if each made one."""
    endless = parts.last.info.endless
    if endless and settings.epoch_slots is not None:
        return Steps("counted", True, settings.epoch_slots / ranks, 0, 0, 0, settings.epoch_slots)
    counts = [] if endless else [parts.last.count_of(lane, 0) for lane in range(parts.last.lane.count)]
    known = [count for count in counts if count is not None]
    if known and len(known) == len(counts):
        return _finite("counted", settings, parts, known, ranks)
    if parts.rows is None or parts.by_length:
        return Steps("unknown", endless, 0, 0, 0, 0)
    if endless:
        return Steps("one item a sample", True, parts.population / parts.rows / ranks, 0, 0, 0)
    each = [-(-round(parts.reader_samples(lane)) // parts.rows) for lane in range(len(counts))]
    return _finite("one item a sample", settings, parts, each, ranks)


def _finite(how: How, settings: LoaderSettings, parts: PathParts, counts: list[int], ranks: int) -> Steps:
    end, lanes, rows = counted_end(counts, pad=settings.pad), len(counts), parts.rows or 1
    held = [round(parts.reader_samples(lane)) for lane in range(lanes)]
    if settings.pad:
        steps = -(-end // ranks)
        return Steps(how, False, steps, 0, 0, steps * ranks * rows - sum(held))
    given = sum(min(own, end // lanes * rows) for own in held)
    return Steps(how, False, end / ranks, sum(counts) - end, sum(held) - given, 0)


def fitting_lanes(lanes: int, ranks: int) -> int:
    """`lanes` if the ranks divide it, else the next multiple of the ranks."""
    return -(-lanes // ranks) * ranks


def lanes_choices(settings: LoaderSettings, builder: LaneBuilder, *, ranks: int) -> list[LanesChoice]:
    """The lanes of the run, those that are planned, and multiples of the ranks, ascending."""
    planned = fitting_lanes(settings.lanes, ranks)
    population = builder.build(0, planned).population
    choices = []
    for lanes in sorted({settings.lanes, planned, *(ranks * multiple for multiple in _MULTIPLES)}):
        worlds = [n for n in range(1, lanes + 1) if lanes % n == 0 and ranks / _NEAR <= n <= ranks * _NEAR]
        if lanes % ranks:
            choices.append(LanesChoice(lanes, False, worlds, 0, None, None))
            continue
        parts = builder.build(0, lanes)
        steps = count_steps(settings, parts, ranks=ranks)
        left = None if steps.how == "unknown" else steps.left_samples / population
        choices.append(LanesChoice(lanes, True, worlds, lanes // ranks, steps.steps, left))
    return choices


def better_lanes(settings: LoaderSettings, choices: list[LanesChoice], *, planned: int) -> int:
    """The fewest lanes that serve most numbers of ranks, without leaving over 1 % more of the data than need be.

    The `planned` ones if they do as well. Where a rank has workers, each needs a lane.
    """
    fitting = [each for each in choices if each.fits and each.workers >= settings.num_workers]
    fitting = fitting or [each for each in choices if each.fits]
    least = min(each.left_share or 0.0 for each in fitting)
    good = [each for each in fitting if (each.left_share or 0.0) <= least + 0.01 and each.steps != 0] or fitting
    most = max(len(each.worlds) for each in good)
    best = [each.lanes for each in good if len(each.worlds) == most]
    return planned if planned in best else best[0]
