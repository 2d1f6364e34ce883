"""`StageInfo`: position of a stage in its pipeline, and facts about its sources.

One of the facts is which samples are excluded:

reader(exclude=FILE) ──▶ ShuffleBuffer, Blend ──▶ Encode ────────▶ OnlinePacker, Balance, Batcher
yields all samples       buffer all samples       drops excluded   at a restore, drop excluded samples
                                                  samples          from what the state has
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
    """Indices of excluded samples by the tag of their source.

    `numbers` has no entry for a source without excluded samples.
    """

    numbers: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __or__(self, other: ExcludedSamples) -> ExcludedSamples:
        return ExcludedSamples({**self.numbers, **other.numbers})

    def __contains__(self, index: int) -> bool:
        """Return whether a sample is excluded. `index` has the tag of its source, as in refs."""
        return untagged(index) in self.numbers.get(tag_of(index), ())

    def remaining(self, ref: ItemRef) -> ItemRef | None:
        """Return the ref of an item or a pack without excluded samples.

        It is None if nothing remains.
        """
        return without(ref, self.__contains__)


NOTHING_EXCLUDED = ExcludedSamples()


def read_exclude_file(
    path: str | os.PathLike[str] | None, lane: Lane, dataset_key: object, dataset: Dataset
) -> ExcludeFile | None:
    """Return the exclude file at `path`, or None if `path` is None.

    The file is read once for all lanes of a process. `dataset_key` is the key of the dataset among shared
    objects. Raises ValueError if `path` is the quarantine file.
    """
    if path is None:
        return None
    name = Path(path).resolve()
    if dataset.quarantine is not None and dataset.quarantine.path.resolve() == name:
        raise ValueError(f"exclude={name} is also the quarantine file, which changes during the run. Pass a copy.")
    return lane.shared(("exclude", dataset_key, name), lambda: ExcludeFile(name, dataset))


def excluded_indices(file: ExcludeFile | None, lane: Lane, tag: int) -> frozenset[int]:
    """Return the excluded indices of the source with this tag.

    A file or a decision of the run excludes them. The indices are without the tag.
    """
    of_file = frozenset[int]() if file is None else file.indices
    if (decided := lane.facts.decisions.excluded.get(tag)) is None:
        return of_file
    return latest_shared(lane, ("decided exclude", tag), decided, lambda: of_file | lane.facts.decisions.numbers(tag))


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Position of a stage in its pipeline, and facts about stages upstream."""

    lane: Lane
    depth: int
    """The number of stages before this one. It is part of the key of this stage's random numbers."""
    population: int
    """The number of samples in all datasets upstream."""
    endless: bool
    """Whether the stage never raises StopIteration."""
    tags: frozenset[int]
    """The tags of upstream readers: numbers in refs that identify sources of a `Blend`; {0} without a `Blend`."""
    origins: frozenset[int]
    """`Ref.source` of upstream readers."""
    branch: str = ""
    """The name of the `Blend` source to which the stage belongs, such as "web", or "text/web" if nested; else ""."""
    encoder: TaskEncoder | None = None
    """The encoder of the items that the stage yields; None if it yields samples."""
    excluded: ExcludedSamples = NOTHING_EXCLUDED
    """The excluded samples of upstream readers."""
    yields_excluded: bool = False
    """Whether the stage may yield excluded samples, because no `Encode` or `Batcher` has left them out yet."""
    raises: bool = False
    """Whether no stage skips samples because of errors, or because a joined sample is missing."""
    declared: bool = False
    """Whether the encoder may declare the sizes of elements, which are then yielded unbuilt."""

    @property
    def max_empty(self) -> int:
        """Return how many samples, items or packs in a row without a result end a run.

        It is 30 times the dataset plus 1,000, at most 100,000. If a dataset has a single good sample, a lane that draws
        at random misses it for this long with probability e**-30.
        """
        return min(30 * self.population + 1000, 100_000)

    def remaining(self, ref: ItemRef) -> ItemRef | None:
        """Return the ref of an item or pack without excluded samples and removed sources.

        It is None if nothing remains.
        """
        return without(ref, lambda index: tag_of(index) not in self.tags or index in self.excluded)

    def key(self, purpose: str) -> int:
        """Return the 64-bit key of the stage's random numbers for `purpose`.

        No other stage of the lane has the same key.
        """
        return self.lane.key(purpose, self.depth, *([self.branch] if self.branch else []))
