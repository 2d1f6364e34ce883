"""The samples that a batch was made of: as a `Trace` to look at, and as `SampleIds` in the batch itself."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.data.dataset.ref import TAG_SHIFT, Ref, tag_of
from savable_pipeline.errors import EncodeError
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.observer import BatchStep, Observer
from savable_pipeline.stages.batch_samples import BatchSamples, Integers
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.stage import Stage

IDS, ROWS = "sample_ids", "sample_rows"
_UNTAGGED = (1 << TAG_SHIFT) - 1


class TracedSample(NamedTuple):
    """A sample that went into a batch, whole or in part: its shard, its key, its ref."""

    shard: str
    key: str
    ref: Ref


class Trace(NamedTuple):
    """The slot and lane of a batch, and its samples in order.

    `rows` lists the samples of each row: one where a batch is made of items, several where it is made of packs.
    """

    slot: int
    lane: int
    rows: list[list[TracedSample]]

    @property
    def samples(self) -> list[TracedSample]:
        """The samples of all rows."""
        return [sample for row in self.rows for sample in row]


def traced_rows(last: Stage, samples: BatchSamples) -> list[list[TracedSample]]:
    """The samples of a batch, in order, by row.

    `last` is the last stage of any lane; no batch is made.
    """
    return [[_sample(last, ref) for ref in row] for row in samples.by_row()]


def _sample(stage: Stage, ref: ItemRef) -> TracedSample:
    while stage.info.encoder is not None:
        stage = next(source for source in stage.sources if tag_of(ref[0]) in source.info.tags)
    sample = stage.fetch(ref)
    return TracedSample(sample.shard, sample.key, Ref(sample.ref.source, ref[1], sample.ref.index, ref[2]))


def source_names(last: Stage) -> dict[int, str]:
    """The name of each reader's source in a `Blend` ("" without one) by its tag, in the order of the data path."""
    return {tag: stage.info.branch for stage in upstream(last) if not stage.sources for tag in stage.info.tags}


class SampleIds(Observer):
    """Adds to batches which samples they were built of.

    `pad`: whether the batches are padded, with a key "valid"; else such a key is the encoder's own.
    """

    def __init__(self, local: LocalLanes, *, pad: bool) -> None:
        self._local, self._pad = local, pad

    @cached_property
    def _sources(self) -> tuple[Integers, Integers]:
        """The tags of the sources, ascending, and their numbers."""
        tags = np.array(list(source_names(self._local.last_stage)), dtype=np.int64)
        return np.sort(tags), np.argsort(tags)

    def on_batch(self, step: BatchStep) -> None:
        """Replace the batch."""
        step.batch = self.added(step.batch, step.samples)

    def added(self, batch: Any, samples: BatchSamples) -> dict[Any, Any]:
        """The batch with the keys "sample_ids" and, where rows hold several samples, "sample_rows".

        Raises `EncodeError` for a batch that is no dict or has such a key.
        """
        import torch

        if not isinstance(batch, dict) or IDS in batch or ROWS in batch:
            raise EncodeError(
                f"sample_ids=True adds {IDS!r} and {ROWS!r} to batches. Return a dict without them from batch(), "
                f"not {type(batch).__name__}."
            )
        ids = self._ids(samples.refs)
        if samples.rows is not None:
            return {**batch, IDS: torch.from_numpy(ids), ROWS: torch.from_numpy(samples.rows)}
        missing = (
            len(batch["valid"]) - len(ids) if self._pad and "valid" in batch else 0
        )  # rows that only fill up the batch
        if missing > 0:
            ids = np.concatenate([ids, np.full((missing, 3), -1)])
        return {**batch, IDS: torch.from_numpy(ids)}

    def _ids(self, refs: Integers) -> Integers:
        """Source, index and part: int64 (items, 3)."""
        ids = refs.take((0, 0, 2), axis=1)
        ids[:, 1] &= _UNTAGGED
        tags, numbers = self._sources
        ids[:, 0] = 0 if len(tags) == 1 else numbers[np.searchsorted(tags, refs[:, 0] >> TAG_SHIFT)]
        return ids
