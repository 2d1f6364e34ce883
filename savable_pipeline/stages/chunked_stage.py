"""`ChunkedStage`: the interface between this library's stages, beyond `Stage`.

    take_from(source, n)            refs of samples, or elements: the next ones
    make_elements(source, [...])    builds their values along the chain of stages: each stage asks its source for the
    inputs

The functions of this file accept a user's own stages too, and use their `__next__` and `fetch` instead.
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

    A stage defines `take` and, if it changes or merges elements, `make`. For a user's own stage, which has neither, the
    functions `take_from`, `make_elements` and `is_certain` do the same.

    `__next__` builds an element before the stage moves past it. If building fails, the next call tries the same
    element, and so does a stage restored from a state in between. `take` returns unbuilt elements, unless `_makes` is
    set.
    """

    ref: ItemRef = ()
    sizes: tuple[Size, ...] | None = None
    """(length, images) of each item in the element that `__next__` returned last, where they are known."""
    measured: tuple[Any, int] | None = None
    """`Element.measured` of it."""
    one_to_one: bool | None = None
    """Whether it yields one element for each of its source. None: elements combine or divide those of the source."""
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

        Samples are returned as refs, REF (any,). Items and batches are a list of `Element`, which may be unbuilt.
        `make_elements` builds them when they are needed.

        Args:
            n: The most elements to take.
        """

    def make(self, elements: Sequence[Element]) -> None:
        """Set the values of elements, or a `Skip` for one that can no longer be built.

        If a pack has lost items, its ref and sizes become those of the remaining items.

        Args:
            elements: Unbuilt elements.
        """
        make_elements(self, elements)

    def fetch(self, ref: Any) -> Any:
        """Rebuild an earlier element, or return a `Skip` if that is no longer possible."""
        element = Element(ref if isinstance(ref, Ref) else as_ref(ref))
        self.make([element])
        return element.value

    def is_certain(self, ref: ItemRef) -> bool:
        """Return whether rebuilding an element works, or raises, but never skips.

        Args:
            ref: The ref of the element.
        """
        return False


def rules_of(stage: Stage) -> Mapping[str, SettingRule]:
    """Return the rules for settings that are not compared by equality."""
    return stage.setting_rules if isinstance(stage, ChunkedStage) else {}


def take_from(stage: Stage, n: int) -> Any:
    """Take the next elements, 1 to `n`, or one from a user's own stage."""
    if isinstance(stage, ChunkedStage):
        return stage.take(n)
    samples = stage.yields == "samples"
    for value in stage if n else ():
        if samples:
            return np.array([(value.index, value.epoch)], REF)
        return [last_element(stage, value)]
    return np.empty(0, REF) if samples else []


def last_element(stage: Stage, value: Any) -> Element:
    """Return the element that a stage's `__next__` returned last."""
    source = stage
    while isinstance(source, PassThrough):
        source = source.source
    sizes, measured = (source.sizes, source.measured) if isinstance(source, ChunkedStage) else (None, None)
    return Element(as_ref(stage.ref), value, sizes, measured=measured)


def take_elements(stage: Stage, n: int) -> list[Element]:
    """Return the next 1 to `n` elements with opened samples, or none at the end."""
    taken = take_from(stage, n)
    if isinstance(taken, list):
        return taken
    numbers = zip(taken["index"].tolist(), taken["epoch"].tolist(), strict=True)
    samples = cast(SampleStage, stage).open_samples(taken)
    return [Element((*each, 0), sample) for each, sample in zip(numbers, samples, strict=True)]


def maker_of(stage: Stage) -> Stage:
    """Return the stage that builds the elements of a stage: itself or one before it."""
    while type(stage).fetch in _DEFAULTS and getattr(type(stage), "make", None) in (None, ChunkedStage.make):
        stage = stage.source
    return stage


_DEFAULTS = (Stage.fetch, ChunkedStage.fetch)


def make_elements(stage: Stage, elements: Sequence[Element]) -> None:
    """Set the missing values of elements of a stage by its `make` or `fetch`."""
    stage, missing = maker_of(stage), [element for element in elements if not element.is_built]
    if isinstance(stage, ChunkedStage) and type(stage).make is not ChunkedStage.make:
        stage.make(missing)
        return
    for element in missing:
        element.value = stage.fetch(element.ref)


def value_of(stage: Stage, element: Element) -> Any:
    """Return the value of an element of a stage, which is built if it is missing.

    It is a `Skip` if that is impossible.
    """
    if not element.is_built:
        make_elements(stage, [element])
    return element.value


def without_lost(elements: Sequence[Element]) -> list[Element]:
    """Return the elements without those that could not be rebuilt."""
    return [element for element in elements if type(element.value) is not Skip]


def is_certain(stage: Stage, ref: ItemRef) -> bool:
    """Return whether an element cannot become a `Skip`.

    The result is False for a user's own stage with `fetch`.
    """
    stage = maker_of(stage)
    return isinstance(stage, ChunkedStage) and stage.is_certain(ref)


def is_one_to_one(stage: Stage) -> bool | None:
    """Return whether a stage yields one element per element of its source.

    The result is None for a stage with several sources.
    """
    return stage.one_to_one if isinstance(stage, ChunkedStage) else None


def count_of(stage: Stage, lane: int, epoch: int) -> int | None:
    """Return the number of elements in a pass of a lane, or None if unknown."""
    if (counted := getattr(stage, "count_of", None)) is not None:
        return cast("int | None", counted(lane, epoch))
    return count_of(stage.source, lane, epoch) if is_one_to_one(stage) else None
