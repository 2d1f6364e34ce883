"""`get_savable_loader`, `get_loader`, and `EnergonLoader`: a `SavableLoader` with Energon's methods for states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint

from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of
from savable_pipeline.trainers.energon.dataset import EnergonDataset

log = logging.getLogger(__name__)

_LANES = 96
_UNUSED = (
    "checkpoint_every_sec",
    "checkpoint_every_min_n_samples",
    "n_checkpoints",
    "gc_collect_every_n_steps",
    "cache_pool",
    "watchdog_timeout_seconds",
    "watchdog_initial_timeout_seconds",
    "fail_on_timeout",
)


class EnergonLoader(SavableLoader):
    """The batches of an `EnergonDataset`, with states by Energon's names too. Its epochs may be virtual.

    Args:
        dataset: What `get_train_dataset` or `get_val_dataset` returned.
        prefetch: Batches that a worker may be ahead.

    Raises:
        ValueError: A setting is wrong, or the ranks do not divide the lanes.

    Example:
        ```python
        from savable_pipeline.energon import EnergonLoader

        loader = EnergonLoader(dataset)
        batch = next(loader)
        state = loader.save_state_rank()
        ```
    """

    def __init__(self, dataset: EnergonDataset, *, prefetch: int = 2) -> None:
        config = dataset.worker_config
        finite = not dataset.pipeline.encoder.sources.repeat
        lanes = dataset.lanes or (config.world_size if finite else _LANES)
        if lanes % config.world_size:
            near = -(-lanes // config.world_size) * config.world_size
            raise ValueError(
                f"{config.world_size} ranks do not divide the {lanes} lanes of the run: give the dataset lanes={near}, "
                "fixed for the run, a multiple of each number of ranks that it may have"
            )
        super().__init__(
            dataset.pipeline,
            seed=dataset.seed,
            lanes=lanes,
            num_workers=config.num_workers,
            rank=config.rank,
            world_size=config.world_size,
            group=config.data_parallel_group,
            prefetch=prefetch,
            on_iter="restart" if dataset.restarts else "continue",
        )
        self.worker_config = config
        self._length = dataset.length
        self._ended = False  # StopIteration was raised at the end of a virtual epoch, and no iterator has begun since

    @property
    def epoch(self) -> int:
        """The number of the (virtual) epoch of the batch given last, as for `sp.SavableLoader`."""
        if self._length is None:
            return super().epoch
        return (self._given() - (not self._ended)) // self._length

    def _given(self) -> int:
        """The batches of this rank that have been given since the run, or its last restart, began."""
        position = run_of(self).position
        return position.slot // position.step

    def __iter__(self) -> EnergonLoader:
        super().__iter__()
        self._ended = False
        return self

    def __next__(self) -> Any:
        if self._length is not None and not self._ended and self._at_end:
            self._ended = True
        if self._ended:
            raise StopIteration
        return super().__next__()
