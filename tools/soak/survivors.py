"""Train on three ranks. Kill one at a random moment, let the others continue, and add a new one.

    supervisor (this process) ─ forks and kills ranks ─ announces each generation of members in a store
    rank ─ joins a group ─ steps ─ the group breaks, or a new generation is announced ─ joins a group ─ …

The model counts, for each slot, how often it was trained on, and sums the hashes of its batches. These numbers are
summed over ranks by an all-reduce, as a gradient would be. So a step counts on all ranks or not at all.

`python tools/soak/survivors.py FOLDER KILLS` prints as JSON whether every slot was trained on once.
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
SAVE_EVERY = 4  # steps between two states of all ranks
MAX_SLOTS = 20_000  # most slots that the model can count
# timeout of collectives; joining a group in which a rank dies takes a few times as long
TIMEOUT = timedelta(seconds=10)
_HUNG_S = 30.0  # a rank that waits for a dead one is killed after so many seconds without a step
_STUCK_S = 600.0  # the program fails after so many seconds without success


class Replica:
    """Process that trains: its loader, and a model that was trained on the slots before `model["slot"]`."""

    def __init__(self, member: int, shards: Path, store: Any) -> None:
        self._member = member  # a number that no other process has or will have
        self._store = store
        self._pipeline = partial(soak_pipeline, str(shards), copies=1)
        self._loader: sp.SavableLoader | None = None
        self._model: dict[str, Any] = {"slot": -1, "counts": torch.zeros(MAX_SLOTS), "hashes": torch.zeros(MAX_SLOTS)}
        self._last: dict[str, Any] = {}  # the state of all lanes, gathered every SAVE_EVERY steps
        self._generation = 0

    def live(self, folder: Path) -> None:
        """Train in one group after another until a generation has no members. Rank 0 then saves its model."""
        rank = 0
        while members := self._next_members():
            rank = members.index(self._member)
            if not self._all_are_ready(len(members)):
                continue
            group = dist.PrefixStore(f"group{self._generation}", self._store)  # type: ignore[attr-defined]
            try:
                dist.init_process_group("gloo", store=group, rank=rank, world_size=len(members), timeout=TIMEOUT)
                self._join_the_others(rank, len(members))
                self._train(rank)
            except RuntimeError:  # a member died, or was too slow
                self._store.set(f"broken{self._generation}", "")
            finally:
                leave_group()
        if rank == 0:
            torch.save(self._model, folder / "model.pt")

    def _next_members(self) -> list[int]:
        """Wait for a newer generation that has this process or no members, and return its members."""
        while True:
            newest = int(self._store.get("generation"))
            if newest > self._generation:
                members = json.loads(self._store.get(f"members{newest}"))
                if self._member in members or not members:
                    self._generation = newest
                    return list(members)
            time.sleep(0.005)

    def _all_are_ready(self, number: int) -> bool:
        """Wait until all members are ready. Return False if a newer generation is announced before."""
        name = f"ready{self._generation}"
        self._store.set(f"{name}/{self._member}", "")
        self._store.add(name, 1)
        while self._store.add(name, 0) < number:
            if int(self._store.get("generation")) > self._generation:
                return False
            time.sleep(0.005)
        return True

    def _join_the_others(self, rank: int, world_size: int) -> None:
        """Take over the model of the rank that trained furthest, and open a loader that resumes after it."""
        slots = all_gather(self._model["slot"])
        furthest = slots.index(max(slots))
        shared: list[Any] = [(self._model, self._last or None)]
        dist.broadcast_object_list(shared, src=furthest)
        model, last = shared[0]
        assert model["slot"] >= self._model["slot"], "the model of a rank that trained less far"
        loader = sp.SavableLoader(self._pipeline, seed=SEED, lanes=LANES, ranks=(rank, world_size))
        if model["slot"] >= 0:
            states = [state for state in all_gather(self._state_at(model["slot"])) if state is not None]
            needed = range(rank, LANES, world_size)
            available = {name for state in states for name in state}
            completed = sum(f"lane_{lane:05d}" not in available for lane in needed)
            loader.load_state_dict(complete_state(loader, states, last, lanes=needed))
            self._store.add("made_up", completed)
        last = sp.merge_states(all_gather(loader.state_dict()))
        self._loader, self._model, self._last = loader, model, last
        self._store.set(f"has a model: {self._member}", "")

    def _state_at(self, slot: int) -> dict[str, Any] | None:
        """Return this rank's state at a slot. It is the previous state if the last batch was not trained on."""
        if self._loader is None:
            return None
        state = self._loader.state_dict()
        return state if state["slot"] == slot else self._loader.state_dict(lag=1)

    def _train(self, rank: int) -> None:
        """Take steps until a new generation is announced."""
        loader = self._loader
        assert loader is not None
        for step in range(1, MAX_SLOTS):
            slot = loader.state_dict()["slot"]
            own_slot = slot + (rank - slot) % dist.get_world_size()
            batch_hash = int(digest(next(loader))[:10], 16)
            sums = torch.zeros(2 * MAX_SLOTS + 1, dtype=torch.float64)
            sums[own_slot], sums[MAX_SLOTS + own_slot] = 1, batch_hash
            sums[-1] = int(self._store.get("generation")) > self._generation
            dist.all_reduce(sums)
            self._model = {
                "slot": loader.state_dict()["slot"],
                "counts": self._model["counts"] + sums[:MAX_SLOTS],
                "hashes": self._model["hashes"] + sums[MAX_SLOTS:-1],
            }
            if rank == 0:
                self._store.set(f"progress{self._generation}", str(step))
            if sums[-1]:
                return
            if step % SAVE_EVERY == 0:
                self._last = sp.merge_states(all_gather(loader.state_dict()))


