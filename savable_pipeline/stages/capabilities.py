"""What some stages can do besides yielding elements, each a protocol that the loader and stages downstream look for.

A stage has a capability if it defines its method; so may a user's own stage. The functions below ask any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import SavableError
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.stage import Stage


class HoldsItems(Protocol):
    """Holds made items, which must be made again if the lane moves to another process."""

    @property
    def held_items(self) -> int:
        """The number of made items."""


class FillsUp(Protocol):
    """Makes batches that `SavableLoader(tail="pad")` can fill up; see `BatchStage`."""

    def filler(self) -> Any:
        """A batch of rows that do not count, for a lane that has no more."""


class ReadsFiles(Protocol):
    """Reads from stores, whose files may change."""

    def verify(self, slot: int) -> None:
        """Raise `ShardError` if a file read for the next batch has changed."""

    def stores_read(self) -> Iterable[RecordStore]:
        """The stores that this stage itself reads from, for a last look at the end of the lane."""


class HasAddresses(Protocol):
    """Has settings whose data have an address."""

    def addresses(self) -> dict[str, str]:
        """The address of each setting's data, by setting: shown where the setting differs, never compared."""


class AvoidsSamples(Protocol):
    """Can leave out samples that killed their worker."""

    def may_avoid(self, error: SavableError) -> bool:
        """Whether a sample that repeatedly killed its worker, as `error` describes, may be left out."""

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Leave this sample out from now on, in this lane and in all that are restored from its state."""


class Merges(Protocol):
    """Has several sources."""

    def map_sources(self, change: Callable[[Stage], Stage]) -> None:
        """Replace each source by `change(source)`."""


class KnowsBranch(Protocol):
    """Depends on the `Blend` source that it belongs to, or may not belong to one."""

    def name_branch(self, name: str) -> None:
        """Become part of the source `name`, with all upstream. Called before the first element."""


class PassesHints(Protocol):
    """Yields elements of its source, or one made of each."""

    @property
    def one_for_one(self) -> bool:
        """Whether it yields one for each element of its source, leaving none out."""


class TakesHints(Protocol):
    """Depends on the batches downstream."""

    def hint_rows(self, rows: int, *, aligned: bool) -> None:
        """Tell this stage, before it starts, how many of its elements make a batch; `aligned`: each makes one row of
        it.
        """


class Counted(Protocol):
    """Knows beforehand how many elements it yields."""

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The number of elements in pass `epoch` of a lane; None if it is not known after all."""


class WrapsRefs(Protocol):
    """Yields elements with refs of another form than those of its source."""

    def ref_alone(self, ref: ItemRef) -> ItemRef:
        """The ref of the element that this stage would make of the source's single element `ref`."""


class LosesParts(Protocol):
    """Yields elements of several parts, some of which may be lost when one is made again."""

    def fetch_left(self, ref: ItemRef) -> tuple[Any, ItemRef]:
        """Make the element again, and return it with the ref of the parts that are in it."""


class FetchesRows(Protocol):
    """Makes batches again without the rows that can no longer be made, and knows which these are."""

    def fetch_rows(self, ref: ItemRef, size: int) -> tuple[Any, tuple[int, ...]]:
        """Make the batch again, and return the rows that are left out; a `Skip` if that is each of them.

        `size`: the rows that it had when it was filled up; 0 if it was not.
        """


def map_sources(stage: Stage, change: Callable[[Stage], Stage]) -> None:
    """Replace each source of a stage by `change(source)`."""
    if hasattr(stage, "map_sources"):
        stage.map_sources(change)
    elif stage.sources:
        stage.source = change(stage.source)


def name_branch(stage: Stage, name: str) -> None:
    """Make a stage and all upstream part of the `Blend` source `name`, before the first element."""
    if hasattr(stage, "name_branch"):
        stage.name_branch(name)
    else:
        for source in stage.sources:
            name_branch(source, name)
    vars(stage).pop("info", None)  # it is described again, with the name


def hint_rows(stage: Stage, rows: int, *, aligned: bool) -> None:
    """Tell a stage, before it starts, that `rows` of its elements make a batch; `aligned`: each makes one row."""
    if hasattr(stage, "hint_rows"):
        stage.hint_rows(rows, aligned=aligned)
    elif hasattr(stage, "one_for_one"):
        hint_rows(stage.source, rows, aligned=aligned and stage.one_for_one)


def count_of(stage: Stage, lane: int, epoch: int) -> int | None:
    """The number of elements that a stage yields in pass `epoch` of a lane; None if not known beforehand."""
    if hasattr(stage, "count_of"):
        return cast(Counted, stage).count_of(lane, epoch)
    return count_of(stage.source, lane, epoch) if getattr(stage, "one_for_one", False) else None


def fetch_rows(stage: Stage, ref: ItemRef, size: int) -> tuple[Any, tuple[int, ...]]:
    """Make a batch again, and return its rows that can no longer be made, which are left out of it."""
    if hasattr(stage, "fetch_rows"):
        return cast(FetchesRows, stage).fetch_rows(ref, size)
    if stage.__class__.fetch is Stage.fetch:
        return fetch_rows(stage.source, ref, size)
    return stage.fetch(ref), ()


def ref_alone(stage: Stage, ref: ItemRef) -> ItemRef:
    """The ref of the element that a stage would make of its source's single element `ref`."""
    return cast(WrapsRefs, stage).ref_alone(ref) if hasattr(stage, "ref_alone") else ref
