"""`trace`: the samples that a batch was made of."""

from __future__ import annotations

from typing import NamedTuple

from savable_pipeline.data.dataset.sample import Ref, tag_of
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.stage import Stage


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
    """The samples of a batch, in order, by row. `last` is the last stage of any lane; no batch is made."""
    return [[_sample(last, ref) for ref in row] for row in samples.by_row()]


def _sample(stage: Stage, ref: ItemRef) -> TracedSample:
    while stage.info.encoder is not None:
        stage = next(source for source in stage.sources if tag_of(ref[0]) in source.info.tags)
    sample = stage.fetch(ref)
    return TracedSample(sample.shard, sample.key, Ref(sample.ref.source, ref[1], sample.ref.index, ref[2]))
