"""Turns of a `Blend`'s sources in one lane: from which source to draw next.

Weights may change during the run.

By samples, every `stride` samples of each lane are a piece. The draws of all L lanes in a piece are the integral of the
shares, rounded: each of the L x stride draws goes to the source that is furthest behind. These draws are divided
between the first and the second half of the lanes, and the draws of a half between its halves, down to single lanes.
Each group of lanes then has its fraction of the draws of each source since the start, as exactly as whole samples
allow (least squares over the sources). Three sources, 4 lanes, stride 2:

    lanes 0 1 2 3            5 a  2 b  1 c
    lanes 0 1 | lanes 2 3    3 a  1 b     | 2 a  1 b  1 c
    0 | 1 | 2 | 3            2 a | 1 a  1 b | 1 a  1 b | 1 a  1 c

A lane computes only the groups that it belongs to, from their counts at the start of the piece, which are its state.
Within a piece each lane shuffles its turns, so that lanes do not draw from the same source at the same time.

By tokens, the next turn goes to the source that is furthest behind the integral of its share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace
from math import gcd
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import derive_key, permutation, words
from savable_pipeline.core.lane import latest_shared
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.blending.schedule import Schedule, TargetCounts
from savable_pipeline.stages.stage_info import StageInfo

Counts: TypeAlias = Sequence[int]  # one count per source
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]  # samples or tokens of a source

_CACHED_COUNTS = 1 << 16  # number of counts to cache for the other lanes of the process
_PIECES_AT_ONCE = 4  # pieces that are planned together, which takes less time than one by one
_PHASES = 1024  # by tokens, the lane at position 0 starts at one of the first 1024 steps of a sequence


class TurnsState(msgspec.Struct):
    """The position of a lane's turns, and the sources and weights they belong to."""

    names: list[str]
    weights: int
    # by samples, the counts of each group of the lane at the start of the piece; by tokens, the counts of the lane
    counts: list[list[_Count]]
    taken: _Count  # samples or tokens since the counts started
    unit: _Count = 1  # tokens of the first item
    before: _Count = 0  # samples or tokens that were yielded before the counts started


