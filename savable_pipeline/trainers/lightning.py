"""The loader in Lightning's `Trainer`: `SavableDataModule` makes it where it may be made, and counts with the trainer.

Lightning asks what `train_dataloader()` gave for its state, on every rank, and keeps that of rank 0. Where the loader
has no length it fetches one batch ahead, except behind an epoch's last one; where it has one, none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule

from savable_pipeline.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.evaluation import check_restarts, each
from savable_pipeline.trainers.whole import Whole

_AHEAD = 1  # batches that Lightning fetches before it trains on one


class SavableDataModule(LightningDataModule):  # type: ignore[misc]
    """Makes the loaders of a run in each of its processes, and has the trainer's checkpoints hold the data's state.

    `train`, `val`, `test` and `predict` are functions that make a `SavableLoader`, or a list or dict of them (not
    `train`). They are called once in each process, after torch.distributed has begun: so `ddp`, `ddp_spawn` and
    `ddp_fork` give each rank its own batches (functions for `ddp_spawn` must be picklable). Loaders for evaluation must
    have `on_iter="restart"`, so that neither a sanity check nor a limit on batches takes any from the next evaluation:
    otherwise ValueError.

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
        self._made: dict[str, Any] = {}
        self._batches: Whole | None = None
        self._batches_for: Any = None

    def _loaders(self, name: str) -> Any:
        """What the function under this name makes; [] without one."""
        if name not in self._made:
            make = self._makers[name]
            self._made[name] = [] if make is None else make()
        return self._made[name]

    def train_dataloader(self) -> Whole:
        """The batches to train on, with the state that goes into the trainer's checkpoints."""
        trainer = self.trainer
        if self._batches is None or self._batches_for is not trainer:
            self._batches, self._batches_for = _Batches(self._loaders("train"), trainer), trainer
        return self._batches

    def val_dataloader(self) -> Any:
        """The loaders to validate on."""
        return _restarting(self._loaders("val"))

    def test_dataloader(self) -> Any:
        """The loaders to test on."""
        return _restarting(self._loaders("test"))

    def predict_dataloader(self) -> Any:
        """The loaders to predict for."""
        return _restarting(self._loaders("predict"))

    def teardown(self, stage: str) -> None:
        """End the workers."""
        for made in self._made.values():
            for loader in each(made):
                loader.close()


class _Batches(Whole):
    """Has the trainer count an epoch that other ranks began as if these had begun it: it ends by that count."""

    def __init__(self, loader: SavableLoader, trainer: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        super().__init__(loader, trained=lambda: progress.total.processed, most_ahead=_AHEAD)
        self._of_epoch = progress.current
        self._whole_epochs = trainer.limit_train_batches == 1.0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        given, counted = self.given_of_epoch, self._of_epoch
        if given is None or not self._whole_epochs or not counted.ready:
            return
        more = (given or len(self)) - counted.ready  # a checkpoint at an epoch's end has all of its batches
        for name in ("ready", "started", "processed", "completed"):
            setattr(counted, name, getattr(counted, name) + more)


def _restarting(made: Any) -> Any:
    """What was made. Raises ValueError for a loader that goes on where an evaluation was broken off."""
    check_restarts(made)
    return made
