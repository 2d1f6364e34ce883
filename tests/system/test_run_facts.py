"""A run in which shards join and things are decided, however it is stopped: the batches of one that goes straight on.

Both are resumed where the shards join, which takes a load. The other is also resumed behind drawn steps: by states that
are some batches old, on other ranks, without one that died, with workers of other kinds, some of them killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.trainers.elastic import complete_state
from tests.conftest import write_numbered_shards
from tests.support.processes import workers

LANES, SLOTS = 4, 72
HOW: list[tuple[int, Any]] = [(0, None), (0, None), (2, None), (2, "thread")]  # workers


class Drawn(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.shard, sample.json()["id"], rng.integers(1000)

    def length(self, item: Any) -> int:
        return 1 + int(item[1]) % 5

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [rng.integers(1000), *items]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def pipeline(folder: Path, lane: sp.Lane) -> custom.Stage:
    sources = {name: sp.TarShardReader(folder / name, lane, block_size=2) for name in "ab"}
    samples = sp.ShuffleBuffer(sp.Blend(sources, weights={"a": 2, "b": 1}), size=4)
    return sp.Batcher(sp.OnlinePacker(sp.Encode(samples, Drawn()), max_length=8, open_packs=2), size=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The data before shards join, and after."""
    root = tmp_path_factory.mktemp("facts")
    for name, sizes in (("a", [9, 5, 14]), ("b", [6, 11])):
        write_numbered_shards(root / "before" / name, sizes[:-1])
        write_numbered_shards(root / "after" / name, sizes)
    return [root / "before", root / "after"]


class History:
    """A run to whose facts the same is added at the same slots; `draw`: how it is disturbed, not at all without one."""

    def __init__(self, folders: list[Path], seed: int, draw: random.Random | None) -> None:
        plan = random.Random(f"plan {seed}")
        slots = plan.sample(range(LANES, SLOTS - LANES, LANES), 4)
        self._joins, decided = slots[0], slots[1:]
        self._decisions = dict(zip(decided, plan.sample(DECISIONS, 3), strict=True))
        self._folders, self._draw = folders, draw
        self._loaders: list[sp.SavableLoader] = []
        self._last: dict[str, Any] | None = None  # a state of all lanes since the facts are what they are
        self.given: dict[int, Any] = {}
        self.done: list[str] = []
        self._slot = self._changed = 0
        self._joined = False

    def run(self) -> dict[int, Any]:
        """The batch of each slot; where one comes again, it must be the same."""
        self._begin(None)
        while self._slot < SLOTS:
            if self._slot == self._joins and not self._joined:
                self._joined = True
                self._begin(self._state(), allow={"shards"})
            if self._slot in self._decisions and self._changed < self._slot:
                for loader in self._loaders:
                    loader.reconfigure(**self._decisions[self._slot])
            if self._slot in {self._joins, *self._decisions}:
                self._changed, self._last = self._slot, self._state()
            self._step()
            if self._draw is not None and not self._slot % LANES and self._draw.random() < 0.5:
                self._draw.choice([self._resume, self._resume_older, self._lose_a_rank, self._kill_workers])()
        self._close()
        return self.given

    def _begin(self, state: Any, *, allow: Any = ()) -> None:
        self._close()
        world, how = 1, HOW[0]
        if self._draw is not None:
            world, how = (
                self._draw.choice([1, 2, 4]),
                self._draw.choice([(0, None), (0, None), (2, None), (2, "thread")]),
            )
        settings: dict[str, Any] = {
            "seed": 5,
            "lanes": LANES,
            "num_workers": how[0],
            "workers": sp.Workers(start_method=how[1]),
        }
        made = partial(pipeline, self._folders[self._joined])
        self._loaders = [sp.SavableLoader(made, ranks=(rank, world), **settings) for rank in range(world)]
        for loader in self._loaders:
            if state is not None:
                loader.load_state_dict(state, allow=allow)

    def _step(self) -> None:
        for loader in self._loaders:
            batch, slot = next(loader), loader.trace().slot
            assert self.given.setdefault(slot, batch) == batch, (slot, self.done)
        self._slot += len(self._loaders)

    def _state(self, lag: int = 0) -> dict[str, Any]:
        return sp.merge_states(loader.state_dict(lag=lag) for loader in self._loaders)

    def _resume(self) -> None:
        self.done.append(f"resumed at {self._slot}")
        self._begin(self._state())

    def _resume_older(self) -> None:
        given = self._loaders[0].__savable_run__().position.history
        most = min(len(given.batches), given.batch_count - given.decided_at, self._slot - self._changed)
        lags = [lag for lag in range(most + 1) if not lag * len(self._loaders) % LANES]
        state = self._state(lag := max(lags))
        self._slot -= lag * len(self._loaders)
        assert state["slot"] == self._slot
        self.done.append(f"resumed {lag} batches before, at {self._slot}")
        self._begin(state)

    def _lose_a_rank(self) -> None:
        if self._last is not None and len(self._loaders) > 1:
            self.done.append(f"a rank lost at {self._slot}")
            self._begin(complete_state(self._loaders[0], [each.state_dict() for each in self._loaders[1:]], self._last))

    def _kill_workers(self) -> None:
        for loader in self._loaders:
            settings = loader.__savable_run__().settings
            if settings.num_workers and settings.workers.start_method is None:
                self.done.append(f"workers killed at {self._slot}")
                for pid in workers(loader):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _close(self) -> None:
        for loader in self._loaders:
            loader.close()


DECISIONS: list[dict[str, Any]] = [
    {"weights": {"a": 1, "b": 3}},
    {"weights": {"a": 5, "b": 0.25}, "max_length": 6},
    {"exclude": [("a", "s000001"), ("b", "s000003"), ("a", "s000012")]},
    {"max_length": 5},
    {"exclude": ["s000005"], "weights": {"a": 1, "b": 1}},
]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 30))])
def test_changed_facts_apply_equally_after_any_interruption(folders: list[Path], seed: int) -> None:
    straight = History(folders, seed, None)
    expected = straight.run()
    other = History(folders, seed, random.Random(f"history {seed}"))
    found = other.run()
    differing = [slot for slot in range(SLOTS) if found[slot] != expected[slot]]
    assert not differing, (differing[:3], other.done)
