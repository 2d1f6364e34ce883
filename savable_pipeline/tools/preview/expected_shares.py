"""The share that each source of a run should have, by the weights or the schedule in the run's fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from savable_pipeline.errors import SavableError
from savable_pipeline.run.ledger.records import Start
from savable_pipeline.run.state.fingerprint import unpack_fingerprint
from savable_pipeline.stages.blending.schedule import Dues, Schedule


class ExpectedShares:
    """Of one start. `by`: "samples" or "tokens"; "" without a `Blend`, or where its settings cannot be read."""

    def __init__(self, start: Start) -> None:
        try:
            fields: dict[str, Any] = unpack_fingerprint(start.fingerprint).fields
        except SavableError:
            fields = {}
        self.by = str(fields.get("Blend.by", ""))
        self._weights: dict[str, int] = fields.get("weights", {})
        told = fields.get("Blend.schedule")
        self.schedule = None if told is None else Schedule(**told)
        self.names = list(self._weights) or sorted(self.schedule.names if self.schedule else ())

    def of(self, begin: int, end: int) -> list[float]:
        """The share of each of `names` among what the run drew from number `begin` to `end`."""
        if self.schedule is None:
            return [weight / sum(self._weights.values()) for weight in self._weights.values()]
        dues = Dues(self.schedule, self.names)
        whole = max(1, end - begin)
        parts = zip(dues.at(begin), dues.at(begin + whole), strict=True)
        return [(after - before) / (whole * dues.unit) for before, after in parts]


def summed(names: Sequence[str], sources: Sequence[str], numbers: Sequence[float]) -> list[float]:
    """Numbers of sources, summed for each of `names`: "text" is of "text" and of "text/web"."""
    return [
        sum(number for source, number in zip(sources, numbers, strict=True) if f"{source}/".startswith(f"{name}/"))
        for name in names
    ]
