"""`ExcludedSamples`: which samples the readers upstream must not have given, as the stages after them ask.

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
from savable_pipeline.data.dataset.exclude_file import ExcludeFile
from savable_pipeline.data.dataset.ref import tag_of, untagged
from savable_pipeline.stages.item_ref import ItemRef, without

REASON = "excluded"


@dataclass(frozen=True, slots=True)
class ExcludedSamples:
    """Numbers of samples, by the tag of their source; a source is absent if none of its samples is excluded."""

    numbers: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of_reader(cls, tag: int, numbers: frozenset[int]) -> ExcludedSamples:
        """The exclusions of one reader."""
        return cls({tag: numbers} if numbers else {})

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
    """The file's samples in a dataset that is `named` so, read once for all lanes of a process; None without a file.

    Raises ValueError for the file to which skipped samples are written.
    """
    if path is None:
        return None
    name = Path(path).resolve()
    if dataset.quarantine is not None and dataset.quarantine.path.resolve() == name:
        raise ValueError(
            f"exclude={name} is the file to which this run writes skipped samples: it may not change while a run goes "
            "on; give a copy of it"
        )
    return lane.shared(("exclude", named, name), lambda: ExcludeFile(name, dataset))


def excluded_numbers(file: ExcludeFile | None, lane: Lane, tag: int) -> frozenset[int]:
    """The samples of the source with this tag that a file, or a decision, excludes."""
    named = frozenset[int]() if file is None else file.numbers
    decided = lane.facts.decisions.excluded.get(tag)
    if decided is None:
        return named
    return latest_shared(lane, ("decided exclude", tag), decided, lambda: named | lane.facts.decisions.numbers(tag))
