"""`Observer`: keeps a book of a run, which takes its steps without knowing any of them; and `BatchStep`.

    Run ── BatchStep ──▶ SourceLosses ─▶ SampleIds ─▶ PinnedMemory ─▶ RowsInFlight ─▶ LedgerKeeper ─▶ Stats ──▶ trainer
                    may raise       may replace the batch                        only read

If an observer raises, the batch is not yielded, and the next step has it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from savable_pipeline.core.containers import with_parts_changed
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.state.flights import EPOCH_SHIFT, SLOTS
from savable_pipeline.stages.batch_samples import BatchSamples


@dataclass
class BatchStep:
    """A batch on its way to the trainer.

    `batch`: as the trainer gets it; observers may replace it. `started`: when the trainer asked for it, by
    `time.perf_counter`. `number`: its slot with its epoch, as receipts name it. `repeated`: if an observer asked for
    it again, its rows that come again, as bits (0: none, a filler); None for the batch of a new slot.
    """

    at: Position
    after: Position
    delivery: Delivery
    batch: Any
    started: float
    number: int
    repeated: int | None = None

    @cached_property
    def samples(self) -> BatchSamples:
        """What the batch was built of."""
        return BatchSamples.of(self.delivery.samples)

    @property
    def epoch_and_slot(self) -> tuple[int, int]:
        """The epoch and the slot of the batch."""
        return self.number >> EPOCH_SHIFT, self.number & SLOTS


class Observer:
    """Does nothing."""

    def repeats(self, at: Position, vote: Callable[[int], int] | None) -> Iterator[bytes] | None:
        """Return the `Remake`s of batches to yield before the next slot.

        None (default) for none.

        `vote` returns the smallest or largest vote of all ranks; None where they cannot communicate.
        """

    def on_batch(self, step: BatchStep) -> None:
        """Note a batch before it is yielded."""

    def on_counts(self, counts: Mapping[str, int | float]) -> object:
        """Note counters of stages that came without a batch."""

    def on_skip(self, at: Position) -> None:
        """Note that slots are skipped from here on."""

    def on_epoch_end(self, over: Position) -> None:
        """Note the end of a finite epoch. Raises `SavableError` if it had too little data."""

    def on_reconfigure(self, at: Position) -> None:
        """Note that decisions hold from here on."""

    def on_save(self, at: Position, state: MutableMapping[str, Any], lag: int) -> None:
        """Add own entries to a state of a position, which is `lag` batches before the last one."""

    def on_merge(self, own: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
        """Note what the state of all ranks says, of which `own` is this rank's."""

    def without_entries(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state that is loaded without own entries.

        Raises `CheckpointMismatchError` if they are missing.
        """
        return state

    def on_load(self, at: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        """Check a state that is loaded, or a return to an earlier position (None).

        Return what adopts it.
        """

    def numbers(self) -> Mapping[str, int | float]:
        """Return counters for `SavableLoader.stats`."""
        return {}

    def close(self) -> None:
        """Close files; a later batch opens them again."""


class PinnedMemory(Observer):
    """Copies tensors to pinned memory."""

    def on_batch(self, step: BatchStep) -> None:
        """Replace the batch."""
        step.batch = in_pinned_memory(step.batch)


def in_pinned_memory(batch: Any) -> Any:
    """The batch with its tensors in pinned memory; itself without a GPU.

    Through torch's own caching allocator, which reuses a block only once copies from it, as by
    `tensor.to("cuda", non_blocking=True)`, are done.
    """
    import torch

    if not torch.cuda.is_available():
        return batch
    return batch.pin_memory() if isinstance(batch, torch.Tensor) else with_parts_changed(batch, in_pinned_memory)
