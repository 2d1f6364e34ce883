"""Three ranks that train; one is killed at any moment, the others keep running, and a new one comes in its place.

    supervisor (this process) ─ a store: generations of members ─ kills, forks
    rank ─ forms a group ─ steps ─ the group breaks, or a new generation is announced ─ forms a group ─ …

The model counts what it was trained on: at the slot of each batch, how often, and its hash. Sums of all ranks reach it
by the same all-reduce as the gradient would, so that a step counts as a whole or not at all.

`python tools/soak/survivors.py FOLDER KILLS` prints, as JSON, whether every slot was trained on once.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import islice
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline import soak_pipeline, write_shards

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.elastic import complete_state

SEED, LANES = 3, 12
EVERY = 4  # steps between two states of all ranks
MOST = 20_000  # slots that the model can count
TIMEOUT = timedelta(seconds=10)  # of a group of which a rank dies while it forms; that takes a few times as long
_HUNG_S = 30.0  # without a step, after which ranks that still wait for one that is gone are taken for dead
_STUCK_S = 600.0


class Replica:
    """A process that trains: its model, trained on the batches before `slot`, and its loader once it is in a group."""

    def __init__(self, me: int, shards: Path, store: Any) -> None:
        self._me, self._store = me, store
        self._pipeline = partial(soak_pipeline, str(shards), copies=1)
        self._loader: sp.SavableLoader | None = None
        self._model: dict[str, Any] = {"slot": -1, "counts": torch.zeros(MOST), "hashes": torch.zeros(MOST)}
        self._last: dict[str, Any] = {}  # the state of all lanes, gathered now and then
        self._generation = 0

    def live(self, folder: Path) -> None:
        """Train in one group after another until one has no members; the first rank of the last one saves its model."""
        rank = 0
        while members := self._next_members():
            rank = members.index(self._me)
            if not self._all_are_ready(len(members)):
                continue
            group = dist.PrefixStore(f"group{self._generation}", self._store)  # type: ignore[attr-defined]
            try:
                dist.init_process_group("gloo", store=group, rank=rank, world_size=len(members), timeout=TIMEOUT)
                self._join_the_others(rank, len(members))
                self._train(rank)
            except RuntimeError:  # a member died, or had too little time
                self._store.set(f"broken{self._generation}", "")
            finally:
                leave_group()
        if rank == 0:
            torch.save(self._model, folder / "model.pt")

    def _next_members(self) -> list[int]:
        """The members of the newest generation, once there is a newer one that has this rank."""
        while True:
            newest = int(self._store.get("generation"))
            if newest > self._generation:
                members = json.loads(self._store.get(f"members{newest}"))
                if self._me in members or not members:
                    self._generation = newest
                    return list(members)
            time.sleep(0.005)

    def _all_are_ready(self, number: int) -> bool:
        """Wait for all members; False if a newer generation is announced before they are there."""
        name = f"ready{self._generation}"
        self._store.set(f"{name}/{self._me}", "")
        self._store.add(name, 1)
        while self._store.add(name, 0) < number:
            if int(self._store.get("generation")) > self._generation:
                return False
            time.sleep(0.005)
        return True

    def _join_the_others(self, rank: int, world_size: int) -> None:
        """Have the model of who trained furthest, and a loader that goes on from there."""
        slots = gathered(self._model["slot"])
        first = slots.index(max(slots))
        shared: list[Any] = [(self._model, self._last or None)]
        dist.broadcast_object_list(shared, src=first)
        model, last = shared[0]
        assert model["slot"] >= self._model["slot"], "the model of a rank that was trained less far"
        loader = sp.SavableLoader(self._pipeline, seed=SEED, lanes=LANES, ranks=(rank, world_size))
        if model["slot"] >= 0:
            states = [state for state in gathered(self._state_at(model["slot"])) if state is not None]
            needed = range(rank, LANES, world_size)
            at_hand = {name for state in states for name in state}
            completed = sum(f"lane_{lane:05d}" not in at_hand for lane in needed)
            loader.load_state_dict(complete_state(loader, states, last, lanes=needed))
            self._store.add("made_up", completed)
        last = sp.merge_states(gathered(loader.state_dict()))
        self._loader, self._model, self._last = loader, model, last
        self._store.set(f"has a model: {self._me}", "")

    def _state_at(self, slot: int) -> dict[str, Any] | None:
        """This rank's state at the slot to which the model was trained: a batch back, if it was not trained on."""
        if self._loader is None:
            return None
        state = self._loader.state_dict()
        return state if state["slot"] == slot else self._loader.state_dict(lag=1)

    def _train(self, rank: int) -> None:
        """Take steps until a new generation is announced."""
        loader = self._loader
        assert loader is not None
        for step in range(1, MOST):
            slot = loader.state_dict()["slot"]
            own = slot + (rank - slot) % dist.get_world_size()
            found = int(digest(next(loader))[:10], 16)
            sums = torch.zeros(2 * MOST + 1, dtype=torch.float64)
            sums[own], sums[MOST + own] = 1, found
            sums[-1] = int(self._store.get("generation")) > self._generation
            dist.all_reduce(sums)
            self._model = {
                "slot": loader.state_dict()["slot"],
                "counts": self._model["counts"] + sums[:MOST],
                "hashes": self._model["hashes"] + sums[MOST:-1],
            }
            if rank == 0:
                self._store.set(f"progress{self._generation}", str(step))
            if sums[-1]:
                return
            if step % EVERY == 0:
                self._last = sp.merge_states(gathered(loader.state_dict()))


