"""`Step`: where Lightning's trainer is in a step, by its own counts; and those counts as they were when it began.

Lightning counts a batch as `ready` when it has it, and as `processed` after its optimizer's step:

    next(batches) ── ready ── training_step, backward ── optimizer.step ── global_step ── processed ── lr_scheduler

With `accumulate_grad_batches`, the optimizer steps on a window of several batches. A checkpoint written before that
step has weights without them, and no gradients: its data and counts must be those from before the first of the window.

`PutOff` delays handlers of signals that save a checkpoint until a step has ended: a signal may arrive between any two
instructions. While the optimizer is at work some of the weights have taken the step and some have not, and no state of
the data fits both.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
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


class PutOff:
    """Calls a library's handlers of signals only outside of a step: at once, or in the next `run()`.

    Args:
        busy: Returns whether a step is in progress.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._waiting: list[Callable[[], Any]] = []

    def wrap(self, library: str) -> None:
        """Delay the handlers that a library has set, except the one of SIGTERM, which only notes the signal.

        Args:
            library: The first part of the names of the library's modules, such as "lightning".
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals() - {signal.SIGTERM}:
            handler = signal.getsignal(number)
            if callable(handler) and type(handler).__module__.startswith(f"{library}."):
                signal.signal(number, self._waits(handler))

    def _waits(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def put_off(number: int, frame: FrameType | None) -> None:
            self._waiting.append(lambda: handler(number, frame))
            if not self._busy():
                self.run()

        return put_off

    def run(self) -> None:
        """Call the waiting handlers. To be called when a step has ended."""
        while self._waiting:
            self._waiting.pop(0)()
