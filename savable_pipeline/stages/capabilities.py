"""What some stages can do besides giving elements, each a protocol: the loader, and stages downstream, ask by these.

A stage has what it defines a method for, and a user's own stage may, too. The functions below ask any stage, by
`hasattr`: `isinstance` of a protocol takes 10 µs, and a run may have very many lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import SavableError
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.stage import Stage


class HoldsItems(Protocol):
    """Holds made items, which are made again if the lane moves to another process."""

    @property
    def held_items(self) -> int:
        """How many."""


class FillsUp(Protocol):
    """Gives batches that `SavableLoader(tail="pad")` can fill up; see `BatchStage`."""

    def filler(self) -> Any:
        """A batch of rows that do not count, for a lane that has no more."""


class ReadsFiles(Protocol):
    """Reads from stores, whose files may change."""

    def verify(self, slot: int) -> None:
        """Raise `ShardError` if data changed of which the batch of this slot, to be given next, may be made."""

    def stores_read(self) -> Iterable[RecordStore]:
        """The stores that this stage itself reads from, to be looked at once more when the lane is at its end."""


class HasAddresses(Protocol):
    """Has settings that are told with the place of their data."""

    def addresses(self) -> dict[str, str]:
        """Where the data of a setting lie, by the setting's name: told where the setting differs, never compared."""


class AvoidsSamples(Protocol):
    """Can leave out samples that killed their worker."""

    def may_avoid(self, error: SavableError) -> bool:
        """Whether a sample may be left out that repeatedly killed its worker, as `error` describes."""

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Leave this sample out from now on, in this lane and in all that are restored from its state."""


class Merges(Protocol):
    """Has several sources."""

    def map_sources(self, change: Callable[[Stage], Stage]) -> None:
        """Replace each source by `change(source)`."""


class KnowsBranch(Protocol):
    """Depends on the source of a `Blend` that it belongs to, or may not belong to one."""

    def name_branch(self, name: str) -> None:
        """Become part of the source `name`, with all upstream. Called before the first element."""


class PassesHints(Protocol):
    """Gives elements of its source, or one made of each."""

    @property
    def one_for_one(self) -> bool:
        """Whether it gives one for each, and leaves none out."""


class TakesHints(Protocol):
    """Depends on the batches downstream."""

    def hint_rows(self, rows: int, *, aligned: bool) -> None:
        """Hear that `rows` elements of this stage make a batch; `aligned`: each makes one row of it."""


class Counted(Protocol):
    """Knows beforehand how much it gives."""

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The number of elements of pass `epoch` of a lane; None if it is not known after all."""


class WrapsRefs(Protocol):
    """Gives elements with refs of another form than those of its source."""

    def ref_alone(self, ref: ItemRef) -> ItemRef:
        """The ref of the element that this stage would make of the source's single element `ref`."""


class LosesParts(Protocol):
    """Gives elements of several parts, of which some may be lost when one is made again."""

    def fetch_left(self, ref: ItemRef) -> tuple[Any, ItemRef]:
        """What `fetch(ref)` makes, and the ref of the parts that are in it."""


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
    """The number of elements that a stage gives in pass `epoch` of a lane; None if not known beforehand."""
    if hasattr(stage, "count_of"):
        return cast(Counted, stage).count_of(lane, epoch)
    return count_of(stage.source, lane, epoch) if getattr(stage, "one_for_one", False) else None


def ref_alone(stage: Stage, ref: ItemRef) -> ItemRef:
    """The ref of the element that a stage would make of its source's single element `ref`."""
    return cast(WrapsRefs, stage).ref_alone(ref) if hasattr(stage, "ref_alone") else ref
