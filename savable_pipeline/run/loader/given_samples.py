"""`GivenSamples`: how many samples the given batches were made of, by source."""

from __future__ import annotations

from collections import Counter

import numpy as np

from savable_pipeline.data.dataset.sample import TAG_SHIFT
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import ItemRef


class GivenSamples:
    """Counts by the tag of the source: `tags` are those of the run. With one source it does not look at the refs."""

    def __init__(self, tags: list[int]) -> None:
        self._tags = tags
        self._one = len(tags) == 1
        self._total = 0  # with one source
        self._by_tag: Counter[int] = Counter()  # with several

    def add(self, samples: ItemRef | BatchSamples) -> None:
        """Count the samples of a batch."""
        if self._one:
            last = samples[-1] if type(samples) is tuple and samples else None
            if type(last) is tuple and len(last) == 3 and type(last[0]) is type(last[1]) is int:  # whole items
                self._total += len(samples) - 1  # type: ignore[arg-type]
            else:
                self._total += len(BatchSamples.of(samples).refs)
            return
        tags, counts = np.unique(BatchSamples.of(samples).refs[:, 0] >> TAG_SHIFT, return_counts=True)
        self._by_tag.update(dict(zip(tags.tolist(), counts.tolist(), strict=True)))

    def by_tag(self) -> dict[int, int]:
        """The number of samples of each source."""
        return {tag: self._total if self._one else self._by_tag[tag] for tag in self._tags}
