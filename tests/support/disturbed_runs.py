"""Compare runs that are disturbed in every way with a run that is not.

undisturbed   one process, one rank                         slots 0 1 2 3 4 5 6 …
disturbed     segments with other ranks and workers, each from the state that the segment before saved in a file;
              workers are killed, slots skipped, shards added, and the loader is wrapped in another object
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import savable_pipeline as sp
from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.run.loader.ledger import rebuild_batch
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.device import OnDevice
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.support.exact_search import compared, sufficient_sizes
from tests.support.processes import descendants, workers
from tests.support.streams import through_a_file
from tests.support.toy_chains import toy
from tests.support.toy_stores import WRITERS, write_captions

LANES = 12


def check_disturbed(
    sizes: list[int],
    chosen: dict[str, Any],
    seed: int,
    *,
    slots: int = 72,
    ids: bool = False,
    ledger: bool = False,
    epoch_slots: int | None = None,
    kills: bool = False,
    skips: bool = False,
    grows: bool = False,
    most_workers: int = 3,
    again: int = 4,
) -> None:
    """Check that a disturbed run gives each slot the batch of the undisturbed run."""
    if grows:  # a folder of files is one shard, and its state is rejected if files were added
        chosen = {**chosen, "subset": None, "store": "tar" if chosen["store"] == "folder" else chosen["store"]}
    sizes = sufficient_sizes(sizes, chosen, LANES)
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        plan = []
        write_captions(Path(root, "joined"), sum(sizes) + 60)
        for stage in range(3 if grows else 1):
            WRITERS[chosen["store"]](Path(root, str(stage)), [*sizes, *[20, 40][:stage]])
            plan.append((toy(f"{root}/{stage}", joined=f"{root}/joined", **chosen), slots))
        settings: dict[str, Any] = {"seed": seed, "lanes": LANES, "sample_ids": ids, "epoch_slots": epoch_slots}
        expected = _Disturbed(plan, settings).run()
        folder = Path(root, "ledger") if ledger else None
        disturbed = _Disturbed(plan, settings, draw, folder, kills=kills, skips=skips, most_workers=most_workers)
        found = disturbed.run()
        for slot, given in found.items():
            assert given == expected[slot], f"slot {slot} differs; legs: {disturbed.legs}"
        assert len(found) + len(disturbed.skipped) == len(expected)
        if folder is not None:
            how: Any = {"ids": ids, "epoch_slots": epoch_slots, "most_ahead": disturbed.most_ahead}
            _check_ledger(folder, plan, found, draw, again=again, **how)
    compared["pipelines"] += 1
    compared["batches"] += len(found)
    compared["resumes"] += len(disturbed.legs) - 1
    compared["kills"] += disturbed.kills
    compared["skipped"] += len(disturbed.skipped)


class _Disturbed:
    """A run in segments. Without `draw`, it is not disturbed and has one segment per stage of the plan."""

    def __init__(
        self,
        plan: list[tuple[Any, int]],
        settings: dict[str, Any],
        draw: random.Random | None = None,
        ledger: Path | None = None,
        *,
        kills: bool = False,
        skips: bool = False,
        most_workers: int = 0,
    ) -> None:
        self._plan, self._settings, self._draw, self._ledger = plan, settings, draw, ledger
        self._kills, self._skips, self._most_workers = kills, skips, most_workers
        self.found: dict[int, str] = {}
        self.skipped: set[int] = set()
        self.legs: list[str] = []
        self.kills = 0
        self.most_ahead = 0  # batches that the wrappers of the last segment's loaders may have taken but not returned
        self._slot = 0
        self._state: dict[str, Any] | None = None

    def run(self) -> dict[int, str]:
        end = 0
        for pipeline, slots in self._plan:
            end += slots
            allow = ["shards"] if self._state is not None else []
            while self._slot < end:
                self._leg(pipeline, end - self._slot, allow)
                allow = []
        return self.found

    def _leg(self, pipeline: Any, left: int, allow: list[str]) -> None:
        draw = self._draw
        world = draw.choice([each for each in (1, 2, 3, 4) if each <= left]) if draw else 1
        num_workers = draw.choice(range(min(1, self._kills), self._most_workers + 1)) if draw else 0
        steps = min(left // world, draw.randrange(12)) if draw else left
        kinds = ["plain", "device", *(["whole"] if world == 1 and not allow else [])]
        around = draw.choice(kinds) if draw else "plain"
        self.most_ahead = world if around == "device" else 0
        self.legs.append(f"{world} ranks × {num_workers} workers, {around}, {steps} steps from {self._slot}")
        more: dict[str, Any] = {"num_workers": num_workers, "ledger": self._ledger}
        loaders = [sp.SavableLoader(pipeline, ranks=(rank, world), **more, **self._settings) for rank in range(world)]
        ranks: list[Any] = [_AROUND[around](loader) for loader in loaders]
        try:
            for rank in ranks if self._state is not None else ():
                rank.load_state_dict(self._state, **({"allow": allow} if allow else {}))
            for _ in range(steps):
                if around != "whole" and self._may_skip(world):
                    self._skip(ranks)
                else:
                    self._step(ranks, loaders)
            self._state = through_a_file(sp.merge_states([rank.state_dict() for rank in ranks]))
        finally:
            for loader in loaders:
                loader.close()

    def _step(self, ranks: list[Any], loaders: list[sp.SavableLoader]) -> None:
        world = len(ranks)
        for offset in range(world):
            slot = self._slot + offset
            if self._kills and self._draw and self._draw.random() < 0.3:
                self._kill(loaders[slot % world])
            self.found[slot] = digest(_next(ranks[slot % world]))
        self._slot += world

    def _may_skip(self, world: int) -> bool:
        """Decide at random whether to skip. A skip over the end of an epoch would stop there, so it is not drawn."""
        epoch_slots = self._settings["epoch_slots"] or 1 << 60
        inside = 0 < self._slot % epoch_slots < epoch_slots - 2 * world
        return self._skips and inside and self._draw is not None and self._draw.random() < 0.2

    def _skip(self, ranks: list[Any]) -> None:
        for rank in ranks:
            rank.skip(len(ranks))
        self.skipped |= set(range(self._slot, self._slot + len(ranks)))
        self._slot += len(ranks)

    def _kill(self, loader: sp.SavableLoader) -> None:
        """Kill a worker, now or while the next batch is awaited."""
        there = workers(loader)
        if not there or self._draw is None:
            return
        pid, wait_s = self._draw.choice(there), self._draw.choice([0, 0.001, 0.01, 0.03])
        self.kills += 1
        if wait_s:
            threading.Timer(wait_s, _kill, [pid]).start()
        else:
            _kill(pid)


class _Trained:
    """A `TrainerLoader` whose trainer takes one batch before the last one is trained on, until a state is saved."""

    def __init__(self, loader: sp.SavableLoader) -> None:
        self._trained = 0
        self._whole = TrainerLoader(loader, trained=lambda: self._trained, most_ahead=1)
        self._batches: Any = None

    def __iter__(self) -> _Trained:
        self._batches = iter(self._whole)
        return self

    def __next__(self) -> Any:
        batch = next(self._batches or iter(self)._batches)
        self._trained += 1
        return batch

    def load_state_dict(self, state: Any, allow: Any = ()) -> None:
        self._whole.load_state_dict(state)

    def state_dict(self) -> Any:
        return self._whole.state_dict()


_AROUND: dict[str, Any] = {
    "plain": lambda loader: loader,
    "device": lambda loader: OnDevice(loader, "cpu"),
    "whole": _Trained,
}


def _next(rank: Any) -> Any:
    """Return the next batch, starting the next epoch if one is over."""
    try:
        return next(rank)
    except StopIteration:
        return next(iter(rank))


def _kill(pid: int) -> None:
    """Kill a process if it is still a worker of this process."""
    if pid in descendants(os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _check_ledger(
    folder: Path,
    plan: list[tuple[Any, int]],
    found: dict[int, str],
    draw: random.Random,
    *,
    again: int,
    most_ahead: int,
    ids: bool,
    epoch_slots: int | None,
) -> None:
    """Check that each batch is in the ledger once and in order, and that some rebuilt batches equal the original."""
    ledger = LedgerFiles(folder)
    places = sorted(given.batch.position for given in ledger.batches() if not given.lost)
    assert len(places) == len(set(places)), "a batch is in the ledger twice"
    taken_ahead = len(places) - len(found)  # batches taken by an `OnDevice` on each rank of the last segment
    assert 0 <= taken_ahead <= most_ahead, f"{taken_ahead} batches more in the ledger than were given"
    by_slot = dict(zip(sorted(found), places, strict=False))
    if not epoch_slots:
        assert all(place == (0, slot) for slot, place in by_slot.items()), "the ledger has other slots"
    if ids or len(plan) > 1:
        return
    for slot in draw.sample(sorted(found), min(again, len(found))):
        assert digest(rebuild_batch(plan[0][0], ledger, *by_slot[slot]).batch) == found[slot], f"slot {slot} made again"
        compared["made again"] += 1
