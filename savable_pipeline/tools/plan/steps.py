"""`Steps`: how many steps an epoch has, and what its tail leaves, counted where stages can count, else estimated."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log, sqrt
from typing import Literal

from savable_pipeline.run.loader.epoch_end import counted_end
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.capabilities import count_of
from savable_pipeline.tools.plan.path_parts import LaneBuilder, Lengths, PathParts

How = Literal["counted", "estimated", "unknown"]
_MULTIPLES = (1, 2, 3, 4, 6)  # of the ranks: numbers of lanes to choose from
_NEAR = 2  # times fewer or more ranks that are shown


@dataclass(frozen=True)
class Steps:
    """The steps of an epoch for these ranks: those of a pass over the data where the run never ends."""

    how: How
    endless: bool
    steps: float
    error: float
    """Twice the standard error that the sample leaves; 0 where steps are counted."""
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


def count_steps(
    settings: LoaderSettings, parts: PathParts, lengths: Lengths | None, *, ranks: int, items_a_batch: float | None
) -> Steps:
    """The steps of an epoch; `items_a_batch` is the mean number of items in a batch, if it is known."""
    lanes = parts.last.lane.count
    counts = [count_of(parts.last, lane, 0) for lane in range(lanes)]
    known = [count for count in counts if count is not None]
    if parts.last.info.endless:
        return _endless(settings, parts, lengths, ranks, items_a_batch)
    if len(known) == lanes:
        return _counted(settings, parts, known, ranks)
    return _estimated(settings, parts, lengths, ranks, items_a_batch)


def _counted(settings: LoaderSettings, parts: PathParts, counts: list[int], ranks: int) -> Steps:
    end, lanes, rows = counted_end(counts, pad=settings.pad), len(counts), parts.rows or 1
    held = [round(parts.reader_samples(lane)) for lane in range(lanes)]
    if settings.pad:
        steps = -(-end // ranks)
        return Steps("counted", False, steps, 0, 0, 0, steps * ranks * rows - sum(held))
    given = sum(min(own, end // lanes * rows) for own in held)
    return Steps("counted", False, end / ranks, 0, sum(counts) - end, sum(held) - given, 0)


def _endless(
    settings: LoaderSettings, parts: PathParts, lengths: Lengths | None, ranks: int, items_a_batch: float | None
) -> Steps:
    if settings.epoch_slots is not None:
        return Steps("counted", True, settings.epoch_slots / ranks, 0, 0, 0, 0, settings.epoch_slots)
    if items_a_batch is None:
        return Steps("unknown", True, 0, 0, 0, 0, 0)
    each = 1.0 if lengths is None else lengths.items_a_sample
    steps = parts.population * each / items_a_batch / ranks
    return Steps("estimated", True, steps, steps * _relative_error(parts, lengths), 0, 0, 0)


def _estimated(
    settings: LoaderSettings, parts: PathParts, lengths: Lengths | None, ranks: int, items_a_batch: float | None
) -> Steps:
    """From the mean of the sample, and how far the lane with the fewest or most batches is from the mean one."""
    if lengths is None or items_a_batch is None:
        return Steps("unknown", False, 0, 0, 0, 0, 0)
    lanes = parts.last.lane.count
    items = [parts.reader_samples(lane) * lengths.items_a_sample for lane in range(lanes)]
    spread = lengths.spread if parts.packer is not None else 0.0
    far = spread * sqrt(2 * log(lanes)) if lanes > 1 else 0.0  # the farthest of this many normal deviations
    sign = 1 if settings.pad else -1
    batches = [max(0.0, each + sign * far * sqrt(each)) / items_a_batch for each in items]
    rounds = ceil(max(batches)) if settings.pad else int(min(batches))
    steps, error = rounds * lanes / ranks, _relative_error(parts, lengths)
    rows = parts.rows or 1
    if settings.pad:
        return Steps("estimated", False, steps, steps * error, 0, 0, steps * ranks * rows - sum(items) / items_a_batch)
    left = sum(items) / items_a_batch - rounds * lanes
    samples = left * items_a_batch / max(1e-9, lengths.items_a_sample)
    return Steps("estimated", False, steps, steps * error, left, samples, 0)


def _relative_error(parts: PathParts, lengths: Lengths | None) -> float:
    if lengths is None or not lengths.items:
        return 0.0
    left_out = 1 / sqrt(lengths.items) if lengths.items != lengths.samples else 0.0
    spread = lengths.spread / sqrt(lengths.items) if parts.packer is not None else 0.0
    return 2 * sqrt(left_out**2 + spread**2)


def fitting_lanes(lanes: int, ranks: int) -> int:
    """`lanes` if the ranks divide it, else the next multiple of the ranks."""
    return -(-lanes // ranks) * ranks


def lanes_choices(
    settings: LoaderSettings,
    builder: LaneBuilder,
    lengths: Lengths | None,
    *,
    ranks: int,
    items_a_batch: float | None,
) -> list[LanesChoice]:
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
        steps = count_steps(settings, parts, lengths, ranks=ranks, items_a_batch=items_a_batch)
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