def nearest(wanted: Sequence[int], unit: int, most: Sequence[int], n: int) -> list[int]:
    """Return `wanted` / `unit` of each source, rounded to whole draws.

    The results sum to `n`, each is 0 to its number in `most`, and the squared error is the least possible.
    """
    chosen = [min(max(number // unit, 0), limit) for number, limit in zip(wanted, most, strict=True)]
    missing = n - sum(chosen)
    if not missing:
        return chosen
    sign = 1 if missing > 0 else -1
    errors = [  # the error of each source in the direction of the change; the source with the least is changed first
        (sign * (count * unit - number), source)
        for source, (count, number, limit) in enumerate(zip(chosen, wanted, most, strict=True))
        if 0 <= count + sign <= limit
    ]
    heapify(errors)
    for _ in range(abs(missing)):
        error, source = errors[0]
        chosen[source] += sign
        if 0 <= chosen[source] + sign <= most[source]:
            heapreplace(errors, (error + unit, source))
        else:
            heappop(errors)
    return chosen


class _Half(NamedTuple):
    """Half of a group of lanes. Group 1 has all lanes, and groups 2 g and 2 g + 1 are the halves of group g."""

    number: int  # the number of this half as a group
    lanes: int  # the number of lanes in this half
    first: int  # the number of lanes in the first half of the group
    whole: int  # the number of lanes in the whole group


def halves_around(position: int, lanes: int) -> list[_Half]:
    """Return the groups with the lane at `position`, except the group of all lanes.

    They are its half of all lanes, its half of that half, and so on down to the lane alone.
    """
    halves, number = [], 1
    while lanes > 1:
        first = (lanes + 1) // 2
        second = position >= first
        number, own = 2 * number + second, lanes - first if second else first
        halves.append(_Half(number, own, first, lanes))
        position, lanes = position - first * second, own
    return halves


class LaneDraws:
    """Draws of all lanes of a run and of each group of lanes, piece by piece.

    Counts start at 0 when all lanes have drawn `begin` samples. Results are cached for the other lanes of the process.
    """

    def __init__(self, targets: TargetCounts, begin: int, lanes: int, *, stride: int) -> None:
        self.lanes, self.stride, self.sources = lanes, stride, targets.sources
        self._targets, self._begin, self._start = targets, begin, targets.at(begin)
        self._most_cached = max(4, _CACHED_COUNTS // (lanes * targets.sources))  # number of pieces to cache
        # counts after a piece, by piece, then by group
        self._cached: OrderedDict[int, dict[int, list[int]]] = OrderedDict()

    def after(self, piece: int, halves: Sequence[_Half], counts: Sequence[Counts]) -> list[list[int]]:
        """Return the counts of all lanes and of these halves after a piece.

        `counts` are the same counts before the piece.
        """
        if (cached := self._cached.get(piece)) is None:
            cached = self._cached[piece] = {1: self._count_all(piece, counts[0])}
            if len(self._cached) > self._most_cached:
                self._cached.popitem(last=False)
        counts_after = [cached[1]]
        for level, half in enumerate(halves):
            if half.number not in cached:
                self._halve(cached, half, counts[level], counts_after[-1], counts[level + 1])
            counts_after.append(cached[half.number])
        return counts_after

    def _count_all(self, piece: int, counts: Counts) -> list[int]:
        """Return the counts of all lanes after a piece. `counts` are those before it."""
        drawn, unit = self.lanes * self.stride, self._targets.unit
        before, after = (self._targets.at(self._begin + step * drawn) for step in (piece, piece + 1))
        wanted = [end - start - count * unit for end, start, count in zip(after, self._start, counts, strict=True)]
        most = [drawn if end > begin else 0 for begin, end in zip(before, after, strict=True)]
        return [count + added for count, added in zip(counts, nearest(wanted, unit, most, drawn), strict=True)]

    def _halve(self, cached: dict[int, list[int]], half: _Half, before: Counts, after: list[int], own: Counts) -> None:
        """Add the counts of both halves of a group after a piece to `cached`.

        `before` and `after` are the counts of the group before and after the piece. `own` are the counts of `half`
        before the piece.
        """
        drawn = [source for source, count in enumerate(after) if count != before[source]]
        first = list(own) if half.number % 2 == 0 else [both - one for both, one in zip(before, own, strict=True)]
        wanted = [half.first * after[source] - half.whole * first[source] for source in drawn]
        most = [after[source] - before[source] for source in drawn]
        for source, taken in zip(drawn, nearest(wanted, half.whole, most, half.first * self.stride), strict=True):
            first[source] += taken
        cached[half.number & ~1] = first
        cached[half.number | 1] = [both - one for both, one in zip(after, first, strict=True)]


class Turns:
    """Turns by number of samples in the lane at `position`.

    `key` seeds the shuffling of turns in this lane. `weights` is a hash of the schedule.
    """

    def __init__(self, draws: LaneDraws, position: int, key: int, weights: int) -> None:
        self.taken, self.weights = 0, weights
        self._draws, self._key = draws, key
        self._halves = halves_around(position, draws.lanes)
        self._piece = 0  # number of the current piece
        # counts before the current piece, of all lanes and of the lane's halves
        self._counts = [[0] * draws.sources for _ in range(len(self._halves) + 1)]
        self._after: list[list[list[int]]] = []  # the same counts after each planned piece
        self._turns = np.empty(0, np.int64)  # number of the source of each turn in the planned pieces

    def plan(self, n: int) -> NDArray[np.int64]:
        """Return the sources of the next `n` turns, int64 (n,), without taking them."""
        begin = self.taken - self._piece * self._draws.stride
        if begin + n > len(self._turns):
            self._plan_pieces(max(_PIECES_AT_ONCE, -(-(begin + n - len(self._turns)) // self._draws.stride)))
        return self._turns[begin : begin + n]

    def _plan_pieces(self, n: int) -> None:
        """Plan `n` more pieces, and shuffle the turns of each."""
        begin, stride = self._piece + len(self._after), self._draws.stride
        before = self._after[-1] if self._after else self._counts
        drawn = []  # draws of this lane from each source, by piece
        for piece in range(begin, begin + n):
            after = self._draws.after(piece, self._halves, before)
            drawn.append([end - start for end, start in zip(after[-1], before[-1], strict=True)])
            self._after.append(after)
            before = after
        turns = np.repeat(np.tile(np.arange(self._draws.sources), n), np.array(drawn).ravel()).reshape(n, stride)
        order = np.argsort(words(self._key, begin * stride, n * stride).reshape(n, stride), axis=1, kind="stable")
        self._turns = np.concatenate([self._turns, np.take_along_axis(turns, order, axis=1).ravel()])

    def advance(self, chosen: Collection[int]) -> None:
        """Count turns as taken. `chosen` is a prefix of the result of `plan`."""
        self.taken += len(chosen)
        finished = self.taken // self._draws.stride - self._piece  # number of finished pieces
        if finished:
            self._counts = self._after[finished - 1]
            self._after, self._turns = self._after[finished:], self._turns[finished * self._draws.stride :]
            self._piece += finished

    def save(self) -> dict[str, object]:
        """Return the fields of `TurnsState` without those that `Blend` adds."""
        return {"weights": self.weights, "counts": [list(counts) for counts in self._counts], "taken": self.taken}

    def restore(self, saved: TurnsState) -> None:
        """Return to the position in `saved`.

        Raises `CheckpointMismatchError` if it cannot belong to these turns.
        """
        piece = saved.taken // self._draws.stride
        sizes = [self._draws.lanes, *(half.lanes for half in self._halves)]
        sums = [lanes * piece * self._draws.stride for lanes in sizes]
        _check_counts(saved, [sum(counts) for counts in saved.counts] == sums, self._draws.sources)
        self.taken, self._piece, self._counts = saved.taken, piece, saved.counts
        self._after, self._turns = [], np.empty(0, np.int64)


class TokenTurns:
    """Turns by number of tokens, in one of `lanes` lanes.

    Counts start at 0 when all lanes have drawn `begin` tokens. `lags` says by how many items each source is behind its
    target at the start, in the unit of targets. Such an item counts with the length of the first one. `weights` is a
    hash of the schedule.
    """

    def __init__(self, targets: TargetCounts, begin: int, lanes: int, lags: Sequence[int], weights: int) -> None:
        self.counts = [0] * targets.sources
        self.taken, self.weights = 0, weights
        self._unit = 1  # tokens of the first item
        self._targets, self._begin, self._lanes = targets, begin, lanes
        self._token = targets.unit * lanes  # a token of this lane, in the unit of targets
        self._lags = [lag * lanes for lag in lags]  # not saved, because they follow from the schedule
        self._covered = self._covered_targets()

    def _covered_targets(self) -> list[int]:
        """Return how much of its target each source has covered, including its lag at the start."""
        start, lags = self._targets.at(self._begin), [lag * self._unit for lag in self._lags]
        return [target + count * self._token - lag for target, count, lag in zip(start, self.counts, lags, strict=True)]

    def next(self) -> int:
        """Return the number of the source that has the next turn.

        It is the source with a weight that is furthest below its target.
        """
        return self._targets.furthest_behind(self._begin + self.taken * self._lanes, self._covered)

    def advance(self, source: int, tokens: int) -> None:
        """Count an item of `tokens` tokens from the source."""
        self.counts[source] += tokens
        if self.taken:
            self._covered[source] += tokens * self._token
        else:
            self._unit = tokens
            self._covered = self._covered_targets()
        self.taken += tokens

    def save(self) -> dict[str, object]:
        """Return the fields of `TurnsState` without those that `Blend` adds."""
        return {"weights": self.weights, "counts": [list(self.counts)], "taken": self.taken, "unit": self._unit}

    def restore(self, saved: TurnsState) -> None:
        """Return to the position in `saved`.

        Raises `CheckpointMismatchError` if it cannot belong to these turns.
        """
        _check_counts(saved, [sum(counts) for counts in saved.counts] == [saved.taken], len(self.counts))
        (self.counts,), self.taken, self._unit = saved.counts, saved.taken, saved.unit
        self._covered = self._covered_targets()


def _check_counts(saved: TurnsState, sums_match: bool, sources: int) -> None:
    """Raise `CheckpointMismatchError` if sums or lengths of saved counts are wrong."""
    if not sums_match or any(len(counts) != sources for counts in saved.counts):
        raise CheckpointMismatchError("Blend: the counts of the state are damaged. Use another copy of the checkpoint.")


def build_turns(
    info: StageInfo, schedule: Schedule, active: list[str], before: int, *, stride: int
) -> Turns | TokenTurns:
    """Build the turns of the `active` sources in a lane.

    The lane has already yielded `before` samples or tokens.

    `info` is that of the `Blend`. Raises ValueError like `TargetCounts`.
    """
    lane, weights = info.lane, schedule.key()
    begin = min(before * lane.count, schedule.starts[-1])  # after the last point, weights no longer depend on `begin`
    targets_key = (weights, *active, begin)
    targets: TargetCounts = lane.shared(("targets", *targets_key), lambda: TargetCounts(schedule, active, begin))
    key = derive_key(lane.seed, "blend", lane.epoch, info.depth, info.branch)  # equal in all lanes
    position = int(permutation(key, lane.count)[lane.index])
    if schedule.unit == "tokens":
        lags = _lags(targets.rates, lane.count, position, key % _PHASES)
        return TokenTurns(targets, begin, lane.count, lags, weights)
    name = ("blend draws", info.branch, lane.count, stride)
    draws = latest_shared(lane, name, targets_key, lambda: LaneDraws(targets, begin, lane.count, stride=stride))
    return Turns(draws, position, info.key("blend turns"), weights)


def _lags(rates: Sequence[int], lanes: int, position: int, phase: int) -> list[int]:
    """Return how far each source is behind its target at the start of a lane, in the unit of targets.

    Lanes start at different steps of one sequence of turns, so that they do not all draw from the same source at once.
    The result is for the end of a lane's first step, because the source that is furthest behind then has the turn.
    """
    unit, common = sum(rates), gcd(*rates)
    shares = [rate // common for rate in rates]
    total = unit // common
    step = phase + position * total // lanes  # step at which this lane starts
    taken = nearest([share * step for share in shares], total, [step if share else 0 for share in shares], step)
    return [common * (share * (step + 1) - count * total) for share, count in zip(shares, taken, strict=True)]
