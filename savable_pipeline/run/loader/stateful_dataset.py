"""`StatefulDataset`: the batches of a run for torchdata's `StatefulDataLoader`.

That loader takes batches from its N workers in turn. Each worker yields every N-th of the rank's slots, as if it were a
rank of its own, so that the loader gets the slots in order:

    slot    0   1   2   3   4   5      2 ranks × 2 workers: worker w of rank r is share r + 2w of 4
    rank    0   1   0   1   0   1
    worker  0   0   1   1   0   0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.data.shards.paths import addresses_of, is_hub
from savable_pipeline.errors import CheckpointMismatchError, StateError
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.ranks import RanksLike, find_ranks
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.pipeline import PipelineFunction

_SEED_BITS = 40


class StatefulDataset(IterableDataset[Any]):
    """Yields batches for `StatefulDataLoader(dataset, batch_size=None)`.

    It resumes exactly with the same number of workers and ranks (`SavableLoader` has no such limit). Each `iter()` of
    the loader starts the next epoch. Creating it opens the shards, and indexes them on first use. All its workers read
    these shards in each epoch, even if others are added later. If the length of a finite run cannot be counted in
    advance, its workers cannot agree on the end, and each ends with its own lanes.

    Args:
        pipeline: A function that builds the stages of a lane.
        seed: The seed of all random numbers of the run.
        lanes: The number of logical workers: a multiple of ranks × workers.
        ranks: The data-parallel rank, as for `SavableLoader`.
        tail: The end of a finite run, as for `SavableLoader`.

    Raises:
        ValueError: A setting is wrong or, in iteration, ranks × workers do not divide the lanes.
        ShardError: Shards cannot be read, or differ in a worker from those when the dataset was made.

    Example:
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=4)
        >>> from torchdata.stateful_dataloader import StatefulDataLoader
        >>> batches = StatefulDataLoader(sp.StatefulDataset(pipeline, seed=7), batch_size=None)
        >>> len(next(iter(batches)))
        4
    """

    def __init__(
        self,
        pipeline: PipelineFunction,
        *,
        seed: int,
        lanes: int = 96,
        ranks: RanksLike = None,
        tail: Literal["stop", "pad"] = "stop",
    ) -> None:
        super().__init__()
        self._settings = LoaderSettings(pipeline, seed=seed, lanes=lanes, tail=tail)
        found = find_ranks(ranks, lanes)
        self._rank, self._world_size = found.rank, found.world_size
        self._pinned = _pinned(self._settings)
        self._run: Run | None = None
        self._iteration = -1
        # The number of started epochs, and the seed of the workers that started the last epoch, in one number. A worker
        # reads and writes both at once, and all workers that are started together write the same.
        self._started_and_seed = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> StatefulDataset:
        self._start_epoch(self._next_iteration())
        return self

    def __next__(self) -> Any:
        assert self._run is not None
        return next(self._run)

    def state_dict(self) -> dict[str, Any]:
        """Return a flat dict of int and bytes. The loader sends only its changed entries."""
        run = self._run or self._start_epoch(self._next_iteration())
        _, share_count = self._share_and_count()
        return {"shares": share_count, "iteration": self._iteration, **run.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: A result of `state_dict`.

        Raises:
            CheckpointMismatchError: It was saved with other numbers of workers or other settings.
            StateError: It is damaged.
        """
        saved = [state.get(name) for name in ("shares", "iteration")] if isinstance(state, Mapping) else [None]
        # `_started_and_seed` has the number of iterations with the seed
        if not all(type(number) is int and 0 <= number < 1 << (62 - _SEED_BITS) for number in saved):
            raise StateError("this is no state of a StatefulDataset. Load the one that it saved.")
        _, share_count = self._share_and_count()
        if state["shares"] != share_count:
            raise CheckpointMismatchError(
                f"the state has {state['shares'] // self._world_size} workers on each of {self._world_size} ranks, "
                f"not {share_count // self._world_size}. Use the saved num_workers, or a SavableLoader, which resumes "
                "with any number."
            )
        run, pinned_before = self._new_run(state["iteration"]), dict(self._pinned)
        run.load_state_dict(state)  # may change `self._pinned`
        moved = [name for name in pinned_before if is_hub(name) and self._pinned.get(name) != pinned_before[name]]
        # Workers of later epochs get the unchanged `_pinned` of the main process, which does not load the state.
        if moved and get_worker_info():
            raise CheckpointMismatchError(
                f"{moved[0]} has changed since the state was saved. Name the commit "
                f"{addresses_of(self._pinned).get(moved[0], moved[0])}, or use a SavableLoader, which keeps it."
            )
        self._run, self._iteration = run, state["iteration"]
        # If the state was saved after the epoch's last batch, this iterator ends at once. The next starts an epoch.
        if run.epoch > self._iteration:
            run.end_epoch()
        self._started_and_seed.fill_(self._pack_started(self._iteration + 1))

    def _start_epoch(self, iteration: int) -> Run:
        """Create the run of an epoch, at its start, and return it."""
        self._run, self._iteration = self._new_run(iteration), iteration
        return self._run

    def _new_run(self, iteration: int) -> Run:
        """Build a run of this process's share of the lanes, at the start of an epoch."""
        share, share_count = self._share_and_count()
        lanes = self._settings.lanes
        if lanes % share_count:
            numbers = [n for n in range(1, lanes // self._world_size + 1) if lanes % (self._world_size * n) == 0]
            raise ValueError(
                f"{self._world_size} ranks × {share_count // self._world_size} workers do not divide {lanes} lanes. "
                f"Use num_workers={', '.join(map(str, numbers))}, or start a run with other lanes=."
            )
        settings = replace(self._settings, ranks=(share, share_count))
        run = Run(settings, vote_function=int, pinned=self._pinned)  # the worker votes alone
        run.begin_epoch(iteration)
        return run

    def _share_and_count(self) -> tuple[int, int]:
        """Return the number of this process's share of the lanes, and the number of shares."""
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        return self._rank + self._world_size * worker, self._world_size * workers

    def _next_iteration(self) -> int:
        """Return the number of the epoch that starts now, the same in all workers that were started together."""
        started_count, seed = divmod(int(self._started_and_seed.item()), 1 << _SEED_BITS)
        info = get_worker_info()
        if info is None:
            number = started_count
        elif self._iteration >= 0:  # a worker that continues for another epoch
            number = self._iteration + 1
        else:
            number = started_count - 1 if started_count and seed == self._worker_seed() else started_count
        self._started_and_seed.fill_(self._pack_started(number + 1))
        return number

    def _pack_started(self, started_count: int) -> int:
        """Return the number of started epochs and the seed of these workers in one number."""
        return (started_count << _SEED_BITS) | self._worker_seed()

    def _worker_seed(self) -> int:
        """Return a number that is equal only in workers that were started together."""
        info = get_worker_info()
        return (info.seed - info.id) % (1 << _SEED_BITS) if info else 0


def _pinned(settings: LoaderSettings) -> PinnedShards:
    """Open the shards of the pipeline, and return those that all its workers must read."""
    local = LocalLanes(settings.job, 0)
    try:
        assert local.last_stage
        return local.pinned
    finally:
        local.close()
