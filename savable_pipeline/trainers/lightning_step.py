"""`Step`: where Lightning's trainer is in a step, by its own counts; and those counts as they were when it began.

Lightning counts a batch as `ready` when it has it, and as `processed` behind its optimizer's step:

    next(batches) ── ready ── training_step, backward ── optimizer.step ── global_step ── processed ── lr_scheduler

With `accumulate_grad_batches`, the optimizer steps on a window of several batches. A checkpoint that is written before
that has weights without them, and no gradients: it must have the data, and the counts, from before the window's first.

`PutOff`: a signal that has it save comes between any two instructions. While the optimizer is at work some of the
weights have taken the step and some have not, and no state of the data fits to both: its handler waits for the end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_COUNTS = ("ready", "started", "processed", "completed")


class Step:
    """What `trainer` has begun, and what its optimizer has stepped on: numbers of batches, as its `total.ready`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counts = trainer.fit_loop.epoch_loop.batch_progress
        self._steps = trainer.global_step
        self._stepped_at = self.begun

    @property
    def begun(self) -> int:
        """How many batches it has begun to train on."""
        return int(self._counts.total.ready)

    @property
    def in_training(self) -> bool:
        """Whether a batch is in training: it is begun, and its end has not been told."""
        return bool(self._counts.current.ready != self._counts.current.completed)

    def look(self) -> None:
        """Note which batches the optimizer has stepped on. Must be called between a step and the next batch."""
        if self._steps != self._trainer.global_step:
            self._steps, self._stepped_at = self._trainer.global_step, self.begun

    @property
    def trained(self) -> int:
        """How many the optimizer has stepped on, with all of the epochs before: no gradient waits through an epoch's
        end."""
        self.look()
        counts, begun = self._counts.current, self.begun
        if not self._automatic or self._trainer.accumulate_grad_batches == 1:
            before = begun - int(counts.ready - counts.processed)
            return max(before, self._stepped_at) if self._automatic else before
        return max(begun - int(counts.ready), self._stepped_at)

    @property
    def _automatic(self) -> bool:
        """Otherwise the model says when the optimizer steps, and has when a batch is processed."""
        module = self._trainer.lightning_module
        return module is None or bool(module.automatic_optimization)

    def put_back(self, counts: dict[str, Any]) -> None:
        """Change Lightning's saved counts to those after the batch that was trained on last."""
        back = self.begun - self.trained
        for part in (counts["current"], counts["total"]):
            if back:
                part |= dict.fromkeys(_COUNTS, part["ready"] - back)
            elif part["processed"] != part["ready"]:
                part |= {"started": part["ready"], "processed": part["ready"]}
        if back:
            counts["is_last_batch"] = False


class PutOff:
    """Calls a library's handlers of signals when `busy()` is over: at once, or in the next `run()`."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._waiting: list[Callable[[], Any]] = []

    def wrap(self, library: str) -> None:
        """Put off what the handlers do that `library` has set, all but SIGTERM's, which only notes it."""
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
        """Call the handlers that wait. Call this where a step has ended."""
        while self._waiting:
            self._waiting.pop(0)()
