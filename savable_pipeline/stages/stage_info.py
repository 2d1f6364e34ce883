"""`StageInfo`: position of a stage in its pipeline, and upstream facts.

Excluded samples are such a fact.

reader(exclude=FILE) ──▶ ShuffleBuffer, Blend ──▶ Encode ──▶ OnlinePacker, Balance, Batcher
deals all samples        hold all of them         leaves     at a restore, leave them out
                                                  them out   of what the state holds
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from savable_pipeline.core.lane import Lane, latest_shared
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.key_index import ExcludeFile
from savable_pipeline.data.dataset.ref import tag_of, untagged
from savable_pipeline.stages.item_ref import ItemRef, without
from savable_pipeline.stages.task_encoder import TaskEncoder

REASON = "excluded"


@dataclass(frozen=True, slots=True)
class ExcludedSamples:
    """Indices of excluded samples, by the tag of their source.

    A source is absent if none of its samples is excluded.
    """

    numbers: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __or__(self, other: ExcludedSamples) -> ExcludedSamples:
        return ExcludedSamples({**self.numbers, **other.numbers})

    def __contains__(self, index: int) -> bool:
        """Whether the sample with this index, as it is in refs, is excluded."""
        return untagged(index) in self.numbers.get(tag_of(index), ())

    def left_of(self, ref: ItemRef) -> ItemRef | None:
        """The ref of an item or a pack without these samples; None if nothing is left."""
        return without(ref, self.__contains__)


NOTHING_EXCLUDED = ExcludedSamples()


def read_exclude_file(
    path: str | os.PathLike[str] | None, lane: Lane, named: object, dataset: Dataset
) -> ExcludeFile | None:
    """Read an exclude file once for all lanes of a process.

    `named` is the dataset's name. Without a file, the result is None.

    Raises ValueError for the file to which skipped samples are written.
    """
    if path is None:
        return None
    name = Path(path).resolve()
    if dataset.quarantine is not None and dataset.quarantine.path.resolve() == name:
        raise ValueError(f"exclude={name} is also the quarantine file, which changes during the run. Pass a copy.")
    return lane.shared(("exclude", named, name), lambda: ExcludeFile(name, dataset))


def excluded_numbers(file: ExcludeFile | None, lane: Lane, tag: int) -> frozenset[int]:
    """The samples of the source with this tag that a file, or a decision, excludes."""
    named = frozenset[int]() if file is None else file.numbers
    decided = lane.facts.decisions.excluded.get(tag)
    if decided is None:
        return named
    return latest_shared(lane, ("decided exclude", tag), decided, lambda: named | lane.facts.decisions.numbers(tag))


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Position of a stage in its pipeline, and facts about stages upstream."""

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
    raises: bool = False
    """Whether no stage skips a sample because of an error, or for lack of a joined one."""
    declared: bool = False
    """Whether the encoder may declare the sizes of elements, which are then given unmade."""

    def left_of(self, ref: ItemRef) -> ItemRef | None:
        """Remove excluded samples and removed sources from a ref.

        The ref is of an item or a pack.
        """
        return without(ref, lambda index: tag_of(index) not in self.tags or index in self.excluded)

    def key(self, purpose: str) -> int:
        """Return the 64-bit key of the stage's random numbers for `purpose`.

        No other stage of the lane has the same key.
        """
        return self.lane.key(purpose, self.depth, *([self.branch] if self.branch else []))
