"""Stages of a dataset of Energon in one lane.

    readers ─ After ─ ShuffleBuffer ─ Encode ─ ItemPacker ─ Batcher or BucketBatcher ─ WithoutSkipped

`After` and `WithoutSkipped` are used only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from savable_pipeline.core.lane import Lane, WorkerContext
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.bucket_batcher import BucketBatcher
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked, count_of
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.packing.item_packer import ItemPacker
from savable_pipeline.stages.readers.join import Join
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.stage import BatchStage, ItemStage, PassThrough, SampleStage, Stage, State
from savable_pipeline.stages.task_encoder import Skip
from savable_pipeline.trainers.energon.encoder import FromEnergon

_REFS_PER_CALL = 1 << 16  # refs to skip in one call


class WithoutSkipped(PassThrough, BatchStage):
    """Drops the batches that the encoder skips, and counts them by reason."""

    source: BatchStage

    def __next__(self) -> Any:
        for dropped, batch in enumerate(self.source, 1):
            if type(batch) is not Skip:
                return batch
            self.counts[f"skipped/{batch.reason}"] += 1
            if dropped >= self.info.max_empty:
                raise EncodeError(
                    f"{dropped} batches in a row were skipped, the last one with {batch.reason!r}. Change the encoder."
                )
        raise StopIteration


class After(ChunkedStage, SampleStage):
    """Skips the first `samples` samples of all lanes.

    Only the refs of skipped samples are computed.
    """

    def __init__(self, source: SampleStage, *, samples: int) -> None:
        super().__init__(source)
        self.samples = samples
        samples_per_lane, remainder = divmod(samples, self.lane.count)
        self._remaining = samples_per_lane + (self.lane.index < remainder)  # samples of this lane still to skip

    def take(self, n: int) -> Any:
        while self._remaining and n:
            taken = len(chunked(self.source).take(min(self._remaining, _REFS_PER_CALL)))
            if not taken:
                break
            self._remaining -= taken
        return chunked(self.source).take(n)

    def save_state(self) -> State:
        return {"left": self._remaining, **super().save_state()}

    def restore_state(self, state: State) -> None:
        super().restore_state(state)
        self._remaining = state["left"]

    def settings(self) -> dict[str, Any]:
        return {"samples": self.samples}


@dataclass(frozen=True)
class EnergonPipeline:
    """Builds the stages of a lane for the arguments of `get_train_dataset`."""

    encoder: FromEnergon
    batch_size: int | None
    drop_last: bool
    packing_buffer_size: int | None
    shuffle_buffer_size: int | None
    skip_samples: int = 0

    def __call__(self, lane: Lane) -> BatchStage:
        samples = self.encoder.samples(lane)
        if self.skip_samples:
            samples = After(samples, samples=self.skip_samples)
        if self.shuffle_buffer_size is not None and self.shuffle_buffer_size > 1:
            samples = ShuffleBuffer(samples, size=self.shuffle_buffer_size)
        items: ItemStage = Encode(
            samples, self.encoder, on_error=self.encoder.is_skipped, max_errors=self.encoder.max_errors
        )
        if self.packing_buffer_size is not None:
            items = ItemPacker(items, size=self.packing_buffer_size, select=self.encoder.select)
        return WithoutSkipped(self._batches(items))

    def _batches(self, items: ItemStage) -> BatchStage:
        """Add the stage that builds batches, by groups if the encoder has them."""
        if not self.encoder.groups:
            return Batcher(items, size=self.batch_size or 1, drop_last=self.drop_last)
        size = group_batch_size if self.batch_size is None else self.batch_size
        return BucketBatcher(items, group="group", size=size, drop_last=self.drop_last)

    def epoch_batches(self, lanes: int, seed: int, world_size: int) -> int:
        """Return the number of batches of each rank in an epoch, as Energon counts them.

        Energon assumes one item per sample, one sample per pack and, if the encoder groups items, one per batch.
        """
        size = 1 if self.encoder.groups else self.batch_size or 1
        samples = _sample_stage(self(Lane(count=lanes, seed=seed, worker=WorkerContext(downloads=False))))
        counts = [count for lane in range(lanes) if (count := _samples_of_lane(samples, lane)) is not None]
        # with one lane, or with unknown counts, all samples are divided equally among the ranks
        if lanes == 1 or len(counts) < lanes:
            total = sum(leaf.samples for leaf in self.encoder.sources.leaves.values())
            counts = [total // world_size] * world_size
        lane_batches = min(counts) // size if self.drop_last else -(-min(counts) // size)
        return lane_batches * len(counts) // world_size


def _sample_stage(stage: Stage) -> Stage:
    """Return the stage that reads the samples of a lane, given the lane's last stage.

    A later stage would divide an epoch into whole batches.
    """
    while len(stage.sources) == 1 and not isinstance(stage, Join):
        stage = stage.source
    return stage


def _samples_of_lane(stage: Stage, lane: int) -> int | None:
    """Return the number of samples of a lane in an epoch, or None if it is endless or has a join."""
    counts = [count_of(each, lane, epoch=0) for each in (stage.sources if isinstance(stage, Blend) else [stage])]
    return None if None in counts else sum(count or 0 for count in counts)


def group_batch_size(group: tuple[Any, int]) -> int:
    """Return the batch size of a group.

    It is the second value that `FromEnergon.group` returns.
    """
    _, batch_size = group
    return batch_size
