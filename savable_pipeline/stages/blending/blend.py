"""`Blend`: the stage that merges several sources into one stream, each with its exact share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.weights import Weight
from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT, RefArray
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.blending.turns import TokenTurns, Turns
from savable_pipeline.stages.blending.weighted_sources import NONE, By, Until, WeightedSources
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.held_items import left_of
from savable_pipeline.stages.item_ref import MISSING, ItemRef, left_sizes
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage, State
from savable_pipeline.stages.stage_bases import TakesItems, TakesRefs
from savable_pipeline.stages.task_encoder import Skip


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
    """A Blend of samples, before Encode: takes many refs at a time."""

    _stages: dict[str, SampleStage]  # type: ignore[assignment]

    def take_refs(self, n: int) -> RefArray:
        """The refs of the next samples, 1 to `n` of them: REF (any,); empty only at the end."""
        while n and self._active:
            given = self._take_turns(n)
            if len(given):
                return given
        return NONE

    def _take_turns(self, n: int) -> RefArray:
        """The refs of the next `n` turns, or of those before the turn of a source that has ended: REF (any,)."""
        turns, active = self._turns, self._active
        assert isinstance(turns, Turns)
        chosen = turns.plan(n)
        for source, name in enumerate(active):
            mine = np.flatnonzero(chosen == source)
            have = self._load(name, len(mine))
            if have < len(mine):
                chosen = chosen[: mine[have]]
        given = np.empty(len(chosen), REF)
        for source, name in enumerate(active):
            mine = np.flatnonzero(chosen == source)
            given[mine] = self._ahead[name][: len(mine)]
            self._count_drawn(name, len(mine))
            self._ahead[name] = self._ahead[name][len(mine) :]
        turns.take(chosen)
        if len(chosen) < n:
            self._end_sources({*self._ended, active[turns.plan(1)[0]]})
        return given

    def _load(self, name: str, n: int) -> int:
        """Take refs of a source until `n` are ready or it ends; return the number that are ready."""
        while len(self._ahead[name]) < n:
            fresh = self._stages[name].take_refs(n - len(self._ahead[name]))
            if not len(fresh):
                break
            self._ahead[name] = np.concatenate([self._ahead[name], fresh])
        return len(self._ahead[name])

    def _of_tag(self, tag: int) -> SampleStage:
        return super()._of_tag(tag)  # type: ignore[return-value]

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """The samples with these refs; their parts are read when asked for."""
        tags = _tags_of(refs)
        found: list[Any] = [None] * len(refs)
        for tag in np.unique(tags).tolist():
            mine = np.flatnonzero(tags == tag)
            for place, sample in zip(mine.tolist(), self._of_tag(tag).open_samples(refs[mine]), strict=True):
                found[place] = sample
        return found

    def prefetch(self, refs: RefArray) -> None:
        """Begin to download the samples with these refs, each from its source; nothing for local files."""
        tags = _tags_of(refs)
        for tag in np.unique(tags).tolist():
            self._of_tag(tag).prefetch(refs[tags == tag])

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; downloads of remote samples begin."""
        super().restore_state(state)
        for name, refs in self._ahead.items():
            if len(refs):
                self._stages[name].prefetch(refs)


class _BlendOfItems(Blend, TakesItems):
    """A Blend of items, after Encode: takes one item at a time, and may count its tokens."""

    sizes: tuple[Size, ...] | None = None

    def take(self, n: int, *, deferred: bool = False) -> tuple[list[Any], list[ItemRef]]:
        """The next item and its ref; two empty lists at the end. One item whatever `n`."""
        deferred = deferred and self.info.deferred
        while active := self._active:
            if self._taken is None:
                turns = self._turns
                source = turns.next() if isinstance(turns, TokenTurns) else turns.plan(1)[0]
                stage = self._stages[active[source]]
                items, refs = stage.take(1, deferred=deferred)
                if not items:
                    self._end_sources({*self._ended, active[source]})
                    continue
                self._taken = active[source], items[0], refs[0], getattr(stage, "sizes", None)
            name, item, ref, sizes = self._taken
            if item is MISSING and not deferred:
                whole = ref
                item, ref = left_of(self._stages[name], whole)
                sizes = None if sizes is None else left_sizes(sizes, whole, ref)
            if type(item) is not Skip:
                self._take_turn(active.index(name), self._stages[name], item)
            self._taken = None
            if type(item) is not Skip:  # else it cannot be made again, which was counted where that was found
                self.sizes = sizes
                return [item], [ref]
        return [], []

    def _take_turn(self, source: int, stage: Stage, item: Any) -> None:
        """Count a turn of a source, by its item. Raises `EncodeError` if `encoder.length` does."""
        name = self._active[source]
        if isinstance(self._turns, Turns):
            self._turns.take([source])
            self._count_drawn(name, 1)
            return
        encoder = stage.info.encoder
        assert encoder is not None
        try:
            length = int(encoder.length(item))
            self._turns.took(source, length)
            self._count_drawn(name, 1, length)
        except Exception as error:
            raise EncodeError(
                f"{type(encoder).__name__}.length raised {type(error).__name__}: {error}; stage Blend, source "
                f"{name!r} of {self.lane}"
            ) from error


def _tags_of(refs: RefArray) -> NDArray[np.int64]:
    return (refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64)


for _kind in (_BlendOfSamples, _BlendOfItems):
    _kind.__name__ = _kind.__qualname__ = "Blend"  # both kinds have one name in states, counts and the printed tree
