"""`get_savable_loader`, and `EnergonLoader` with Energon's methods for states."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of
from savable_pipeline.trainers.energon.dataset import EnergonDataset, checked
from savable_pipeline.trainers.energon.encoder import rebuild_by_key

log = logging.getLogger(__name__)

_UNUSED_ARGS = {"checkpoint_every_sec", "checkpoint_every_min_n_samples", "n_checkpoints", "gc_collect_every_n_steps"}
_UNUSED_ARGS |= {"cache_pool", "watchdog_timeout_seconds", "watchdog_initial_timeout_seconds", "fail_on_timeout"}


class EnergonLoader(SavableLoader):
    """Batches of an `EnergonDataset`, whose epochs may be virtual.

    States have Energon's method names too.

    Args:
        dataset: A result of `get_train_dataset` or `get_val_dataset`.
        prefetch: How many batches a worker may be ahead (default 2).

    Raises:
        TypeError: Energon built the dataset.
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
        config = checked(dataset).worker_config
        super().__init__(
            dataset.pipeline,
            seed=dataset.seed,
            lanes=dataset.run_lanes,
            num_workers=config.num_workers,
            ranks=Ranks(config.rank, config.world_size, config.data_parallel_group),
            workers=Workers(prefetch=prefetch),
            pin_memory=True,
            on_iter="restart" if dataset.restarts else "continue",
        )
        self.worker_config = config
        self._dataset, self._prefetch = dataset, prefetch
        self._length = dataset.length
        self._stop: int | None = None  # the number of yielded batches at which the virtual epoch ends

    def _yielded_batches(self) -> int:
        """Return how many batches this rank has yielded since the start of the run or its last restart."""
        position = run_of(self).position
        return position.slot // position.step

    @property
    def epoch(self) -> int:
        """Index of the (virtual) epoch of the last batch."""
        return super().epoch if self._length is None else max(self._yielded_batches() - 1, 0) // self._length

    def __iter__(self) -> EnergonLoader:
        super().__iter__()
        self._stop = None  # the next batch sets the end of its virtual epoch
        return self

    def __next__(self) -> Any:
        if self._length is not None:
            yielded = self._yielded_batches()
            if self._stop is None:
                self._stop = (yielded // self._length + 1) * self._length
            if yielded >= self._stop:
                raise StopIteration
        return super().__next__()

    def __len__(self) -> int:
        """Return the number of batches of this rank in a (virtual) epoch, as Energon counts them.

        Skipped samples count too.
        """
        return len(self._dataset)

    def config(self) -> dict[str, Any]:
        """Return the settings that define the batches, to compare or log them.

        Energon's loaders have this method too.
        """
        workers = self.worker_config.num_workers
        return {
            "type": type(self).__qualname__,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": True,
            "prefetch_factor": self._prefetch if workers else None,
            "dataset": self._dataset.config(),
        }

    def can_restore_sample(self) -> bool:
        """Return True, because an item depends only on the sample."""
        return True

    def restore_sample(self, restore_key: Any) -> Any:
        """Rebuild the sample, pack or batch with a key, in this process.

        Args:
            restore_key: Its `__restore_key__`.

        Raises:
            ValueError: The key does not belong to this dataset.
            EncodeError: The encoder skipped the sample when it encoded it again.
        """
        return rebuild_by_key(self._dataset.pipeline.encoder, restore_key, seed=self._dataset.seed)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Resume from a saved state, as `sp.SavableLoader.load_state_dict`.

        Args:
            state: A state of an `EnergonLoader` that has this rank's lanes.
            allow: Names of fields that may differ.

        Raises:
            CheckpointMismatchError: It is Energon's, or another field differs.
        """
        if not isinstance(state, Mapping):
            raise CheckpointMismatchError(
                f"{type(state).__name__} is no state of this loader. Convert one of Energon by "
                "savable_pipeline.energon.begin_at_share(dataset, states)."
            )
        super().load_state_dict(state, allow=allow)
        self._stop = None

    def save_state_rank(self) -> dict[str, Any]:
        """Return the state of this rank, as `state_dict`."""
        return self.save_state()

    def restore_state_rank(self, state: Mapping[str, Any] | None) -> None:
        """Resume from the state of a rank.

        Args:
            state: The result of `save_state_rank`. None: start at the first batch.
        """
        if state is not None:
            self.load_state_dict(state)

    def save_state_global(self, global_dst_rank: int) -> dict[str, Any] | None:
        """Return the state of all ranks on one of them, and None on the others.

        All ranks must call it.

        Args:
            global_dst_rank: The rank that gets it.
        """
        state = self.global_state_dict(self.worker_config.data_parallel_group)
        return state if (dist.get_rank() if dist.is_initialized() else 0) == global_dst_rank else None

    def restore_state_global(self, state: Mapping[str, Any] | None, *, src_rank: int | None = None) -> None:
        """Resume from the state of all ranks.

        Args:
            state: The result of `save_state_global`. None: start at the first batch, or use the state of `src_rank`.
            src_rank: The rank that has the state, if not all have it. The call is collective then.
        """
        if src_rank is not None and dist.is_initialized():
            sent = [state]
            dist.broadcast_object_list(sent, src=src_rank, group=self.worker_config.data_parallel_group)
            state = sent[0]
        self.restore_state_rank(state)


def get_savable_loader(
    dataset: EnergonDataset, *, worker_config: Any = None, prefetch_factor: int = 2, **unused: Any
) -> EnergonLoader:
    """Return the loader of a dataset, as Energon's function of this name.

    Args:
        dataset: A result of `get_train_dataset` or `get_val_dataset`.
        worker_config: None (default), or that of the dataset. Another one is an error.
        prefetch_factor: How many batches a worker may be ahead (default 2).
        **unused: Energon's arguments for intermediate checkpoints, garbage collection, caching and watchdogs. They are
            not needed.

    Raises:
        TypeError: An argument is unknown.
        ValueError: The ranks do not divide the lanes, or `worker_config` is not that of the dataset.
    """
    for name in unused:
        if name not in _UNUSED_ARGS:
            raise TypeError(f"unknown argument {name!r} of get_savable_loader. Remove it.")
        log.info("%s is ignored: this loader does not need it", name)
    if worker_config is not None and worker_config != dataset.worker_config:
        raise ValueError("worker_config differs from the one of the dataset. Remove it.")
    return EnergonLoader(dataset, prefetch=prefetch_factor)


get_loader = get_savable_loader
"""Alias of `get_savable_loader`, because Energon has both names."""
