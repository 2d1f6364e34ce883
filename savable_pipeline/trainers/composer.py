"""The loader in Composer: `SavableData` for training, `eval_data` for evaluation.

`SavableData` is both the train dataloader and a callback. Composer asks callbacks for their state on every rank, and
saves that of rank 0. To resume within an epoch, Composer *spins*: it takes the batches of the epoch again and discards
them, unless its `dataset_resumption` says that the data resumes by itself. Composer calls
`batch_transforms` for each batch that it trains on, and for none that it spins over. So `_start_step`, which is passed
as `batch_transforms`, detects skipped batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from composer.core import Callback, DataSpec, State
from composer.loggers import Logger
from composer.utils import dist

from savable_pipeline.errors import SavableError, StateError
from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.micro_batches import micro_batches, rows
from savable_pipeline.trainers.trainer_loader import TrainerLoader, check_peers, check_restarting


class SavableData(Callback):  # type: ignore[misc]
    """Train dataloader and callback that saves its position.

    `spec` is the `train_dataloader` of Composer's `Trainer`, and this object is among its `callbacks`. Each checkpoint
    has the lanes of all ranks after the batch trained on last. `load_path` resumes there on any number of ranks, and
    Composer does not spin.

    Args:
        loader: The loader, created after `composer.utils.dist.initialize_dist`.
        batch_size: Rows of a batch, which Composer must know in advance. With `device_train_microbatch_size` a batch is
            split by `micro_batches`.
        shared: Fields that every micro-batch gets whole, as for `micro_batches`.

    Raises:
        SavableError: At a batch: the trainer skipped batches, or this object is not among its callbacks.
        StateError: At the start of a resumed run: the checkpoint was saved without the data.

    Example:
        ```python
        from savable_pipeline.trainers.composer import SavableData

        def pipeline(lane):
            return sp.Batcher(sp.TarShardReader("shards/", lane), size=4)

        data = SavableData(sp.SavableLoader(pipeline, seed=7), batch_size=4)
        data.state_dict()["slot"]  # 0
        ```
    """

    def __init__(self, loader: SavableLoader, *, batch_size: int, shared: Iterable[str] = ()) -> None:
        self._loader = loader
        self._started = 0  # batches that Composer has started to train on
        self._is_restored = False
        self._is_callback = False  # whether Composer has called `fit_start`
        self._batches = _SizedBatches(loader, batch_size, trained=lambda: self._started)
        self.spec = _data_spec(self._batches, shared, batch_transforms=self._start_step)

    def _start_step(self, batch: Any) -> Any:
        """Count and return the batch that Composer is about to train on.

        Raises `SavableError` if Composer has skipped others.
        """
        if not self._is_callback:
            raise SavableError(
                "this SavableData is no callback of the trainer. Pass Trainer(train_dataloader=data.spec, "
                "callbacks=[data], ...)."
            )
        self._started += 1
        self._batches.check()
        return batch

    def fit_start(self, state: State, logger: Logger) -> None:
        """Make Composer resume without spinning. Composer calls this.

        After a checkpoint at the last batch of an epoch, Composer is still in that epoch, but the data is at the start
        of the next.

        Args:
            state: Composer's state of the run.
            logger: Not used.

        Raises:
            ValueError: Tensor-parallel processes would get different batches.
            StateError: The run is resumed from a checkpoint without a state of the data.
        """
        if state.tp_config is not None:
            check_peers(self._loader, dist.get_world_size(), {"tp": state.tp_config.device_mesh.size()}, "mesh")
        if int(state.timestamp.batch) and not (self._is_restored or self._started):
            raise StateError(
                "the checkpoint has no state of the data. Resume from one that was saved with SavableData among "
                "the callbacks."
            )
        state.dataset_resumption["train"] = True
        if self._is_restored and not self._started and int(state.timestamp.batch_in_epoch):
            self._batches.end_epoch_if_over()
        self._is_callback = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data. Collective: Composer calls it on every rank."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state. Composer calls this.

        Args:
            state: The result of `state_dict`.
        """
        self._batches.load_state_dict(state)
        self._is_restored = True

    def close(self, state: State, logger: Logger) -> None:
        """Stop the workers. Composer calls this when the trainer is closed.

        Args:
            state: Not used.
            logger: Not used.
        """
        self._batches.close()


def eval_data(loader: SavableLoader, *, batch_size: int, shared: Iterable[str] = ()) -> DataSpec:
    """Wrap a loader as the `eval_dataloader` of Composer's `Trainer`.

    Args:
        loader: A loader made with `on_iter="restart"`.
        batch_size: Rows of a batch.
        shared: Fields that every micro-batch gets whole, as for `micro_batches`.

    Returns:
        The data specification that Composer takes.

    Raises:
        ValueError: The loader was made without `on_iter="restart"`.

    Example:
        ```python
        import torch

        from savable_pipeline.trainers.composer import eval_data

        def pipeline(lane):
            return sp.Batcher(sp.TarShardReader("shards/", lane, epochs=1, shuffle=False), size=4)

        data = eval_data(sp.SavableLoader(pipeline, seed=7, on_iter="restart", tail="pad"), batch_size=4)
        data.get_num_samples_in_batch({"id": torch.arange(4)})  # 4
        ```
    """
    check_restarting(loader)
    return _data_spec(_SizedBatches(loader, batch_size), shared)


def _data_spec(batches: TrainerLoader, shared: Iterable[str], **options: Any) -> DataSpec:
    split_batch = partial(micro_batches, shared=tuple(shared))
    return DataSpec(batches, split_batch=split_batch, get_num_samples_in_batch=rows, **options)


class _SizedBatches(TrainerLoader):
    """Batches of `batch_size` rows, an attribute that Composer requires."""

    def __init__(self, loader: SavableLoader, batch_size: int, *, trained: Callable[[], int] | None = None) -> None:
        super().__init__(loader, trained=trained)
        self.batch_size = batch_size
        self._is_epoch_over = False

    def end_epoch_if_over(self) -> None:
        """Make the next iteration empty if the loader is at the start of an epoch.

        Composer is then still at the end of the previous epoch.
        """
        slot, epoch_slots = self._run.position.slot, self._run.settings.epoch_slots
        self._is_epoch_over = slot == 0 or (epoch_slots is not None and slot % epoch_slots == 0)

    def __iter__(self) -> Iterator[Any]:
        is_over, self._is_epoch_over = self._is_epoch_over, False
        return iter(()) if is_over else super().__iter__()
