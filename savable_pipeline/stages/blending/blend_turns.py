"""The order of turns of a `Blend`'s sources: exact shares after every step, in integer arithmetic.

A source with weight w of a total W should give w/W samples per step. Its next sample has a window of steps at which the
source would be less than one sample ahead or behind. Each step goes to the source whose window closes first, among the
windows that are open (Tijdeman: The Chairman Assignment Problem, Discrete Mathematics 32, 1980). Weights 5, 2 and 1:

    step     1 2 3 4 5 6 7 8
    source   0 0 1 0 2 0 0 1

In a run of several lanes, every `stride` steps a lane has taken exactly the counts that make the sums over lanes right
(blend_counts.py). Between these steps the windows are as wide as needed, up to 1.5 samples ahead and behind, and each
lane shuffles its turns: lanes in step would give all ranks of a step the same source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Annotated, TypeAlias

import msgspec

from savable_pipeline.core.keyed_random import derive_key, permutation
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.blending.blend_counts import LaneCounts

_Given: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]  # samples or tokens of a source in a lane


class TurnsState(msgspec.Struct):
    """The position of a lane's turns, and the sources and weights they belong to."""

    names: list[str]
    weights: list[int]
    counts: list[_Given]
    lags: list[int] = []
    unit: _Given = 1
    before: _Given = 0  # samples or tokens given before the counts began
    begin: list[_Given] = []  # of a schedule: the counts at the start of the piece

    def check_lengths(self, counts: list[int], lags: list[int], begin: list[int]) -> None:
        """Raise `CheckpointMismatchError` unless there are as many numbers of each kind as here."""
        if [len(self.counts), len(self.lags), len(self.begin)] != [len(counts), len(lags), len(begin)]:
            raise CheckpointMismatchError(
                f"Blend: the state has the counts {self.counts}, from {self.begin} on, and the lags {self.lags} of "
                f"{len(counts)} sources; use another copy of the checkpoint"
            )


def lags_at(weights: Sequence[int], steps: Iterable[int]) -> list[list[int]]:
    """How far each source is behind at these ascending steps of the sequence, in samples times the sum of weights."""
    turns, total, found = Turns(weights), sum(weights), []
    for step in steps:
        turns.take(turns.plan(step - turns.taken))
        found.append([step * w - count * total for w, count in zip(weights, turns.counts, strict=True)])
    return found


class Turns:
    """Turns by number of samples, in a lane of its own."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = list(weights)
        self.counts = [0] * len(self.weights)

    @property
    def taken(self) -> int:
        """The number of turns so far."""
        return sum(self.counts)

    def plan(self, n: int) -> list[int]:
        """The numbers of the sources of the next `n` turns; counts nothing as taken."""
        unit = max(2, 2 * len(self.weights) - 2)
        chosen = _in_turn(self.weights, self.counts, n, off=(unit - 1, unit))
        if chosen is None:  # which Tijdeman's theorem excludes
            raise CheckpointMismatchError(
                f"Blend: {self.counts} samples of sources with the weights {self.weights} cannot come of its turns; "
                "use another copy of the checkpoint"
            )
        return chosen

    def take(self, chosen: Iterable[int]) -> None:
        """Count these turns, which are the first of the plan, as taken."""
        for source in chosen:
            self.counts[source] += 1


class LaneTurns(Turns):
    """Turns by number of samples, in a run of several lanes; `place` is the lane's number in `LaneCounts`.

    `key`, the lane's own, shuffles the turns of each piece of `stride` steps.
    """

    def __init__(self, weights: Sequence[int], lanes: LaneCounts, place: int, key: int) -> None:
        super().__init__(weights)
        self._key = key
        self._lanes = lanes
        self._place = place
        # The number of the piece of `stride` steps that was planned last, and its turns.
        self._piece: tuple[int, list[int]] = (-1, [])

    def plan(self, n: int) -> list[int]:
        """The numbers of the sources of the next `n` turns; counts nothing as taken."""
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
            turns = next(turns for turns in tries if turns is not None)
            order = permutation(derive_key(self._key, number), stride).tolist()
            self._piece = number, [turns[step] for step in order]
        return self._piece[1]


def _in_turn(
    weights: Sequence[int], counts: Sequence[int], n: int, *, off: tuple[int, int], end: Sequence[int] | None = None
) -> list[int] | None:
    """The next `n` turns that keep each source within the fraction `off` of a sample, and its count at most `end`.

    None if there are no such turns.
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
    """Turns by number of tokens: the next is of the source that is furthest behind its share of all tokens."""

    def __init__(self, weights: Sequence[int], lags: Sequence[int]) -> None:
        self.weights = list(weights)
        self.lags = list(lags)
        self.counts = [0] * len(self.weights)
        self.unit = 1  # tokens of the first item, which stand for a lag of one sample

    def next(self) -> int:
        """The number of the source whose turn is next."""
        given, total = sum(self.counts), sum(self.weights)
        behind = [
            weight * given - total * count + lag * self.unit
            for weight, count, lag in zip(self.weights, self.counts, self.lags, strict=True)
        ]
        return behind.index(max(behind))

    def took(self, source: int, tokens: int) -> None:
        """Count an item of `tokens` tokens from the source."""
        if not any(self.counts):
            self.unit = tokens
        self.counts[source] += tokens
