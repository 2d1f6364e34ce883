"""Ranks with workers that acknowledge rows on any rank, are killed and resumed, and keep one list of open rows.

The command is `tests.support.in_flight_ranks SHARDS FOLDER COUNT`, by `forked_ranks` for one world size after the
other.
Each continues the COUNT histories that the one before saved in FOLDER.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from in_flight import Oracle, numbers_pipeline

import savable_pipeline as sp
from tests.support.processes import workers

LANES, MOVES = 4, 14


def main(shards: str, folder: str, count: str) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    for number in range(int(count)):
        _History(shards, Path(folder, f"{number}.pickle"), number).run()
    dist.barrier()
    dist.destroy_process_group()


class _History:
    def __init__(self, shards: str, path: Path, number: int) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._shards, self._path = shards, path
        saved = pickle.loads(path.read_bytes()) if path.exists() else (None, Oracle(), 0)
        self._state, self._saved_oracle, self._segment = saved
        self._draw = random.Random(f"{number} {self._segment}")  # equal on all ranks
        self._how: dict[str, Any] = {"pack": number % 3 == 0, "epochs": None, "size": 1 + number % 3}
        self._loader = self._started()

    def _started(self) -> sp.SavableLoader:
        """Return a loader with the last saved state, that of this rank or of all ranks."""
        self._oracle = self._saved_oracle.after_resume()
        num_workers = self._draw.choice([0, 1, 2])
        pipeline = partial(numbers_pipeline, self._shards, **self._how)
        found = sp.SavableLoader(pipeline, seed=3, lanes=LANES, num_workers=num_workers, acknowledge=True)
        if self._state is not None:
            whole, own = self._state
            same = len(own) == self._ranks and not any("acks_" in name for state in own for name in state)
            found.load_state_dict(own[self._rank] if same and self._draw.random() < 0.5 else whole)
        return found

    def run(self) -> None:
        """Make random moves, and save a state for the next world size."""
        moves = [self._step] * 6 + [self._acknowledge] * 5 + [self._again, self._kill_worker, self._save, self._resume]
        for _ in range(MOVES):
            self._draw.choice(moves)()
        while self._oracle.to_repeat:
            self._step()
        self._save()
        self._check()
        self._loader.close()
        dist.barrier()
        if self._rank == 0:
            self._path.write_bytes(pickle.dumps((self._state, self._saved_oracle, self._segment + 1)))
        dist.barrier()

    def _step(self) -> None:
        self._give(next(self._loader))

    def _give(self, batch: Any) -> None:
        given: list[Any] = [None] * self._ranks
        dist.all_gather_object(given, self._loader.receipts().tolist() if batch is not None else [])
        for receipts in given:
            for slot, row in receipts:
                if slot >= 0:
                    self._oracle.record_yield((slot, row))

    def _acknowledge(self) -> None:
        """Acknowledge rows on random ranks, equally drawn on all."""
        out = [each for each in self._oracle.open if each not in self._oracle.to_repeat]
        chosen, who = self._draw.sample(out, self._draw.randint(0, len(out))), self._draw.randrange(self._ranks)
        if who == self._rank:
            self._loader.acknowledge(chosen)
        self._oracle.record_acknowledged(chosen)

    def _again(self) -> None:
        """Take a row again on its rank, which then takes one batch more."""
        out = [each for each in self._oracle.open if each not in self._oracle.to_repeat]
        if not out:
            return
        chosen = self._draw.choice(out)
        self._oracle.to_repeat.append(chosen)
        table: Any = self._loader._rows.table
        waiting = len(table.waiting)
        if chosen[0] % self._ranks == self._rank:
            self._loader.requeue([chosen])
        self._give(next(self._loader) if len(table.waiting) > waiting else None)

    def _kill_worker(self) -> None:
        pids = workers(self._loader) if self._loader.stats()["ready_batches"] else []
        with contextlib.suppress(ProcessLookupError):  # it may have been killed already
            for pid in pids[:1]:
                os.kill(pid, signal.SIGKILL)

    def _save(self) -> None:
        own: list[Any] = [None] * self._ranks
        dist.all_gather_object(own, copy.deepcopy(self._loader.state_dict()))
        self._state = self._loader.global_state_dict(), own
        self._saved_oracle = copy.deepcopy(self._oracle)

    def _resume(self) -> None:
        self._loader.close()
        self._loader = self._started()

    def _check(self) -> None:
        """Check that every row of every slot so far is done or open, and that none is done twice."""
        assert len(set(self._oracle.done)) == len(self._oracle.done)
        slots = {slot for slot, _ in [*self._oracle.done, *self._oracle.open]}
        assert self._state is not None and slots == set(range(self._state[0]["slot"]))