def leave_group() -> None:
    """Leave the group, also one that could not be formed.

    torch names groups by a count, which begins anew when a group is left. Where forming one failed there is none to
    leave: the count goes on, and in every later group this rank would wait under a name that the others do not use.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def gathered(value: Any) -> list[Any]:
    """The values of all ranks of the group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# The supervisor.


class Supervisor:
    """Forks ranks, says which of them are members, and kills them."""

    def __init__(self, folder: Path, shards: Path) -> None:
        self._folder, self._shards = folder, shards
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.store.set("generation", "0")
        self._ranks: dict[int, ForkProcess] = {}
        self._born = self._generation = 0
        self.hung = 0  # ranks that were killed because they did not come to a new generation

    def add(self) -> None:
        """Fork a rank, which waits until it is a member."""
        context = multiprocessing.get_context("fork")
        arguments = (self._born, self._folder, self._shards, self.store.port)
        self._ranks[self._born] = context.Process(target=_live, args=arguments, daemon=True)
        self._ranks[self._born].start()
        self._born += 1

    def announce(self, *, end: bool = False) -> None:
        """A new generation, of all that live."""
        self._generation += 1
        self.store.set(f"members{self._generation}", json.dumps([] if end else sorted(self._ranks)))
        self.store.set("generation", str(self._generation))

    def wait_for_steps(self, number: int) -> None:
        """Until this generation has taken so many."""
        began = looked = time.monotonic()
        while not self._steps() >= number:
            if self.store.check([f"broken{self._generation}"]):
                self.announce()
            if time.monotonic() > looked + _HUNG_S:
                self._replace_hung()
                looked = time.monotonic()
            ended = [me for me, process in self._ranks.items() if not process.is_alive()]
            if ended or time.monotonic() > began + _STUCK_S:
                raise SystemExit(f"generation {self._generation}: no {number} steps; ranks {ended} have ended")
            time.sleep(0.005)

    def _steps(self) -> int:
        """Those that this generation has taken."""
        name = f"progress{self._generation}"
        return int(self.store.get(name)) if self.store.check([name]) else 0

    def kill_one(self) -> None:
        """Kill a rank, any."""
        self._kill(random.choice(sorted(self._ranks)))

    def _replace_hung(self) -> None:
        """Kill the ranks that have not come to this generation, and fork others; one that has a model stays."""
        survivor = next((me for me in self._ranks if self.store.check([f"has a model: {me}"])), None)
        for me in sorted(self._ranks.keys() - {survivor}):
            if self.store.check([f"ready{self._generation}/{me}"]):
                continue
            self._kill(me)
            self.add()
            self.hung += 1
        self.announce()

    def _kill(self, me: int) -> None:
        process = self._ranks.pop(me)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def end(self) -> None:
        """Have the ranks save and end."""
        self.announce(end=True)
        for me, process in self._ranks.items():
            process.join(_STUCK_S)
            if process.exitcode != 0:
                raise SystemExit(f"rank {me} ended with {process.exitcode}")


def _live(me: int, folder: Path, shards: Path, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_STUCK_S)
    )
    Replica(me, shards, store).live(folder)


def survive(folder: Path, kills: int) -> dict[str, Any]:
    """Three ranks, so many kills, each followed by two ranks going on or by three with a new one in its place."""
    shards = folder / "shards"
    write_shards(shards)
    supervisor = Supervisor(folder, shards)
    for _ in range(3):
        supervisor.add()
    supervisor.announce()
    for kill in range(kills):
        if kill % 5 != 4:  # every fifth comes while a group forms
            supervisor.wait_for_steps(random.randrange(1, 2 * EVERY))
        time.sleep(random.uniform(0, 0.05))
        supervisor.kill_one()
        if kill % 2:
            supervisor.add()
            supervisor.announce()
        else:
            supervisor.announce()
            supervisor.wait_for_steps(2)
            supervisor.add()
            supervisor.announce()
    supervisor.wait_for_steps(2)
    supervisor.end()
    completed = supervisor.store.add("made_up", 0)
    return {
        "kills": kills,
        "hung": supervisor.hung,
        "made_up": completed,
        **_compared(shards, torch.load(folder / "model.pt")),
    }


def _compared(shards: Path, model: dict[str, Any]) -> dict[str, Any]:
    """What the model was trained on, beside what one rank gives."""
    slots = model["slot"]
    with sp.SavableLoader(partial(soak_pipeline, str(shards), copies=1), seed=SEED, lanes=LANES) as loader:
        expected = [int(digest(batch)[:10], 16) for batch in islice(loader, slots)]
    once = torch.arange(MOST) < slots
    return {
        "slots": slots,
        "trained_once": bool((model["counts"] == once).all()),
        "as_one_rank": model["hashes"][:slots].long().tolist() == expected,
    }


if __name__ == "__main__":
    print(json.dumps(survive(Path(sys.argv[1]), int(sys.argv[2]))))
