"""The loader in Lightning's `Trainer`: `SavableDataModule`.

The DataModule creates the loader in each process, and follows the trainer's counts. Lightning asks the result of
`train_dataloader()` for its state on every rank, and saves that of rank 0. If the loader has no length, Lightning
fetches one batch ahead, except after an epoch's last one. From a checkpoint at an epoch's end, Lightning does not load
that state, but the DataModule does, from every checkpoint.

Lightning counts a batch as `ready` when it has it, and as `processed` after its optimizer step:

    next(batches) ── ready ── training_step, backward ── optimizer.step ── global_step ── processed ── lr_scheduler

With `accumulate_grad_batches`, the optimizer steps on a window of several batches. A checkpoint written before that
step has neither the updated weights nor the gradients. So its data and counts must be those from before the window. A
signal may arrive between any two instructions. During an optimizer step, only some of the weights are updated, and no
state of the data fits both. So handlers of signals that save wait until the step has ended.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from savable_pipeline.errors import StateError
from savable_pipeline.run.loader.position import MAX_LAG, Position
from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.fabric import shared_sizes
from savable_pipeline.trainers.trainer_loader import TrainerLoader, check_peers, check_restarting, length_of, loaders_in

log = logging.getLogger(__name__)

_COUNTS = ("ready", "started", "processed", "completed")
_AHEAD = 1  # batches that Lightning fetches ahead if it does not know the length


class SavableDataModule(LightningDataModule):  # type: ignore[misc]
    """DataModule that creates the loaders in each process and saves their state.

    The state is in the trainer's checkpoints. Each function is called once in each process, after torch.distributed has
    started. So `ddp`, `ddp_spawn` and `ddp_fork` give each rank its own batches. Another trainer on the same DataModule
    continues after the batch that the last one trained on. Loaders for evaluation need `on_iter="restart"`, so that
    neither a sanity check nor a limit on batches takes any from the next evaluation.

    Args:
        train: Creates the `SavableLoader` to train on. For `ddp_spawn` all functions must be picklable.
        val: Creates the loader to validate on, or a list or dict of them.
        test: The same for `trainer.test`.
        predict: The same for `trainer.predict`.

    Raises:
        ValueError: A loader for evaluation was created without `on_iter="restart"`, tensor-parallel processes would get
            other batches, or `accumulate_grad_batches` plus the batches fetched ahead is above 16.
        StateError: In `fit`: the trainer continues after its first batch, but the checkpoint has no state of the
            loader.

    Example:
        ```python
        from savable_pipeline.trainers.lightning import SavableDataModule

        def train() -> sp.SavableLoader:
            return sp.SavableLoader(lambda lane: sp.Batcher(sp.TarShardReader("shards/", lane), size=4), seed=7)

        SavableDataModule(train).val_dataloader()  # []
        ```
    """

    def __init__(
        self,
        train: Callable[[], SavableLoader] | None = None,
        *,
        val: Callable[[], Any] | None = None,
        test: Callable[[], Any] | None = None,
        predict: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self._makers = {"train": train, "val": val, "test": test, "predict": predict}
        self._created: dict[str, Any] = {}
        self._checkpoints = _Checkpoints(self, partial(self._loaders, "train"))  # picklable, for `ddp_spawn`

    def _loaders(self, name: str) -> Any:
        """Return the loaders that the function of this name ("train", "val", …) creates, or [] without one."""
        if name not in self._created:
            make = self._makers[name]
            loaders = [] if make is None else make()
            if self.trainer is not None:
                sizes = shared_sizes(self.trainer.strategy)
                check_peers(loaders, self.trainer.world_size, sizes, "model.device_mesh")
            self._created[name] = loaders
        return self._created[name]

    def setup(self, stage: str) -> None:
        """Join the trainer's checkpoints. An override must call it.

        Args:
            stage: The trainer's next task: "fit", "validate", "test" or "predict".
        """
        if stage == "fit":
            self._checkpoints.join_fit(self.trainer)

    def train_dataloader(self) -> _Batches:
        """Return the batches to train on, whose state the trainer's checkpoints save."""
        return self._checkpoints.batches(self.trainer)

    def val_dataloader(self) -> Any:
        """Return the loaders to validate on."""
        return check_restarting(self._loaders("val"))

    def test_dataloader(self) -> Any:
        """Return the loaders to test on."""
        return check_restarting(self._loaders("test"))

    def predict_dataloader(self) -> Any:
        """Return the loaders to predict for."""
        return check_restarting(self._loaders("predict"))

    def teardown(self, stage: str) -> None:
        """Stop the workers.

        Args:
            stage: The task that the trainer has finished: "fit", "validate", "test" or "predict".
        """
        for loaders in self._created.values():
            for loader in loaders_in(loaders):
                loader.close()


