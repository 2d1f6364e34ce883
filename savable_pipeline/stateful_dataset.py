"""`StatefulDataset`: the same lanes for torchdata's `StatefulDataLoader`.

Each of that loader's N workers takes every N-th of the rank's slots, as if it were a rank of its own, so that its
round-robin over the workers gives the slots in order:

    slot    0   1   2   3   4   5      2 ranks × 2 workers: worker w of rank r is share r + 2w of 4
    rank    0   1   0   1   0   1
    worker  0   0   1   1   0   0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from savable_pipeline.errors import CheckpointMismatchError, StateError
from savable_pipeline.host import Pipeline
from savable_pipeline.loader import SavableLoader
from savable_pipeline.ranks import Ranks, find_ranks

_SEED_BITS = 40


class StatefulDataset(IterableDataset[Any]):
    """Batches for `StatefulDataLoader(dataset, batch_size=None, num_workers=N)`.

    Resumes exactly with the same number of workers and ranks; with another, loading raises `CheckpointMismatchError`
    (`SavableLoader` knows no such limit). Each `iter()` of the loader begins the next epoch. Workers cannot agree on
    the end of a finite run, so each ends after its own lanes' last full round.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int,
        lanes: int = 96,
        rank: int | None = None,
        world_size: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._seed = seed
        self._lanes = lanes
        ranks = find_ranks(rank, world_size, group, None, lanes)
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._loader: SavableLoader | None = None
        self._iteration = -1
        # The epochs begun, and the seed of the workers that began the last: one number, so that each worker reads and
        # writes both at once, and all workers that are started together write the same.
        self._begun = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> StatefulDataset:
        self._stand(self._next_iteration())
        return self

    def __next__(self) -> Any:
        assert self._loader is not None
        return next(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """A new flat dict of int and bytes, of which StatefulDataLoader sends the entries that changed."""
        if self._loader is None:
            self._stand(self._next_iteration())
        assert self._loader is not None
        return {"shares": self._shares()[1], "iteration": self._iteration, **self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises `CheckpointMismatchError` if it was saved with other workers or settings."""
        if not isinstance(state, Mapping) or not {"shares", "iteration"} <= state.keys():
            raise StateError("this is no state of a StatefulDataset")
        shares = self._shares()[1]
        if state["shares"] != shares:
            raise CheckpointMismatchError(
                f"the state was saved with {state['shares'] // self._world_size} workers on each of {self._world_size} "
                f"ranks (0 counts as 1), here are {shares // self._world_size}: StatefulDataLoader keeps a state a "
                "worker, so give it the saved num_workers; SavableLoader resumes with any number"
            )
        self._stand(state["iteration"])
        assert self._loader is not None
        self._loader.load_state_dict(state)
        self._begun[0] = self._packed(self._iteration + 1)

    def _stand(self, iteration: int) -> None:
        share, shares = self._shares()
        self._iteration = iteration
        loader = SavableLoader(self._pipeline, seed=self._seed, lanes=self._lanes, rank=share, world_size=shares)
        loader._ranks = _Share(share, shares, None)
        loader._begin(iteration)
        self._loader = loader

    def _shares(self) -> tuple[int, int]:
        """Which share of the lanes this process has, and of how many."""
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        return self._rank + self._world_size * worker, self._world_size * workers

    def _next_iteration(self) -> int:
        """The number of the epoch that begins: workers that were started together find the same."""
        begun, seed = divmod(int(self._begun[0]), 1 << _SEED_BITS)
        info = get_worker_info()
        if info is None:
            number = begun
        elif self._iteration >= 0:  # a worker that is kept for another epoch
            number = self._iteration + 1
        else:
            number = begun - 1 if begun and seed == self._worker_seed() else begun
        self._begun[0] = self._packed(number + 1)
        return number

    def _packed(self, begun: int) -> int:
        return (begun << _SEED_BITS) | self._worker_seed()

    def _worker_seed(self) -> int:
        """What workers that were started together have in common, and others have not."""
        info = get_worker_info()
        return (info.seed - info.id) % (1 << _SEED_BITS) if info else 0


class _Share(Ranks):
    """A worker of another loader, which ends when its own lanes do."""

    def all_true(self, mine: bool) -> bool:
        return mine
