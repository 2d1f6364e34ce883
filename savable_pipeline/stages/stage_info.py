"""`StageInfo`: the place of a stage in its pipeline, and facts about the stages before it."""

from __future__ import annotations

from dataclasses import dataclass

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.ref import tag_of
from savable_pipeline.stages.excluded_samples import NOTHING_EXCLUDED, ExcludedSamples
from savable_pipeline.stages.item_ref import ItemRef, without
from savable_pipeline.stages.task_encoder import TaskEncoder


@dataclass(frozen=True, slots=True)
class StageInfo:
    """The place of a stage in its pipeline, and facts about the stages before it ("upstream")."""

    lane: Lane
    depth: int
    """The number of stages before this one: part of the key of this stage's random numbers."""
    population: int
    """The number of samples in all datasets upstream."""
    endless: bool
    """Whether the stage never raises StopIteration."""
    tags: frozenset[int]
    """The tags of the readers upstream: the number in a ref that names its source in a `Blend`; {0} without one."""
    origins: frozenset[int]
    """The `Ref.source` of the readers upstream."""
    branch: str = ""
    """The source of a `Blend` that the stage belongs to: "web", or "text/web" in nested Blends; "" outside of one."""
    encoder: TaskEncoder | None = None
    """The encoder that made the items that the stage yields; None if it yields samples."""
    excluded: ExcludedSamples = NOTHING_EXCLUDED
    """The samples of the readers upstream that must not be given."""
    gives_excluded: bool = False
    """Whether the stage may give some of these: no `Encode`, or `Batcher` of samples, has left them out yet."""
    declared: bool = False
    """Whether the encoder may declare the sizes of elements, which are then given unmade."""

    def left_of(self, ref: ItemRef) -> ItemRef | None:
        """The ref of an item or a pack without excluded samples, and those of sources that are no longer upstream."""
        return without(ref, lambda index: tag_of(index) not in self.tags or index in self.excluded)

    def key(self, purpose: str) -> int:
        """The 64-bit key of the stage's random numbers for `purpose`; no other stage of the lane has the same key."""
        return self.lane.key(purpose, self.depth, *([self.branch] if self.branch else []))
