"""`begin_turns`: the turns of a `Blend`'s sources in one lane, which starts at a place of its own among all lanes."""

from __future__ import annotations

from collections.abc import Mapping

from savable_pipeline.core.keyed_random import derive_key, permutation
from savable_pipeline.core.lane import Lane
from savable_pipeline.stages.blending.blend_counts import LaneCounts
from savable_pipeline.stages.blending.blend_turns import LaneTurns, TokenTurns, Turns, lags_at
from savable_pipeline.stages.blending.schedule import Dues, Schedule
from savable_pipeline.stages.blending.scheduled_turns import LaneDues, ScheduledTokenTurns, ScheduledTurns
from savable_pipeline.stages.stage_info import StageInfo

_PHASES = 1024  # lane 0 starts at one of the first 1024 steps of the sequence


def begin_turns(
    info: StageInfo, weights: Mapping[str, int], active: list[str], *, by_tokens: bool, stride: int
) -> Turns | TokenTurns:
    """The turns of the sources in `active`, in the lane of `info`, which is the `Blend`'s own."""
    lane, own = info.lane, [weights[name] for name in active]
    alone = lane.count == 1 or len(active) < len(weights)  # lanes differ in the step at which a source ends
    shared_key = derive_key(lane.seed, "blend", lane.epoch, info.depth, info.branch)  # the same in all lanes
    if by_tokens:
        return TokenTurns(own, [0] * len(own) if alone else _lags(lane, tuple(own), shared_key % _PHASES))
    if alone:
        return Turns(own)
    counts = lane.shared(
        ("blend counts", tuple(own), lane.count, stride), lambda: LaneCounts(own, lane.count, stride=stride)
    )
    return LaneTurns(own, counts, int(permutation(shared_key, lane.count)[lane.index]), info.key("blend turns"))


def begin_schedule(
    info: StageInfo, schedule: Schedule, active: list[str], before: int, *, stride: int
) -> ScheduledTurns | ScheduledTokenTurns:
    """The turns by a schedule of a lane that has given `before` samples or tokens. Raises ValueError as `Dues` does."""
    lane, settings, begin = info.lane, repr(schedule.settings()), before * info.lane.count
    dues: Dues = lane.shared(("dues", settings, *active, begin), lambda: Dues(schedule, active, begin))
    due = LaneDues(dues, lane.count, before)
    digest = [derive_key("schedule", settings)]  # what a state's counts belong to
    shared_key = derive_key(lane.seed, "blend", lane.epoch, info.depth, info.branch)
    first = [schedule.weights[0].get(name, 0) for name in active]
    known = tuple(weight for weight in first if weight)
    lags = [0] * len(first)
    if lane.count > 1 and len(known) > 1 and not before:
        given = iter(_lags(lane, known, shared_key % _PHASES))
        lags = [next(given) if weight else 0 for weight in first]
    lags = [lag * due.unit // sum(known) if known else 0 for lag in lags]
    if schedule.unit == "tokens":
        return ScheduledTokenTurns(due, digest, lags)
    return ScheduledTurns(due, digest, lags, info.key("blend turns"), stride)


def _lags(lane: Lane, weights: tuple[int, ...], phase: int) -> list[int]:
    """How far each source is behind where this lane starts: the lanes start at successive steps of one sequence."""
    found: list[list[int]] = lane.shared(
        ("blend lags", weights, lane.count, phase), lambda: lags_at(weights, range(phase, phase + lane.count))
    )
    return found[lane.index]
