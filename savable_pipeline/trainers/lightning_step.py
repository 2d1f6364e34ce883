"""`Step`: where Lightning's trainer is in a step, by its own counts; and those counts as they were when it began.

Lightning counts a batch as `ready` when it has it, and as `processed` after its optimizer's step:

    next(batches) ── ready ── training_step, backward ── optimizer.step ── global_step ── processed ── lr_scheduler

With `accumulate_grad_batches`, the optimizer steps on a window of several batches. A checkpoint written before that
step
has weights without them, and no gradients: its data and counts must be those from before the first of the window.
"""

from __future__ import annotations

from typing import Any

_COUNTS = ("ready", "started", "processed", "completed")


class Step:
    """What the trainer has begun, and what its optimizer has stepped on: numbers of batches, as its `total.ready`.

    Args:
        trainer: A `lightning.pytorch.Trainer` in its `fit`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counts = trainer.fit_loop.epoch_loop.batch_progress
        self._steps = trainer.global_step
        self._stepped_at = self.begun

    @property
    def begun(self) -> int:
        """The number of batches that it has begun to train on."""
        return int(self._counts.total.ready)

    @property
    def in_training(self) -> bool:
        """Whether a batch has been begun and not yet completed."""
        return bool(self._counts.current.ready != self._counts.current.completed)

    def look(self) -> None:
        """Note which batches the optimizer has stepped on. Must be called between a step and the next batch."""
        if self._steps != self._trainer.global_step:
            self._steps, self._stepped_at = self._trainer.global_step, self.begun

    @property
    def trained(self) -> int:
        """The number of batches that the optimizer has stepped on.

        All batches of earlier epochs count: no gradient is carried over the end of an epoch.
        """
        self.look()
        counts, begun = self._counts.current, self.begun
        if not self._automatic or self._trainer.accumulate_grad_batches == 1:
            before = begun - int(counts.ready - counts.processed)
            return max(before, self._stepped_at) if self._automatic else before
        return max(begun - int(counts.ready), self._stepped_at)

    @property
    def _automatic(self) -> bool:
        """Whether Lightning steps the optimizer; otherwise the model does, and decides when a batch is processed."""
        module = self._trainer.lightning_module
        return module is None or bool(module.automatic_optimization)

    def put_back(self, counts: dict[str, Any]) -> None:
        """Change Lightning's saved counts, in place, to those after the batch that was trained on last.

        Args:
            counts: The `batch_progress` of a checkpoint.
        """
        back = self.begun - self.trained
        for part in (counts["current"], counts["total"]):
            if back:
                part |= dict.fromkeys(_COUNTS, part["ready"] - back)
            elif part["processed"] != part["ready"]:
                part |= {"started": part["ready"], "processed": part["ready"]}
        if back:
            counts["is_last_batch"] = False
