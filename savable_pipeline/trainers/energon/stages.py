"""The stages of a dataset of Energon's in one lane; `After` and `WithoutSkipped` are for it alone.

readers ─ After ─ ShuffleBuffer ─ Encode ─ ItemPacker ─ Batcher or BucketBatcher ─ WithoutSkipped
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.ref import RefArray
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.bucket_batcher import BucketBatcher
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.packing.item_packer import ItemPacker
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.skipped_samples import max_empty_samples
from savable_pipeline.stages.stage import BatchStage, ItemStage, SampleStage, State
from savable_pipeline.stages.stage_bases import PassThrough, TakesRefs
from savable_pipeline.stages.task_encoder import Skip
from savable_pipeline.trainers.energon.encoder import FromEnergon, is_tolerated

_AT_ONCE = 1 << 16  # refs


class WithoutSkipped(PassThrough, BatchStage):
    """Drops the batches that the encoder skips, and counts them by reason."""

    source: BatchStage

    def __next__(self) -> Any:
        for dropped, batch in enumerate(self.source, 1):
            if type(batch) is not Skip:
                return batch
            self.counts[f"skipped/{batch.reason}"] += 1
            if dropped >= max_empty_samples(self.info.population):
                raise EncodeError(f"{dropped} batches in a row were skipped, the last as {batch.reason!r}")
        raise StopIteration


class After(TakesRefs):
    """The samples after the first ones, whose refs alone are taken: `samples` counts those of all lanes."""

    def __init__(self, source: SampleStage, *, samples: int) -> None:
        super().__init__(source)
        self.samples = samples
        each, more = divmod(samples, self.lane.count)
        self._left = each + (self.lane.index < more)

    def take_refs(self, n: int) -> RefArray:
        while self._left and n:
            taken = len(self.source.take_refs(min(self._left, _AT_ONCE)))
            if not taken:
                break
            self._left -= taken
        return self.source.take_refs(n)

    def fetch(self, ref: Any) -> Any:
        return self.source.fetch(ref)

    def save_state(self) -> State:
        return {"left": self._left, **super().save_state()}

    def restore_state(self, state: State) -> None:
        super().restore_state(state)
        self._left = state["left"]

    def settings(self) -> dict[str, Any]:
        return {"samples": self.samples}


@dataclass(frozen=True)
class EnergonPipeline:
    """Builds the stages of a lane: what `get_train_dataset` was asked for."""

    encoder: FromEnergon
    batch_size: int | None
    drop_last: bool
    packing_buffer_size: int | None
    shuffle_buffer_size: int | None
    handler: Any  # of errors, as in WorkerConfig; None: skip and count
    skip_samples: int = 0

    def __call__(self, lane: Lane) -> BatchStage:
        samples = self.encoder.samples(lane)
        if self.skip_samples:
            samples = After(samples, samples=self.skip_samples)
        if self.shuffle_buffer_size is not None and self.shuffle_buffer_size > 1:
            samples = ShuffleBuffer(samples, size=self.shuffle_buffer_size)
        items: ItemStage = Encode(samples, self.encoder, on_error=self.is_skipped, max_errors=self.encoder.max_errors)
        if self.packing_buffer_size is not None:
            items = ItemPacker(items, size=self.packing_buffer_size, select=self.encoder.select)
        return WithoutSkipped(self._batches(items))

    def _batches(self, items: ItemStage) -> BatchStage:
        if not self.encoder.groups:
            return Batcher(items, size=self.batch_size or 1, drop_last=self.drop_last)
        size = size_in_group if self.batch_size is None else self.batch_size
        return BucketBatcher(items, group="group", size=size, drop_last=self.drop_last)

    def is_skipped(self, error: SavableError) -> bool:
        """Whether a sample whose encoding raised is left out, as Energon does."""
        cause = error.__cause__
        if is_tolerated(cause) and self.handler is not None:
            self.handler(cause, None, None)
        return is_tolerated(cause)


def size_in_group(group: tuple[Any, int]) -> int:
    """The size of the batches of a group, which it brings with it."""
    return group[1]
