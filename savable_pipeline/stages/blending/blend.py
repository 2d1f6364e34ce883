"""`Blend`: the stage that merges several sources into one stream, each with its exact share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.core.weights import Weight
from savable_pipeline.data.dataset.ref import TAG_SHIFT, RefArray
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.blending.turns import TokenTurns
from savable_pipeline.stages.blending.weighted_sources import By, Elements, Until, WeightedSources
from savable_pipeline.stages.element import Element
from savable_pipeline.stages.held_items import known_refs
from savable_pipeline.stages.item_ref import as_ref, left_sizes
from savable_pipeline.stages.stage import ItemStage, SampleStage, saved_refs
from savable_pipeline.stages.stage_bases import TakesItems, TakesRefs, make


class _BlendSettings(TypedDict, total=False):
    weights: Mapping[str, Weight] | Schedule | None
    by: By
    until: Until
    stride: int


class Blend(WeightedSources):
    """Merges sources by weight: `Blend({"web": a, "books": b}, weights={"web": 7, "books": 3})`.

    Where each lane has given n samples, n a multiple of `stride`, the sum over lanes is within 1.2 samples of a
    source's share, and each lane within 2.6 (found by search); by tokens, a lane is within about twice the longest
    item. In between, each lane shuffles its turns, so that the ranks of a step hold different sources.

    Args:
        sources: Stages by name: all of samples, or all of items or packs, each branch with its own encoder; a Blend may
            be one. The name is part of the keys of a source's order and random numbers: the same shards under two names
            are two sources.
        weights: The weight of each source. None: its number of samples. 0 turns a source off, which keeps its place for
            `allow={"weights"}`. With a `Schedule` they change during the run, and a source keeps to the integral of its
            share.
        by: "samples" counts samples or items, "tokens" their lengths by the branch's `encoder.length`.
        until: When a source that does not repeat (`epochs=`) ends: "all" continues with the rest by their weights,
            "first" ends the Blend.
        stride: Set it to the batch size if that is no multiple of 8. A small one costs time.

    Raises:
        ValueError: A setting is wrong.
        CheckpointMismatchError: A ref is of a source that was removed or renamed.

    Example:
        >>> lane = sp.Lane(seed=7)
        >>> sources = {name: sp.TarShardReader(f"shards/{name}.tar", lane, shuffle=False) for name in "01"}
        >>> blend = sp.Blend(sources, weights={"0": 0.75, "1": 0.25})
        >>> [next(blend).shard for _ in range(8)].count("0.tar")
        6
    """

    @overload
    def __new__(cls, sources: Mapping[str, SampleStage], **settings: Unpack[_BlendSettings]) -> _BlendOfSamples: ...
    @overload
    def __new__(cls, sources: Mapping[str, ItemStage], **settings: Unpack[_BlendSettings]) -> _BlendOfItems: ...
    def __new__(
        cls,
        sources: Mapping[str, SampleStage] | Mapping[str, ItemStage],
        *,
        weights: Mapping[str, Weight] | Schedule | None = None,
        by: By = "samples",
        until: Until = "all",
        stride: int = 8,
    ) -> Blend:
        """A Blend of samples if the first source yields samples, else of items; its `__init__` gets the same."""
        of_samples = isinstance(next(iter(sources.values()), None), SampleStage)
        return super().__new__(_BlendOfSamples if of_samples else _BlendOfItems)


class _BlendOfSamples(Blend, TakesRefs):
    """A Blend of samples, before Encode, as refs."""

    _stages: dict[str, SampleStage]  # type: ignore[assignment]

    def take_refs(self, n: int) -> RefArray:
        """The refs of the next samples, 1 to `n` of them: REF (any,); empty only at the end."""
        return self._given(n)

    def _taken(self, name: str, n: int) -> RefArray:
        return self._stages[name].take_refs(n)

    def _of_tag(self, tag: int) -> SampleStage:
        return super()._of_tag(tag)  # type: ignore[return-value]

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """The samples with these refs; their parts are read when asked for."""
        tags = _tags_of(refs)
        found: list[Any] = [None] * len(refs)
        for tag in np.unique(tags).tolist():
            mine = np.flatnonzero(tags == tag)
            for at, sample in zip(mine.tolist(), self._of_tag(tag).open_samples(refs[mine]), strict=True):
                found[at] = sample
        return found

    def prefetch(self, refs: RefArray) -> None:
        """Begin to download the samples with these refs, each from its source; nothing for local files."""
        tags = _tags_of(refs)
        for tag in np.unique(tags).tolist():
            self._of_tag(tag).prefetch(refs[tags == tag])

    def _saved(self, ahead: RefArray) -> bytes:
        return ahead.tobytes()

    def _restored(self, name: str, saved: Any) -> RefArray:
        refs = saved_refs(self, saved)
        if len(refs):
            self._stages[name].prefetch(refs)
        return refs


class _BlendOfItems(Blend, TakesItems):
    """A Blend of items, after Encode; by tokens it takes one at a time, since its length says whose turn is next."""

    def take(self, n: int) -> list[Element]:
        """The next items, 1 to `n` of them; none only at the end."""
        while self._active:
            turns = self._turns
            if not isinstance(turns, TokenTurns):
                return list(self._given(n))
            name = self._active[turns.next()]
            if not self._load(name, 1):
                self._end_sources({*self._ended, name})
                continue
            element: Element = self._ahead[name][0]
            length = self._length(name, element)
            self._ahead[name] = self._ahead[name][1:]
            if length is not None:
                turns.took(self._active.index(name), length)
                self._count_drawn(name, 1, length)
                return [element]
        return []

    def _load(self, name: str, n: int) -> int:
        ready = super()._load(name, n)
        if self._makes and n and ready:
            make(self._ahead[name][0], self._stages[name])
        return ready

    def _length(self, name: str, element: Element) -> int | None:
        """The length of an element, which is made if that is not known; None if it can no longer be made."""
        if element.sizes is not None and not element.is_made:
            return sum([length for length, _ in element.sizes])
        stage = self._stages[name]
        make(element, stage)
        if not element.is_made:
            return None
        encoder = stage.info.encoder
        assert encoder is not None
        try:
            return int(encoder.length(element.value))
        except Exception as error:
            raise EncodeError(
                f"{type(encoder).__name__}.length raised {type(error).__name__}: {error}; stage Blend, source "
                f"{name!r} of {self.lane}"
            ) from error

    def _taken(self, name: str, n: int) -> Elements:
        return _array(self._stages[name].take(n))

    def _saved(self, ahead: Elements) -> list[Any]:
        return [(element.ref, element.sizes) for element in ahead]

    def _restored(self, name: str, saved: Any) -> Elements:
        try:
            elements = msgspec.convert(saved or [], list[tuple[Any, tuple[tuple[SavedCount, SavedCount], ...] | None]])
        except msgspec.ValidationError as error:
            raise CheckpointMismatchError(f"Blend: items of the source {name!r} cannot be read: {error}") from error
        left = []
        for ref, sizes in elements:
            whole = as_ref(ref)
            left += [Element(kept, sizes=left_sizes(sizes, whole, kept)) for kept in known_refs(self, [whole])]
        return _array(left)


def _array(elements: list[Element]) -> Elements:
    return np.fromiter(elements, object, len(elements))


def _tags_of(refs: RefArray) -> NDArray[np.int64]:
    return (refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64)


for _kind in (_BlendOfSamples, _BlendOfItems):
    _kind.__name__ = _kind.__qualname__ = "Blend"  # both kinds have one name in states, counts and the printed tree
