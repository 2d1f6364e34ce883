"""The turns of a `Blend`'s sources by a `Schedule`, in one lane.

A lane that has yielded n samples is at count n L of the schedule, with L lanes: each yields an equal part of what all
draw, so no number of ranks or workers matters. The next turn is of the source that is furthest behind the integral of
its share, among those that have a share now. Lanes start at successive steps of one sequence, and each shuffles its
turns within pieces of `stride`, so that lanes do not hold the same source at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from savable_pipeline.core.keyed_random import derive_key, permutation
from savable_pipeline.core.lane import latest_shared
from savable_pipeline.stages.blending.blend_counts import LaneCounts
from savable_pipeline.stages.blending.blend_turns import LaneTurns, TokenTurns, Turns, lags_at
from savable_pipeline.stages.blending.schedule import Dues, Schedule
from savable_pipeline.stages.stage_info import StageInfo


class LaneDues:
    """What the sources should have given in one of `lanes` lanes since it had given `before`, in units of `unit`."""

    def __init__(self, dues: Dues, lanes: int, before: int) -> None:
        self.unit = dues.unit * lanes
        self._dues = dues
        self._lanes = lanes
        self._before = before * lanes
        self._there = dues.at(self._before)

    def at(self, count: int) -> list[int]:
        """The dues of each source after the lane has given `count` more; they sum to `count` times `unit`."""
        now = self._dues.at(self._before + count * self._lanes)
        return [due - before for due, before in zip(now, self._there, strict=True)]

    def furthest_behind(self, given: Sequence[int], now: list[int], then: list[int], lags: Sequence[int]) -> int:
        """The source that is furthest behind its due `then`, among those whose due grows from `now`."""
        unit, grows = self.unit, zip(now, then, strict=True)
        behind = [
            due - count * unit + lag if due > before else None
            for (before, due), count, lag in zip(grows, given, lags, strict=True)
        ]
        most = max(value for value in behind if value is not None)
        return behind.index(most)


class ScheduledTurns(Turns):
    """Turns by number of samples. `lags`, of each source, are in units of `dues`; `key` shuffles each piece."""

    def __init__(self, dues: LaneDues, weights: Sequence[int], lags: Sequence[int], key: int, stride: int) -> None:
        self.weights = list(weights)
        self.counts = [0] * len(lags)
        self.begin = list(self.counts)  # the counts at the start of the piece
        self._dues = dues
        self._lags = lags
        self._key = key
        self._stride = stride
        self._piece: tuple[list[int], list[int]] = ([], [])  # the counts at a start, and the turns from there

    def plan(self, n: int) -> list[int]:
        """The numbers of the sources of the next `n` turns; counts nothing as taken."""
        chosen: list[int] = []
        begin, done = self.begin, self.taken - sum(self.begin)
        while len(chosen) < n:
            turns = self._turns_from(begin)
            chosen += turns[done : done + n - len(chosen)]
            begin, done = _after(begin, turns), 0
        return chosen

    def take(self, chosen: Iterable[int]) -> None:
        """Count these turns, which are the first of the plan, as taken."""
        for source in chosen:
            if self.taken == sum(self.begin) + self._stride:
                self.begin = list(self.counts)
            self.counts[source] += 1
        if self.taken == sum(self.begin) + self._stride:
            self.begin = list(self.counts)

    def _turns_from(self, begin: list[int]) -> list[int]:
        if self._piece[0] != begin:
            step, given, turns = sum(begin), list(begin), []
            now = self._dues.at(step)
            for after in range(step + 1, step + self._stride + 1):
                then = self._dues.at(after)
                source = self._dues.furthest_behind(given, now, then, self._lags)
                given[source] += 1
                turns.append(source)
                now = then
            order = permutation(derive_key(self._key, step), self._stride).tolist()
            self._piece = list(begin), [turns[place] for place in order]
        return self._piece[1]


def _after(counts: Sequence[int], turns: Sequence[int]) -> list[int]:
    after = list(counts)
    for source in turns:
        after[source] += 1
    return after


class ScheduledTokenTurns(TokenTurns):
    """Turns by number of tokens; a lag counts items of the length of the first one."""

    def __init__(self, dues: LaneDues, weights: Sequence[int], lags: Sequence[int]) -> None:
        super().__init__(weights, lags=[])
        self.counts = [0] * len(lags)
        self._dues = dues
        self._lags = lags  # not in the state: they follow from the schedule

    def next(self) -> int:
        """The number of the source whose turn is next."""
        given = sum(self.counts)
        lags = [lag * self.unit for lag in self._lags]
        return self._dues.furthest_behind(self.counts, self._dues.at(given), self._dues.at(given + 1), lags)


_PHASES = 1024  # lane 0 starts at one of the first 1024 steps of the sequence


def begin_turns(
    info: StageInfo, weights: Mapping[str, int], active: list[str], *, by_tokens: bool, stride: int
) -> Turns | TokenTurns:
    """The turns of the sources in `active`, in the lane of `info`, which is the `Blend`'s own."""
    lane, own = info.lane, [weights[name] for name in active]
    alone = lane.count == 1 or len(active) < len(weights)  # lanes differ in the step at which a source ends
    shared_key = derive_key(lane.seed, "blend", lane.epoch, info.depth, info.branch)  # the same in all lanes
    if by_tokens:
        return TokenTurns(own, [0] * len(own) if alone else _lags(info, tuple(own), shared_key % _PHASES))
    if alone:
        return Turns(own)
    name = ("blend counts", info.branch, lane.count, stride)
    counts = latest_shared(lane, name, tuple(own), lambda: LaneCounts(own, lane.count, stride=stride))
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
        given = iter(_lags(info, known, shared_key % _PHASES))
        lags = [next(given) if weight else 0 for weight in first]
    lags = [lag * due.unit // sum(known) if known else 0 for lag in lags]
    if schedule.unit == "tokens":
        return ScheduledTokenTurns(due, digest, lags)
    return ScheduledTurns(due, digest, lags, info.key("blend turns"), stride)


def _lags(info: StageInfo, weights: tuple[int, ...], phase: int) -> list[int]:
    """How far each source is behind where this lane starts: the lanes start at successive steps of one sequence."""
    lane = info.lane
    name, of = ("blend lags", info.branch, lane.count), (weights, phase)
    return latest_shared(lane, name, of, lambda: lags_at(weights, range(phase, phase + lane.count)))[lane.index]