def leave_group() -> None:
    """Leave the process group, even if joining it failed.

    torch names groups by a counter, which it resets when a group is left. If joining failed there is no group to leave,
    so the counter would not be reset, and this rank would wait in each later group under a name that the others do not
    use. We therefore form a group of one, and leave it.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks of the group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Supervisor:
    """Forks ranks, announces which are members of a generation, and kills some."""

    def __init__(self, folder: Path, shards: Path) -> None:
        self._folder, self._shards = folder, shards
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.store.set("generation", "0")
        self._ranks: dict[int, ForkProcess] = {}
        self._next_member = self._generation = 0
        self.hung = 0  # number of ranks that were killed because they did not join a new generation

    def add(self) -> None:
        """Fork a process, which waits until it is a member."""
        context = multiprocessing.get_context("fork")
        arguments = (self._next_member, self._folder, self._shards, self.store.port)
        self._ranks[self._next_member] = context.Process(target=_live, args=arguments, daemon=True)
        self._ranks[self._next_member].start()
        self._next_member += 1

    def announce(self, *, end: bool = False) -> None:
        """Announce a new generation of all living ranks, or one without members to end the run."""
        self._generation += 1
        self.store.set(f"members{self._generation}", json.dumps([] if end else sorted(self._ranks)))
        self.store.set("generation", str(self._generation))

    def wait_for_steps(self, number: int) -> None:
        """Wait until this generation has taken `number` steps."""
        start = last_check = time.monotonic()
        while not self._steps() >= number:
            if self.store.check([f"broken{self._generation}"]):
                self.announce()
            if time.monotonic() > last_check + _HUNG_S:
                self._replace_hung()
                last_check = time.monotonic()
            ended = [member for member, process in self._ranks.items() if not process.is_alive()]
            if ended or time.monotonic() > start + _STUCK_S:
                raise SystemExit(f"generation {self._generation}: no {number} steps; ranks {ended} have ended")
            time.sleep(0.005)

    def _steps(self) -> int:
        """Return the number of steps of this generation."""
        name = f"progress{self._generation}"
        return int(self.store.get(name)) if self.store.check([name]) else 0

    def kill_one(self) -> None:
        """Kill a random rank."""
        self._kill(random.choice(sorted(self._ranks)))

    def _replace_hung(self) -> None:
        """Replace the ranks that have not joined this generation. One rank with a model survives in any case."""
        survivor = next((member for member in self._ranks if self.store.check([f"has a model: {member}"])), None)
        for member in sorted(self._ranks.keys() - {survivor}):
            if self.store.check([f"ready{self._generation}/{member}"]):
                continue
            self._kill(member)
            self.add()
            self.hung += 1
        self.announce()

    def _kill(self, member: int) -> None:
        process = self._ranks.pop(member)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def end(self) -> None:
        """Tell all ranks to exit, and wait for them. The first one saves the model."""
        self.announce(end=True)
        for member, process in self._ranks.items():
            process.join(_STUCK_S)
            if process.exitcode != 0:
                raise SystemExit(f"rank {member} ended with {process.exitcode}")


def _live(member: int, folder: Path, shards: Path, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_STUCK_S)
    )
    Replica(member, shards, store).live(folder)


def survive(folder: Path, kills: int) -> dict[str, Any]:
    """Train on three ranks and kill one `kills` times.

    After a kill, either two ranks continue and a third joins later, or three continue with a new one.
    """
    shards = folder / "shards"
    write_shards(shards)
    supervisor = Supervisor(folder, shards)
    for _ in range(3):
        supervisor.add()
    supervisor.announce()
    for kill in range(kills):
        if kill % 5 != 4:  # every fifth kill happens while ranks join a group
            supervisor.wait_for_steps(random.randrange(1, 2 * SAVE_EVERY))
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
        **_compare_with_one_rank(shards, torch.load(folder / "model.pt")),
    }


def _compare_with_one_rank(shards: Path, model: dict[str, Any]) -> dict[str, Any]:
    """Compare the slots that the model was trained on with those of a run on one rank."""
    slots = model["slot"]
    with sp.SavableLoader(partial(soak_pipeline, str(shards), copies=1), seed=SEED, lanes=LANES) as loader:
        expected = [int(digest(batch)[:10], 16) for batch in islice(loader, slots)]
    once = torch.arange(MAX_SLOTS) < slots
    return {
        "slots": slots,
        "trained_once": bool((model["counts"] == once).all()),
        "as_one_rank": model["hashes"][:slots].long().tolist() == expected,
    }


if __name__ == "__main__":
    print(json.dumps(survive(Path(sys.argv[1]), int(sys.argv[2]))))
