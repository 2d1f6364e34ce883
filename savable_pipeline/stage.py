"""`Stage`: one step of a lane, and the protocol that a user's own steps follow.

A stage is an iterator over what `source` gives. Stages before `Encode` give samples, stages after it give items,
packs or batches. Three methods make it savable:

    save_state()      what the stage needs to go on from here, as plain values, with its source's state in it
    restore_state(s)  put a fresh stage, and its source, where s was taken
    fetch(ref)        make the thing that this ref names again, identically

`take` and `take_refs` give several at once, and none only at the end; a stage that only has `__next__` inherits them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from savable_pipeline.encoder import TaskEncoder
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.lane import Lane
from savable_pipeline.sample import REF, TAG_SHIFT, RefArray, Sample, tag_of

State: TypeAlias = dict[str, Any]
# Of an item (index, epoch, part); of a pack or a batch (number, ItemRef, …); of a cut item (ItemRef, start, stop).
ItemRef: TypeAlias = tuple[Any, ...]


class Stage:
    """Base of every stage. A subclass has `__next__`, and `save_state`/`restore_state` if it keeps anything.

    A stage that keeps items between two calls of `__next__` saves their `ref` and makes them again by
    `self.source.fetch(ref)`; one that merges items overrides `ref` and `fetch`.
    """

    source: Stage
    branch = ""
    """The sources of a `Blend` in which this stage lies, the outermost first: "web", or "text/web"; "" for none."""

    def __init__(self, source: Stage) -> None:
        self.source = source

    def __iter__(self) -> Stage:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __next__")

    def pass_over(self) -> None:
        """Go on as `next` would, without making more than that needs. Raises StopIteration at the end."""
        next(self)

    def save_state(self) -> State:
        """What this stage and all before it need to go on from here."""
        return {"source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Go on from where `state` was taken. The stage must be fresh, made with the same settings."""
        self.source.restore_state(state["source"])

    def fetch(self, ref: Any) -> Any:
        """Make the thing that `ref` names again."""
        return self.source.fetch(ref)

    def settings(self) -> dict[str, Any]:
        """What a saved state must agree on, as plain values: every setting that changes the stage's output."""
        return {}

    @property
    def ref(self) -> ItemRef:
        """The ref of what `next` gave last, as `fetch` takes it."""
        return self.source.ref

    @cached_property
    def lane(self) -> Lane:
        """The lane that the pipeline was built for."""
        return self.source.lane

    @property
    def depth(self) -> int:
        """How many stages come before this one: part of the key of what the stage draws."""
        return self.source.depth + 1

    @cached_property
    def endless(self) -> bool:
        """Whether the stage never ends."""
        return self.source.endless

    def count_of(self, lane: int, epoch: int) -> int | None:
        """How many things this stage gives in pass `epoch` of a lane; None if that is not known beforehand."""
        return None

    @property
    def sources(self) -> tuple[Stage, ...]:
        """The stages just upstream: none of a reader, several of one that merges."""
        source = getattr(self, "source", None)
        return () if source is None else (source,)

    @cached_property
    def counts(self) -> Counter[str]:
        """What happened here, by name, such as `skipped/REASON`. A loader takes and clears them with each batch."""
        return Counter()

    @property
    def population(self) -> int:
        """How many samples the dataset has."""
        return self.source.population

    @property
    def encoder(self) -> TaskEncoder | None:
        """The encoder upstream, if there is one."""
        return next((source.encoder for source in self.sources), None)

    @property
    def held_items(self) -> int:
        """How many items this stage holds ready, which would be made again if the lane moved to another process."""
        return 0

    @property
    def tags(self) -> frozenset[int]:
        """The tags of the readers upstream, by which a ref says which source of a `Blend` it is of; {0} without one."""
        return frozenset[int]().union(*(source.tags for source in self.sources))

    def reads(self, source: int) -> bool:
        """Whether a `Ref` with this `source` is of a reader upstream."""
        return any(stage.reads(source) for stage in self.sources)

    def name_branch(self, name: str) -> None:
        """Belong to the source `name` of a `Blend`, with all upstream. Called once, before anything was given."""
        self.branch = name
        for source in self.sources:
            source.name_branch(name)

    def stage_key(self, what: str) -> int:
        """The key of what this stage draws, its own in the lane."""
        return self.lane.key(what, self.depth, *([self.branch] if self.branch else []))

    def knows(self, ref: ItemRef) -> bool:
        """Whether a saved ref is of sources that are still there; one that is not is counted, to be dropped."""
        if all(tag_of(index) in self.tags for index in sample_indices(ref)):
            return True
        self.counts["dropped/source removed"] += 1
        return False

    def known(self, refs: RefArray) -> RefArray:
        """Those of some saved refs whose source is still there; the others are counted."""
        tags = (refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64)
        kept = np.isin(tags, list(self.tags))
        if kept.all():
            return refs
        self.counts["dropped/source removed"] += len(refs) - int(kept.sum())
        return refs[kept]

    def take(self, n: int) -> tuple[list[Any], list[ItemRef]]:
        """Some items, at most `n`, and their refs; none only at the end."""
        for item in self:
            return [item], [self.ref]
        return [], []

    def take_refs(self, n: int) -> RefArray:
        """The refs of some samples, at most `n`: REF (any,); none only at the end."""
        for sample in self:
            return np.array([(sample._index, sample._epoch)], dtype=REF)
        return np.empty(0, REF)

    def samples(self, refs: RefArray) -> list[Sample]:
        """The samples that these refs name, unread."""
        return self.source.samples(refs)

    def announce(self, refs: RefArray) -> None:
        """Let what these refs name be fetched ahead, where it lies far away: a restored stage holds them."""
        for source in self.sources:
            source.announce(refs)


def upstream(last: Stage) -> Iterator[Stage]:
    """A stage and all before it, the first ones first."""
    for source in last.sources:
        yield from upstream(source)
    yield last


StructType = TypeVar("StructType", bound=msgspec.Struct)


def parse_state(stage: Stage, state: State, kind: type[StructType]) -> StructType:
    """The state of a stage as the struct `kind`. Raises `CheckpointMismatchError` if it is another stage's."""
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise CheckpointMismatchError(
            f"this is no state of {type(stage).__name__}: {error}; was a stage added, removed or exchanged?"
        ) from error


def as_ref(ref: Any) -> ItemRef:
    """A ref that was written down as nested lists."""
    return tuple(as_ref(part) if isinstance(part, list | tuple) else part for part in ref)


def sample_indices(ref: ItemRef) -> Iterator[int]:
    """The index of each sample in an item, a pack or a batch."""
    inner = [part for part in ref if isinstance(part, tuple)]
    if not inner:
        yield ref[0]
    for part in inner:
        yield from sample_indices(part)


def dry_limit(population: int) -> int:
    """How many samples in a row may give nothing before a run is ended as one that never will give anything.

    30 times the dataset and a thousand: a lane that draws at random misses a single good sample so often with
    probability e**-30. At most 100,000.
    """
    return min(30 * population + 1000, 100_000)
