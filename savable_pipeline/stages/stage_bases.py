"""Bases for stages of two kinds: those that pass on what they took last, and those that yield several at once."""

from __future__ import annotations

from typing import Any

from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.element import Element
from savable_pipeline.stages.item_ref import ItemRef, left_sizes
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage
from savable_pipeline.stages.task_encoder import Skip


class PassThrough(Stage):
    """Marks a stage whose `__next__` returns the element that it took last from its source, such as a filter.

    Such a stage holds nothing back, so it needs neither `ref` nor `fetch`, nor a state of its own. Do not mark a stage
    that holds, reorders or merges elements: `savable_pipeline.testing.assert_exact_resume` finds that mistake.

    Args:
        source: The stage before this one.

    Example:
        >>> class Logged(custom.PassThrough, custom.SampleStage):
        ...     def __next__(self) -> sp.Sample:
        ...         sample = next(self.source)
        ...         print(sample.key)
        ...         return sample
        >>> _ = next(Logged(sp.TarShardReader("shards/", sp.Lane(), shuffle=False)))
        s000000
    """

    @property
    def ref(self) -> ItemRef:  # type: ignore[override]
        """The ref of the source's last element."""
        return self.source.ref

    @property
    def sizes(self) -> tuple[Size, ...] | None:  # type: ignore[override]
        """The sizes of the source's last element."""
        return self.source.sizes


class TakesRefs(SampleStage):
    """Base of a stage of samples that writes `take_refs`: its next sample is the one of the next ref."""

    ref: ItemRef = ()

    def __next__(self) -> Sample:
        refs = self.take_refs(1)
        if not len(refs):
            raise StopIteration
        self.ref = (int(refs["index"][0]), int(refs["epoch"][0]), 0)
        return self.open_samples(refs)[0]

    def take(self, n: int) -> list[Element]:
        """The next samples, 1 to `n` of them; none only at the end."""
        refs = self.take_refs(n)
        numbers = zip(refs["index"].tolist(), refs["epoch"].tolist(), strict=True)
        return [Element((*each, 0), sample) for each, sample in zip(numbers, self.open_samples(refs), strict=True)]


class TakesItems(ItemStage):
    """Base of a stage of items that writes `take`. In `__next__` the stage makes an element before it moves past it.

    So an element that cannot be made now is met again by the next call, also of a stage restored from a state in
    between. `take` leaves elements unmade, unless `_makes`.
    """

    ref: ItemRef = ()
    _makes = False

    def __next__(self) -> Any:
        self._makes = True
        try:
            while elements := self.take(1):
                (element,) = elements
                if element.is_made:  # else it is lost
                    self.ref, self.sizes = element.ref, element.sizes
                    return element.value
        finally:
            self._makes = False
        raise StopIteration


def make(element: Element, stage: Stage) -> None:
    """Make an unmade element of a stage, unless that is no longer possible, which the stage has counted."""
    if element.is_made:
        return
    value, left = stage.fetch_left(element.ref)
    if type(value) is not Skip:
        element.sizes = left_sizes(element.sizes, element.ref, left)
        element.value, element.ref = value, left
