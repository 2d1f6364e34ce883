"""Whose turn it is among the sources of a `Blend`: exact shares at every prefix, in integers alone.

Source i of weight w, of a total W, is due w/W samples with each step. Its next sample has a window of steps in which
the source is less than a sample ahead and behind; of the windows that are open, the one that closes first is taken
(Tijdeman: The chairman assignment problem, Discrete Mathematics 32, 1980). Weights 5, 2 and 1:

    step     1 2 3 4 5 6 7 8
    source   0 0 1 0 2 0 0 1

All lanes walk along this one sequence, lane l from step `phase + l * stride` on. So each lane begins at another place,
and a round in which each of the lanes takes `stride` samples is one piece of it. A lane counts its share from where it
begins; windows are cut so that it is never more than 1.5 samples off. With up to three sources that changes nothing,
and the same bound holds over a round; with more, lanes that begin far off leave the sequence now and then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import gcd, lcm
from typing import TypeAlias

import msgspec

Weight: TypeAlias = int | float | str | Fraction | Decimal


class TurnsState(msgspec.Struct):
    """Where a lane's turns stand, and what they were worked out for."""

    names: list[str]
    weights: list[int]
    lags: list[int]
    counts: list[int]
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
    turns, total, found = Turns(weights, [0] * len(weights)), sum(weights), []
    for step in steps:
        turns.take(turns.plan(step - turns.taken))
        found.append([step * w - count * total for w, count in zip(weights, turns.counts, strict=True)])
    return found


class Turns:
    """Turns by number of samples."""

    def __init__(self, weights: Sequence[int], lags: Sequence[int]) -> None:
        self.weights = list(weights)
        self.lags = list(lags)
        self.counts = [0] * len(self.weights)
        self._total = sum(self.weights)
        self._unit = max(2, 2 * len(self.weights) - 2)

    @property
    def taken(self) -> int:
        """Steps so far."""
        return sum(self.counts)

    def plan(self, n: int) -> list[int]:
        """Whose turn each of the next `n` steps is; nothing changes."""
        counts, step, chosen = list(self.counts), self.taken, []
        windows = [self._window(source, count) for source, count in enumerate(counts)]
        for _ in range(n):
            step += 1
            source, first = -1, 0
            for candidate, (opens, closes) in enumerate(windows):
                if opens <= step and (source < 0 or closes < first):
                    source, first = candidate, closes
            if source < 0:
                source = min(range(len(windows)), key=lambda candidate: windows[candidate][1])
            counts[source] += 1
            windows[source] = self._window(source, counts[source])
            chosen.append(source)
        return chosen

    def take(self, chosen: Iterable[int]) -> None:
        """Note that these turns, the first of the plan, have taken place."""
        for source in chosen:
            self.counts[source] += 1

    def _window(self, source: int, count: int) -> tuple[int, int]:
        """The first and the last step at which a source may take its sample number `count`.

        On the sequence it is at most h = 1 - 1/(2k - 2) of a sample ahead or behind, k being the number of sources; as
        the lane counts, at most 1.5. Worked out in units of 1/(2k - 2) of 1/W.
        """
        weight, lag, unit = self.weights[source], self.lags[source], self._unit
        whole, h, limit = self._total * unit, self._total * (unit - 1), 3 * self._total * unit // 2
        ahead, behind = min(h + unit * lag, limit), min(h - unit * lag, limit)
        opens = -((ahead - (count + 1) * whole) // (weight * unit))
        return opens, (count * whole + behind) // (weight * unit) + 1


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
