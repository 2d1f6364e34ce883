"""`ChunkedStage`: the interface between this library's stages, beyond `Stage`.

    chunked(source).take(n)      refs of samples, or elements: the next ones
    chunked(source).make([...])  builds their values along the chain of stages: each stage asks its source for the
                                 inputs

`chunked` puts the adapter `OwnStage` around a user's own stage, and returns other stages as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.ref import REF, Ref
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.item_ref import Element, ItemRef, as_ref
from savable_pipeline.stages.stage import PassThrough, SampleStage, Stage
from savable_pipeline.stages.stage_settings import SettingRule
from savable_pipeline.stages.task_encoder import Skip


class ChunkedStage(Stage):
    """Base of this library's stages, with methods for several elements at a time.

    A stage defines `take` and, if it changes or merges elements, `make` or `fetch`.

    `__next__` builds an element before the stage moves past it. If building fails, the next call tries the same
    element, and so does a stage restored from a state in between. `take` may return unbuilt elements, unless `_makes`
    is set.
    """

    ref: ItemRef = ()
    sizes: tuple[Size, ...] | None = None
    """(length, images) of each item in the element that `__next__` returned last, where they are known."""
    measured: tuple[Any, int] | None = None
    """`Element.measured` of that element."""
    one_to_one: bool | None = None
    """Whether the stage yields exactly one element for each element of its source.

    None: elements combine or divide those of the source.
    """
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {}
    """Rules for settings that are not compared by equality. Subclasses inherit them."""
    datasets: tuple[Dataset, ...] = ()
    """The datasets that the stage itself reads."""
    in_step: str = ""
    """The stage's name in messages if the ranks of a step take its elements together, otherwise ""."""
    _makes = False  # whether `take` must build its element before the stage moves past it

    def __next__(self) -> Any:
        self._makes = True
        try:
            while elements := take_elements(self, 1):
                (element,) = elements
                if type(element.value) is not Skip:  # a `Skip` is a lost element
                    self.ref, self.sizes, self.measured = element.ref, element.sizes, element.measured
                    return element.value
        finally:
            self._makes = False
        raise StopIteration

    @abstractmethod
    def take(self, n: int) -> Any:
        """Return the next 1 to `n` elements, or none at the end.

        Samples are returned as refs, REF (any,). Items and batches are returned as a list of `Element`. `make` builds
        the unbuilt ones when they are needed.

        Args:
            n: The most elements to take.
        """

    @property
    def maker(self) -> ChunkedStage:
        """Return the stage that builds the elements: this one, or one upstream."""
        delegates = type(self).make is ChunkedStage.make and type(self).fetch in (Stage.fetch, ChunkedStage.fetch)
        return chunked(self.source).maker if delegates else self

    def make(self, elements: Sequence[Element]) -> None:
        """Set the values of elements, or a `Skip` for one that can no longer be built.

        If a pack has lost items, its ref and sizes become those of the remaining items.

        Args:
            elements: Unbuilt elements.
        """
        if (maker := self.maker) is not self:
            maker.make(elements)
            return
        for element in elements:
            element.value = self.fetch(element.ref)

    def fetch(self, ref: Any) -> Any:
        """Rebuild an earlier element, or return a `Skip` if that is no longer possible."""
        element = Element(ref if isinstance(ref, Ref) else as_ref(ref))
        self.make([element])
        return element.value

    def is_certain(self, ref: ItemRef) -> bool:
        """Return whether rebuilding an element works or raises, but never skips it.

        Args:
            ref: The ref of the element.
        """
        return (maker := self.maker) is not self and maker.is_certain(ref)


class OwnStage(ChunkedStage):
    """Adapter of a user's own stage, which has only `__next__` and `fetch`."""

    def take(self, n: int) -> Any:
        stage = origin = self.source
        for value in stage if n else ():  # returns at the first value, because `stage.ref` is that of one element
            if stage.yields == "samples":
                return np.array([(value.index, value.epoch)], REF)
            while isinstance(origin, PassThrough):
                origin = origin.source
            sized = chunked(origin)
            return [Element(as_ref(stage.ref), value, sized.sizes, measured=sized.measured)]
        return np.empty(0, REF) if stage.yields == "samples" else []

    @property
    def maker(self) -> ChunkedStage:
        return chunked(self.source.source).maker if type(self.source).fetch is Stage.fetch else self

    def fetch(self, ref: Any) -> Any:
        return self.source.fetch(ref)


def chunked(stage: Stage) -> ChunkedStage:
    """Return a stage of this library itself, and a user's own stage in its adapter."""
    return stage if isinstance(stage, ChunkedStage) else OwnStage(stage)


def take_elements(stage: Stage, n: int) -> list[Element]:
    """Return the next 1 to `n` elements, or none at the end. Samples are opened."""
    taken = chunked(stage).take(n)
    if isinstance(taken, list):
        return taken
    refs = zip(taken["index"].tolist(), taken["epoch"].tolist(), strict=True)
    samples = cast(SampleStage, stage).open_samples(taken)
    return [Element((index, epoch, 0), sample) for (index, epoch), sample in zip(refs, samples, strict=True)]


def value_of(stage: Stage, element: Element) -> Any:
    """Return the value of an element of a stage. An unbuilt value is built first.

    The value is a `Skip` if the element can no longer be built.
    """
    if not element.is_built:
        chunked(stage).make([element])
    return element.value


def without_lost(elements: Sequence[Element]) -> list[Element]:
    """Return the elements without those that could not be rebuilt."""
    return [element for element in elements if type(element.value) is not Skip]


def count_of(stage: Stage, lane: int, epoch: int) -> int | None:
    """Return the number of elements of a lane in the pass `epoch`, or None if unknown."""
    if (count := getattr(stage, "count_of", None)) is not None:
        return cast("int | None", count(lane, epoch))
    return count_of(stage.source, lane, epoch) if chunked(stage).one_to_one else None
