"""`Schedule`: weights of a `Blend` that change during the run.

Weights are a function of the number of samples or tokens that all lanes have drawn. Each point has the weights from
such a number on. The target of a source is the integral of its share, in closed form and in integers:

    share    ──┐ step        ╲ linear
               └──────        ╲____
             0   100   drawn  0  100
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import lcm
from typing import Any, Literal, NamedTuple, get_args

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.weights import Weight, integer_weights
from savable_pipeline.stages.advice import check_choice

Unit = Literal["samples", "tokens"]
Shape = Literal["step", "linear"]
_LARGEST = 1 << 62


class Schedule:
    """Weights that change during a run.

    An example is `Schedule([(0, {"web": 8, "code": 2}), (1_000_000, {"web": 4, "code": 6})])`.

    Counts are sums over all lanes of the run, so they do not depend on the number of ranks and workers.

    Args:
        points: Pairs of a count and the weights from this count on. Counts ascend from 0, and the last weights stay. A
            source without a weight at a point, or with 0, is not drawn from there on.
        unit: What is counted since the run started, over all epochs: "samples" (or items) or "tokens" of the `Blend`.
        shape: "step": weights stay the same until the next point. "linear": shares change linearly from point to point.

    Raises:
        ValueError: Counts do not ascend from 0, or weights are not numbers or are all 0.

    Example:
        >>> schedule = sp.Schedule([(0, {"0": 1}), (80, {"0": 1, "1": 1})])
        >>> lane = sp.Lane(seed=7)
        >>> sources = {name: sp.TarShardReader(f"shards/{name}.tar", lane) for name in "01"}
        >>> blend = sp.Blend(sources, weights=schedule)
        >>> drawn = [next(blend).shard for _ in range(160)]
        >>> drawn[:80].count("1.tar"), drawn[80:].count("1.tar")
        (0, 40)
    """

    def __init__(
        self, points: Iterable[tuple[int, Mapping[str, Weight]]], *, unit: Unit = "samples", shape: Shape = "step"
    ) -> None:
        for name, value, choices in [("unit", unit, get_args(Unit)), ("shape", shape, get_args(Shape))]:
            check_choice("Schedule", name, value, choices)
        listed = list(points)
        self.starts = [_count(start) for start, _ in listed]
        if not listed or self.starts[0] != 0 or any(start >= following for start, following in pairwise(self.starts)):
            raise ValueError(f"Schedule: the points must start at 0 and ascend, not {self.starts}")
        self.weights = [integer_weights({name: w for name, w in weights.items() if w != 0}) for _, weights in listed]
        self.unit = unit
        self.shape = shape

    @property
    def names(self) -> set[str]:
        """Return the sources that have a weight at some point."""
        return {name for weights in self.weights for name in weights}

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal to those of a saved state."""
        points = [[start, weights] for start, weights in zip(self.starts, self.weights, strict=True)]
        return {"points": points, "unit": self.unit, "shape": self.shape}

    def key(self) -> int:
        """Return a hash of the settings."""
        return derive_key("schedule", repr(self.settings()))


def _count(start: object) -> int:
    """Return the count of a point. Raises ValueError if it is invalid."""
    if not isinstance(start, int) or not 0 <= start < _LARGEST:
        raise ValueError(f"Schedule: a point must be an int of at least 0, not {start!r}")
    return start


class _Piece(NamedTuple):
    """The schedule between two points: the rates and targets at its start, and how rates grow."""

    start: int
    rates: list[int]
    growth: list[int]  # growth of the rates from the start to the end of the piece; empty if they are constant
    length: int  # in draws; 0 if the piece is endless
    targets: list[int]  # at the start
    sources: list[int]  # numbers of the sources with a share in the piece


class TargetCounts:
    """Target counts of some sources of a schedule, as integers in units of 1 / `unit`.

    Targets are 0 at the last point at or before the count `begin`, and sources have their `rates` there. Raises
    ValueError if all these sources have weight 0 at that point or a later one.
    """

    def __init__(self, schedule: Schedule, names: Sequence[str], begin: int = 0) -> None:
        first = bisect_right(schedule.starts, begin) - 1
        starts, points = schedule.starts[first:], schedule.weights[first:]
        totals = [sum(weights.get(name, 0) for name in names) for weights in points]
        if not all(totals):
            raise ValueError(
                f"Schedule: at {starts[totals.index(0)]:,} all of {', '.join(names)} have weight 0. Raise one, or "
                "use epochs=None."
            )
        denominator = lcm(*totals)
        shares = [
            [weights.get(name, 0) * (denominator // total) for name in names]
            for weights, total in zip(points, totals, strict=True)
        ]
        linear = schedule.shape == "linear"
        lengths = [end - start for start, end in pairwise(starts)]
        scale = 2 * lcm(*lengths) if linear and lengths else 1
        self.unit = denominator * scale
        self.sources = len(names)
        self.rates = [share * scale for share in shares[0]]  # they sum to `unit`
        self._starts = starts
        self._pieces: list[_Piece] = []
        targets = [0] * len(names)
        for i, start in enumerate(starts):
            length = lengths[i] if i < len(lengths) else 0
            grows = linear and length
            following = shares[i + 1] if grows else shares[i]
            growth = [end - begin for begin, end in zip(shares[i], following, strict=True)]
            with_share = [source for source, pair in enumerate(zip(shares[i], following, strict=True)) if any(pair)]
            rates = [share * scale for share in shares[i]]
            growth = [change * scale for change in growth] if any(growth) else []
            piece = _Piece(start, rates, growth, length, targets, with_share)
            self._pieces.append(piece)
            if length:
                targets = _target_counts(piece, start + length)

    def at(self, count: int) -> list[int]:
        """Return the target of each source after `count` draws.

        Their sum is `unit` times the number of draws since they were 0.
        """
        return _target_counts(self._pieces[bisect_right(self._starts, count) - 1], count)

    def furthest_behind(self, count: int, covered: Sequence[int]) -> int:
        """Return the number of the source with a weight that is furthest below its target.

        `covered` has the draws of each source so far, in the unit of targets.
        """
        piece = self._pieces[bisect_right(self._starts, count) - 1]
        if piece.growth:
            targets = _target_counts(piece, count)
            behind = [targets[source] - covered[source] for source in piece.sources]
        else:  # equal to the above, but takes half the time
            targets, rates, drawn = piece.targets, piece.rates, count - piece.start
            behind = [targets[source] + drawn * rates[source] - covered[source] for source in piece.sources]
        return piece.sources[behind.index(max(behind))]


def _target_counts(piece: _Piece, count: int) -> list[int]:
    """Return the targets after `count` draws, which is within the piece: the integral of the rates."""
    drawn = count - piece.start
    if not piece.growth:
        return [target + drawn * rate for target, rate in zip(piece.targets, piece.rates, strict=True)]
    parts = zip(piece.targets, piece.rates, piece.growth, strict=True)
    return [target + drawn * rate + growth * drawn * drawn // (2 * piece.length) for target, rate, growth in parts]
