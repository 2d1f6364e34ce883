"""Observers that change a batch, `Trace`, and `new_observers` of a run.

A run calls its observers in this order:

    SourceLosses ─▶ SampleIds ─▶ PinnedMemory ─▶ RowsInFlight ─▶ LedgerKeeper ─▶ Stats ──▶ trainer
    may raise       may replace the batch                        only record
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.core.containers import with_parts_changed
from savable_pipeline.data.dataset.ref import TAG_SHIFT, Ref, tag_of
from savable_pipeline.errors import EncodeError
from savable_pipeline.run.loader.ledger_keeper import LedgerKeeper
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.position import BatchStep, Observer
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.states import States
from savable_pipeline.run.loader.stats import SourceLosses, Stats
from savable_pipeline.stages.batch_samples import BatchSamples, Integers
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.stage import Stage


class PinnedMemory(Observer):
    """Copies tensors to pinned memory."""

    def on_batch(self, step: BatchStep) -> None:
        """Replace the batch by a copy with pinned tensors."""
        step.batch = in_pinned_memory(step.batch)


def in_pinned_memory(batch: Any) -> Any:
    """Copy the tensors of a batch to pinned memory.

    Without a GPU, return the batch as it is. torch's caching allocator reuses pinned memory only after copies from it
    have ended, such as those of `tensor.to("cuda", non_blocking=True)`.
    """
    import torch

    if not torch.cuda.is_available():
        return batch
    return batch.pin_memory() if isinstance(batch, torch.Tensor) else with_parts_changed(batch, in_pinned_memory)


IDS, ROWS = "sample_ids", "sample_rows"
_UNTAGGED = (1 << TAG_SHIFT) - 1


class TracedSample(NamedTuple):
    """Sample of which an item or a part of one is in a batch: its shard, key and ref."""

    shard: str
    key: str
    ref: Ref


class Trace(NamedTuple):
    """Slot and lane of a batch, and its samples in order.

    `rows` lists the samples of each row: one in a batch of items, several in a batch of packs.
    """

    slot: int
    lane: int
    rows: list[list[TracedSample]]

    @property
    def samples(self) -> list[TracedSample]:
        """Return the samples of all rows."""
        return [sample for row in self.rows for sample in row]


def traced_rows(last: Stage, samples: BatchSamples) -> list[list[TracedSample]]:
    """Return the samples of each row of a batch, in order.

    `last` is the last stage of any lane.
    """
    return [[_traced_sample(last, ref) for ref in row] for row in samples.by_row()]


def _traced_sample(stage: Stage, ref: ItemRef) -> TracedSample:
    """Return the sample of an item's ref, from the last stage upstream of `stage` that yields samples."""
    tagged_index, epoch, part = ref
    while stage.info.encoder is not None:
        stage = next(source for source in stage.sources if tag_of(tagged_index) in source.info.tags)
    sample = stage.fetch(ref)
    return TracedSample(sample.shard, sample.key, Ref(sample.ref.source, epoch, sample.ref.index, part))


def source_names(last: Stage) -> dict[int, str]:
    """Return the name of the source of each reader, by its tag.

    The name is "" without a `Blend`.
    """
    return {tag: stage.info.branch for stage in upstream(last) if not stage.sources for tag in stage.info.tags}


class SampleIds(Observer):
    """Observer that adds the IDs of its samples to each batch.

    `pad` says whether batches have padding rows and the key "valid". Otherwise such a key is the encoder's own.
    """

    def __init__(self, local: LocalLanes, *, pad: bool) -> None:
        self._local, self._pad = local, pad

    @cached_property
    def _sources(self) -> tuple[Integers, Integers]:
        """Return the tags of the sources in ascending order, and the number of each in the loader's `sources`."""
        tags = np.array(list(source_names(self._local.last_stage)), dtype=np.int64)
        return np.sort(tags), np.argsort(tags)

    def on_batch(self, step: BatchStep) -> None:
        """Replace the batch by one with the IDs of its samples."""
        step.batch = self.with_ids(step.batch, step.samples)

    def with_ids(self, batch: Any, samples: BatchSamples) -> dict[Any, Any]:
        """Return the batch with "sample_ids" and, for rows of packs, "sample_rows".

        Raises `EncodeError` for a batch that is not a dict or has such a key.
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
        missing = len(batch["valid"]) - len(ids) if self._pad and "valid" in batch else 0  # padding rows
        if missing > 0:
            ids = np.concatenate([ids, np.full((missing, 3), -1)])
        return {**batch, IDS: torch.from_numpy(ids)}

    def _ids(self, refs: Integers) -> Integers:
        """Return the number of the source, index and part of each item: int64 (items, 3)."""
        ids = refs.take((0, 0, 2), axis=1)  # tagged index, tagged index, part
        ids[:, 1] &= _UNTAGGED
        tags, numbers = self._sources
        ids[:, 0] = 0 if len(tags) == 1 else numbers[np.searchsorted(tags, refs[:, 0] >> TAG_SHIFT)]
        return ids


def new_observers(
    settings: LoaderSettings, ranks: Ranks, local: LocalLanes, states: States, prefetcher: Prefetcher
) -> list[Observer]:
    """Build the observers for these settings, in the order in which they see a step."""
    found: list[Observer] = [SourceLosses(local)]
    if settings.sample_ids:
        found.append(SampleIds(local, pad=settings.pad))
    if settings.pin_memory:
        found.append(PinnedMemory())
    rows = RowsInFlight(settings, ranks, local) if settings.acknowledge else None
    found += [rows] if rows is not None else []
    others = [prefetcher.numbers] if rows is None else [rows.table.numbers, prefetcher.numbers]
    stats = Stats(lambda: source_names(local.last_stage), others)
    if settings.ledger is not None and ranks.builds:
        pop_acknowledged = dict if rows is None else rows.table.pop_acknowledged
        found.append(LedgerKeeper(settings, local, states, stats, pop_acknowledged))
    return [*found, stats]
