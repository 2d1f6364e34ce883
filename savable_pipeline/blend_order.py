"""Whose turn it is among the sources of a `Blend`: exact shares at every prefix, in integers alone.

Source i of weight w, of a total W, is due w/W samples with each step. Its next sample has a window of steps in which
the source is less than a sample ahead and behind; of the windows that are open, the one that closes first is taken
(Tijdeman: The chairman assignment problem, Discrete Mathematics 32, 1980). Weights 5, 2 and 1:

    step     1 2 3 4 5 6 7 8
    source   0 0 1 0 2 0 0 1

The lanes of a run do so between counts that are right over all lanes (blend_lanes.py): every `stride` steps a lane has
taken what is written there for it. Windows are as wide as it takes, up to one and a half samples ahead and behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import count
from math import gcd, lcm
from typing import TypeAlias

import msgspec

from savable_pipeline.blend_lanes import LaneCounts

Weight: TypeAlias = int | float | str | Fraction | Decimal


class TurnsState(msgspec.Struct):
    """Where a lane's turns stand, and what they were worked out for."""

    names: list[str]
    weights: list[int]
    counts: list[int]
    lags: list[int] = []
    unit: int = 1


def integer_weights(weights: Mapping[str, Weight]) -> dict[str, int]:
    """Weights as integers without a common factor: {"a": 0.7, "b": 0.3} is {"a": 7, "b": 3}. A float is what it prints.

    Raises ValueError for one that is not a number above 0.
    """
    exact = {}
    for name, weight in weights.items():
        try:
            exact[name] = Fraction(str(weight))
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"the weight of {name!r} must be a number, not {weight!r}") from None
        if exact[name] <= 0:
            raise ValueError(f"the weight of {name!r} must be above 0, not {weight!r}; leave the source out")
    whole = lcm(*(value.denominator for value in exact.values()))
    return reduced({name: int(value * whole) for name, value in exact.items()})


def reduced(weights: Mapping[str, int]) -> dict[str, int]:
    """Weights without a common factor."""
    common = gcd(*weights.values()) or 1
    return {name: weight // common for name, weight in weights.items()}


def lags_at(weights: Sequence[int], steps: Iterable[int]) -> list[list[int]]:
    """How far each source is behind at these steps of the sequence, ascending, in samples times the sum of weights."""
    turns, total, found = Turns(weights), sum(weights), []
    for step in steps:
        turns.take(turns.plan(step - turns.taken))
        found.append([step * w - count * total for w, count in zip(weights, turns.counts, strict=True)])
    return found


class Turns:
    """Turns by number of samples, of a lane that is alone."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = list(weights)
        self.counts = [0] * len(self.weights)

    @property
    def taken(self) -> int:
        """Steps so far."""
        return sum(self.counts)

    def plan(self, n: int) -> list[int]:
        """Whose turn each of the next `n` steps is; nothing changes."""
        unit = max(2, 2 * len(self.weights) - 2)
        chosen = _in_turn(self.weights, self.counts, n, off=(unit - 1, unit))
        assert chosen is not None  # Tijdeman's theorem
        return chosen

    def take(self, chosen: Iterable[int]) -> None:
        """Note that these turns, the first of the plan, have taken place."""
        for source in chosen:
            self.counts[source] += 1


class LaneTurns(Turns):
    """Turns by number of samples of lane number `place` of the closed form, among all lanes of a run."""

    def __init__(self, weights: Sequence[int], lanes: LaneCounts, place: int) -> None:
        super().__init__(weights)
        self._lanes = lanes
        self._place = place
        # The number of a piece of `stride` steps, and whose turns these are.
        self._piece: tuple[int, list[int]] = (-1, [])

    def plan(self, n: int) -> list[int]:
        """Whose turn each of the next `n` steps is; nothing changes."""
        chosen: list[int] = []
        number, done = divmod(self.taken, self._lanes.stride)
        while len(chosen) < n:
            chosen += self._turns_of(number)[done : done + n - len(chosen)]
            number, done = number + 1, 0
        return chosen

    def _turns_of(self, number: int) -> list[int]:
        if self._piece[0] != number:
            stride = self._lanes.stride
            begin, end = (
                self._lanes.at(step)[self._place].tolist() for step in (number * stride, (number + 1) * stride)
            )
            tries = (_in_turn(self.weights, begin, stride, off=(quarters, 4), end=end) for quarters in count(4))
            self._piece = number, next(turns for turns in tries if turns is not None)
        return self._piece[1]


def _in_turn(
    weights: Sequence[int], counts: Sequence[int], n: int, *, off: tuple[int, int], end: Sequence[int] | None = None
) -> list[int] | None:
    """The next `n` turns, no source further off than the fraction `off` of a sample, and none beyond `end`.

    None where there are none.
    """
    ahead, unit = off
    total, counts, step, chosen = sum(weights), list(counts), sum(counts), []

    def window(source: int) -> tuple[int, int]:
        """The first and the last step at which a source may take its next sample."""
        taken, weight = counts[source], weights[source] * unit
        if end is not None and taken == end[source]:
            return step + n + 1, step + n + 1
        return -((ahead - (taken + 1) * unit) * total // weight), (taken * unit + ahead) * total // weight + 1

    windows = [window(source) for source in range(len(weights))]
    for now in range(step + 1, step + n + 1):
        source, first = -1, 0
        for candidate, (opens, closes) in enumerate(windows):
            if opens <= now and (source < 0 or closes < first):
                source, first = candidate, closes
        if source < 0 or first < now:
            return None
        counts[source] += 1
        windows[source] = window(source)
        chosen.append(source)
    return chosen


class TokenTurns:
    """Turns by number of tokens: that of the source which is furthest behind its share of all tokens."""

    def __init__(self, weights: Sequence[int], lags: Sequence[int]) -> None:
        self.weights = list(weights)
        self.lags = list(lags)
        self.counts = [0] * len(self.weights)
        self.unit = 1  # tokens of the first item: what a lag of one sample is

    def next(self) -> int:
        """Whose turn it is."""
        given, total = sum(self.counts), sum(self.weights)
        behind = [
            weight * given - total * count + lag * self.unit
            for weight, count, lag in zip(self.weights, self.counts, self.lags, strict=True)
        ]
        return behind.index(max(behind))

    def took(self, source: int, tokens: int) -> None:
        """Note that the source gave an item of so many tokens."""
        if not any(self.counts):
            self.unit = tokens
        self.counts[source] += tokens