class _Batches(TrainerLoader):
    """Batches that `trainer` trains on.

    An epoch that was started on other ranks is counted, and ends, as if these ranks had started it.
    """

    def __init__(self, loader: SavableLoader, trainer: Any) -> None:
        self.trainer = trainer
        self.step = step = Step(trainer)
        ahead = _most_ahead(trainer, loader)
        super().__init__(loader, trained=lambda: step.trained, begun=lambda: step.begun, most_ahead=ahead)
        self._epoch_counts = trainer.fit_loop.epoch_loop.batch_progress.current
        limit = trainer.limit_train_batches
        self._has_whole_epochs = isinstance(limit, float) and limit == 1  # the int 1 would mean one batch
        self._is_fetching = False
        self.delayed_signals = DelayedSignals(lambda: self._is_fetching or step.in_training)

    def _begin(self, begun: int) -> None:
        # with `overfit_batches`, an option for debugging, each epoch repeats the first batches
        if self.trainer.overfit_batches and not self._epoch_counts.ready:
            self.rewind()
            settings = self._run.settings
            self._run.return_to(Position.start(0, self._run.ranks, settings.lanes, pad=settings.pad))
            self._restart_count()
        super()._begin(begun)

    def _next(self) -> Any:
        self.step.update()
        self._is_fetching = True
        try:
            try:
                return super()._next()
            except StopIteration:
                if self._has_whole_epochs:
                    raise
            iter(self._loader)  # an epoch of Lightning may span two of the loader, with `limit_train_batches`
            self._record_position()
            return super()._next()
        finally:
            self._is_fetching = False
            if not self.step.in_training:
                self.delayed_signals.run()

    def __iter__(self) -> Any:
        return super().__iter__()  # `TrainerLoader` rejects calls by Lightning, but not by this class

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()  # overridden for the same reason as `__iter__`

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Lightning also calls this when it resumes within an epoch, which changes nothing.
        """
        super().load_state_dict(state)
        yielded, counts = self.yielded_of_epoch, self._epoch_counts
        if yielded is None or not self._has_whole_epochs or not counts.ready:
            return
        uncounted = (yielded or len(self)) - counts.ready  # a checkpoint at an epoch's end has all of its batches
        for name in _COUNTS:
            setattr(counts, name, getattr(counts, name) + uncounted)


class _Checkpoints(Callback):  # type: ignore[misc]
    """Callback that saves and loads the state in a trainer's checkpoints, at any moment of a step."""

    def __init__(self, data: SavableDataModule, make: Callable[[], SavableLoader]) -> None:
        self._data = data
        self._make = make
        self._batches: _Batches | None = None
        self._state: Mapping[str, Any] | None = None  # from the checkpoint that a trainer resumes from
        self._steps_at_start = -1  # `trainer.global_step` when the optimizer last started a step

    def join_fit(self, trainer: Any) -> None:
        """Add this callback to a trainer that starts a `fit`."""
        self._state = None
        if self not in trainer.callbacks:
            trainer.callbacks.append(self)

    def batches(self, trainer: Any) -> _Batches:
        """Return the batches to train on, after the state of the checkpoint if any."""
        if self._batches is None or self._batches.trainer is not trainer:
            batches = _Batches(self._make(), trainer)
            if self._batches is not None:
                batches.continue_from(self._batches)
            elif self._state is None:
                _check_untrained(trainer)
            self._batches = batches
        if self._state is not None:
            self._batches.load_state_dict(self._state)
            self._state = None
        return self._batches

    def _is_fitting(self, trainer: Any) -> bool:
        """Return whether the trainer fits on the data of this callback."""
        return trainer.datamodule is self._data and trainer.state.fn == TrainerFn.FITTING

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._is_fitting(trainer):
            states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
            self._state = states[0] if len(states) == 1 else None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if not self._is_fitting(trainer):
            return
        batches, loop = self.batches(trainer), checkpoint["loops"]["fit_loop"]
        if "combined_loader" not in loop["state_dict"]:  # Lightning has not asked for a loader yet
            loop["state_dict"]["combined_loader"] = [batches.state_dict()]
        batches.step.rewind_counts(loop["epoch_loop.batch_progress"])
        if batches.step.in_training and self._steps_at_start == trainer.global_step:
            log.warning(
                "this checkpoint is saved during an optimizer step, after %d steps, so batches of the next step "
                "may be repeated",
                trainer.global_step,
            )

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self._steps_at_start = trainer.global_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_fitting(trainer):
            _check_accumulation(trainer, _most_ahead(trainer, self.batches(trainer)))
            self.batches(trainer).delayed_signals.wrap("lightning")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._is_fitting(trainer):
            batches = self.batches(trainer)
            batches.step.update()
            batches.check()
            batches.delayed_signals.run()

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Handle the signals that were delayed during a training step."""
        if self._is_fitting(trainer) and not trainer.sanity_checking:
            self.batches(trainer).delayed_signals.run()

    on_train_end = on_validation_start


def _check_untrained(trainer: Any) -> None:
    """Raise `StateError` if a trainer has trained, but the loader would start again."""
    begun = trainer.fit_loop.epoch_loop.batch_progress.total.ready
    if begun:
        raise StateError(
            f"the trainer has trained on {begun} batches in {trainer.current_epoch} whole epochs, but has no state of "
            "the loader. Resume from a checkpoint of a SavableDataModule, or fit the weights with a new Trainer."
            "\n  `setup` of the SavableDataModule calls super().setup(stage)"
        )


def _most_ahead(trainer: Any, batches: Any) -> int:
    """Return how many batches the trainer fetches ahead of the one that it trains on."""
    takes_iterator = "dataloader_iter" in signature(trainer.lightning_module.training_step).parameters
    knows_length = isinstance(trainer.limit_train_batches, int) or length_of(batches) is not None
    return 0 if knows_length and not takes_iterator else _AHEAD


def _check_accumulation(trainer: Any, ahead: int) -> None:
    """Raise ValueError if a step of the optimizer has more batches than can be undone."""
    schedulers = [callback for callback in trainer.callbacks if isinstance(callback, GradientAccumulationScheduler)]
    scheduled = [batches for scheduler in schedulers for batches in scheduler.scheduling.values()]
    accumulated = max([trainer.accumulate_grad_batches, *scheduled])
    if accumulated + ahead > MAX_LAG:
        raise ValueError(
            f"accumulate_grad_batches={accumulated} with {ahead} batches fetched ahead exceeds the limit of {MAX_LAG}. "
            "Use fewer, larger batches."
        )


class Step:
    """Numbers of batches that were started, and that the optimizer has stepped on.

    Both are counted over all epochs, as in the trainer's `total.ready`.

    Args:
        trainer: A `lightning.pytorch.Trainer` in its `fit`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counts = trainer.fit_loop.epoch_loop.batch_progress
        self._steps = trainer.global_step
        self._begun_at_step = self.begun

    @property
    def begun(self) -> int:
        """Number of batches that the trainer has started to train on."""
        return int(self._counts.total.ready)

    @property
    def in_training(self) -> bool:
        """Return whether a batch was started and is not completed."""
        return bool(self._counts.current.ready != self._counts.current.completed)

    def update(self) -> None:
        """Record which batches the optimizer has stepped on.

        Call it between a step and the next batch.
        """
        if self._steps != self._trainer.global_step:
            self._steps, self._begun_at_step = self._trainer.global_step, self.begun

    @property
    def trained(self) -> int:
        """Number of batches that the optimizer has stepped on.

        All batches of earlier epochs count, because Lightning carries no gradient over the end of an epoch.
        """
        self.update()
        counts, begun = self._counts.current, self.begun
        processed = begun - int(counts.ready - counts.processed)
        if not self._is_automatic:
            return processed
        # the batches of this epoch count as processed although the optimizer still accumulates their gradients
        is_accumulating = self._trainer.accumulate_grad_batches != 1
        return max(begun - int(counts.ready) if is_accumulating else processed, self._begun_at_step)

    @property
    def _is_automatic(self) -> bool:
        """Return whether Lightning steps the optimizer.

        Otherwise the model does, and decides when a batch is processed.
        """
        module = self._trainer.lightning_module
        return module is None or bool(module.automatic_optimization)

    def rewind_counts(self, counts: dict[str, Any]) -> None:
        """Change Lightning's saved counts to those after the batch trained on last.

        Args:
            counts: The `batch_progress` of a checkpoint.
        """
        untrained = self.begun - self.trained
        for count in (counts["current"], counts["total"]):
            if untrained:
                count |= dict.fromkeys(_COUNTS, count["ready"] - untrained)
            elif count["processed"] != count["ready"]:
                count |= {"started": count["ready"], "processed": count["ready"]}
        if untrained:
            counts["is_last_batch"] = False


class DelayedSignals:
    """Delays a library's signal handlers during a step, until the next `run()`.

    Args:
        busy: Returns whether a step is in progress.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._waiting: list[Callable[[], Any]] = []  # the delayed calls of handlers

    def wrap(self, library: str) -> None:
        """Delay the signal handlers that a library has set.

        The handler of SIGTERM is not delayed, because it only sets a flag.

        Args:
            library: The first part of the names of the library's modules, such as "lightning".
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for signal_number in signal.valid_signals() - {signal.SIGTERM}:
            handler = signal.getsignal(signal_number)
            if callable(handler) and type(handler).__module__.startswith(f"{library}."):
                signal.signal(signal_number, self._delayed(handler))

    def _delayed(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        """Wrap a signal handler, so that it runs between batches."""

        def delay(signal_number: int, frame: FrameType | None) -> None:
            self._waiting.append(lambda: handler(signal_number, frame))
            if not self._busy():
                self.run()

        return delay

    def run(self) -> None:
        """Call the waiting handlers. Call this when a step has ended."""
        while self._waiting:
            self._waiting.pop(0)()
