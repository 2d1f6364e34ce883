"""Stages as users would write them from the docstring of `Stage`: of samples, of items and of batches."""

from __future__ import annotations

from typing import Any

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.stage import State


class FewOfMany(custom.PassThrough, custom.SampleStage):
    """A stage that omits one sample in four, by random numbers of the lane."""

    def __next__(self) -> sp.Sample:
        rng = self.lane.rng("few of many")
        while True:
            sample: sp.Sample = next(self.source)
            if rng.integers(4):
                return sample


class Swapped(custom.ItemStage):
    """A stage that yields items in pairs, the second one first. The last of an odd number stays in place."""

    ref: Any = ()
    held: Any = ()

    def __next__(self) -> Any:
        if self.held:
            self.ref, self.held = custom.as_ref(self.held), ()
            if not isinstance(item := self.source.fetch(self.ref), sp.Skip):
                return item
        first = next(self.source)
        self.held = self.source.ref
        for item in self.source:
            self.ref = self.source.ref
            return item
        self.ref, self.held = self.held, ()
        return first

    def save_state(self) -> State:
        return {"held": self.held, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        self.held = state["held"]
        self.source.restore_state(state["source"])


class Numbered(custom.BatchStage):
    """A stage that yields each batch with its number, and omits and counts every fifth."""

    ref: Any = ()
    number = 0

    def __next__(self) -> Any:
        while True:
            batch = next(self.source)
            self.ref = (self.number, self.source.ref)
            self.number += 1
            if self.number % 5:
                return {**batch, "number": self.number - 1}
            self.counts["fifth batches"] += 1

    def fetch(self, ref: Any) -> Any:
        number, inner = ref
        return {**self.source.fetch(inner), "number": number}

    def save_state(self) -> State:
        return {"number": self.number, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        self.number = state["number"]
        self.source.restore_state(state["source"])
