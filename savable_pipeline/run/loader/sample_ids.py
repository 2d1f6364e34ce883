"""`SampleIds`: what `SavableLoader(ids=True)` adds to a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from savable_pipeline.data.dataset.sample import TAG_SHIFT
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.batch_samples import BatchSamples, Integers
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.stage import Stage

IDS, ROWS = "sample_ids", "sample_rows"
_UNTAGGED = (1 << TAG_SHIFT) - 1


def source_names(last: Stage) -> dict[int, str]:
    """The name of each reader's source in a `Blend` ("" without one) by its tag, in the order of the data path."""
    return {tag: stage.info.branch for stage in upstream(last) if not stage.sources for tag in stage.info.tags}


class SampleIds:
    """Adds to batches which samples they were made of. `last` is the last stage of any lane of the pipeline."""

    def __init__(self, last: Stage) -> None:
        tags = np.array(list(source_names(last)), dtype=np.int64)
        self._numbers = np.argsort(tags)  # of the sources, in the order of their tags
        self._tags = tags[self._numbers]

    def added(self, batch: Any, samples: BatchSamples) -> dict[Any, Any]:
        """The batch with the keys "sample_ids" and, where rows hold several samples, "sample_rows".

        Raises `EncodeError` for a batch that is no dict or has such a key.
        """
        import torch

        if not isinstance(batch, dict) or IDS in batch or ROWS in batch:
            raise EncodeError(
                f"ids=True adds the keys {IDS!r} and {ROWS!r} to batches: the encoder's batch() must give a dict "
                f"without them, not {type(batch).__name__}"
            )
        ids = self._ids(samples.refs)
        if samples.rows is not None:
            return {**batch, IDS: torch.from_numpy(ids), ROWS: torch.from_numpy(samples.rows)}
        missing = len(batch["valid"]) - len(ids) if "valid" in batch else 0  # rows that only fill up the batch
        if missing > 0:
            ids = np.concatenate([ids, np.full((missing, 3), -1)])
        return {**batch, IDS: torch.from_numpy(ids)}

    def _ids(self, refs: Integers) -> Integers:
        """Source, index and part: int64 (items, 3)."""
        ids = refs.take((0, 0, 2), axis=1)
        ids[:, 1] &= _UNTAGGED
        one = len(self._tags) == 1
        ids[:, 0] = 0 if one else self._numbers[np.searchsorted(self._tags, refs[:, 0] >> TAG_SHIFT)]
        return ids
