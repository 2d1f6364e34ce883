"""Ranks that die: what their lanes were is found from the last state of all and passed over to the survivors' slot."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.errors import StateError
from savable_pipeline.trainers.elastic import complete_state
from tests.conftest import MakeShards, write_numbered_shards
from tests.support.processes import descendants, kill
from tests.support.streams import next_hashes
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 12}


@pytest.fixture
def shards(make_shards: MakeShards) -> str:
    return str(make_shards([40, 7, 160]))


def ranks_of(pipeline: Any, world_size: int, state: dict[str, Any] | None = None) -> list[sp.SavableLoader]:
    ranks = [sp.SavableLoader(pipeline, ranks=(rank, world_size), **SETTINGS) for rank in range(world_size)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(state)
    return ranks


def steps(ranks: list[sp.SavableLoader], number: int) -> None:
    for _ in range(number):
        for rank in ranks:
            next(rank)


def test_states_with_rows_in_flight_or_decisions_are_rejected(shards: str) -> None:
    def ranks(**settings: Any) -> tuple[sp.SavableLoader, sp.SavableLoader]:
        first, second = (
            sp.SavableLoader(partial(toy_pipeline, shards), ranks=(rank, 2), **SETTINGS, **settings)
            for rank in range(2)
        )
        return first, second

    plain, acknowledging = ranks(), ranks(acknowledge=True)
    start = sp.merge_states(rank.state_dict() for rank in plain)
    for rank in (*plain, *acknowledging):
        next(rank)
    states = [rank.state_dict() for rank in acknowledging]
    for survivors, last in ([states[0]], start), ([plain[0].state_dict()], sp.merge_states(states)):
        with pytest.raises(sp.CheckpointMismatchError, match="unacknowledged batches of"):
            complete_state(plain[0], survivors, last)
    for rank, receipts in zip(acknowledging, (each.receipts() for each in acknowledging), strict=True):
        rank.acknowledge(receipts)
    assert complete_state(plain[0], [acknowledging[0].state_dict()], start)["slot"] == 2
    for rank in plain:
        rank.reconfigure(max_length=8)
    with pytest.raises(sp.CheckpointMismatchError, match=r"older than a reconfigure.* max_length=8"):
        complete_state(plain[0], [plain[0].state_dict()], start)
    last = sp.merge_states(rank.state_dict() for rank in plain)
    for rank in plain:
        next(rank)
    completed = complete_state(plain[0], [plain[0].state_dict()], last)
    assert completed == sp.merge_states(rank.state_dict() for rank in plain)


@pytest.mark.parametrize(
    ("pack", "dead"), [("best_fit", [2]), ("first_fit_decreasing", [0, 1]), ("sequential", [2]), (None, [0, 1])]
)
def test_completed_state_equals_that_of_all_live_ranks(shards: str, pack: str | None, dead: list[int]) -> None:
    ranks = ranks_of(partial(toy_pipeline, shards, pack=pack), 3)
    last = sp.merge_states(rank.state_dict() for rank in ranks)
    for done in (5, 4):
        steps(ranks, done)
        expected = sp.merge_states(rank.state_dict() for rank in ranks)
        alive = [rank for number, rank in enumerate(ranks) if number not in dead]
        survivors = [rank.state_dict() for rank in alive]
        state = random.getstate()
        assert complete_state(alive[0], survivors, last) == expected
        assert random.getstate() == state and alive[0].state_dict() == survivors[0]
        last = expected


def test_rank_reconstructs_only_the_lanes_it_needs(shards: str) -> None:
    pipeline = partial(toy_pipeline, shards)
    ranks = ranks_of(pipeline, 3)
    last = sp.merge_states(rank.state_dict() for rank in ranks)
    steps(ranks, 3)
    expected = next_hashes(ranks_of(pipeline, 1, sp.merge_states(rank.state_dict() for rank in ranks))[0], 8)
    survivors = [rank.state_dict() for rank in ranks[:2]]
    two = [sp.SavableLoader(pipeline, ranks=(rank, 2), **SETTINGS) for rank in (0, 1)]
    for rank, loader in enumerate(two):
        state = complete_state(ranks[0], survivors, last, lanes=range(rank, 12, 2))
        assert sum(name.startswith("lane_") for name in state) == 10  # 8 of survivors, 2 of the 4 that are missing
        loader.load_state_dict(state)
    assert [
        batch for pair in zip(next_hashes(two[1], 4), next_hashes(two[0], 4), strict=True) for batch in pair
    ] == expected


@pytest.mark.parametrize("pipeline", [counted_pipeline, partial(toy_pipeline, epochs=1)])
def test_last_state_of_an_earlier_epoch_suffices(shards: str, pipeline: Any) -> None:
    made = partial(pipeline, shards)
    ranks = ranks_of(made, 1)
    last = ranks[0].state_dict()
    whole = len(next_hashes(ranks[0], 1000))
    next_hashes(ranks[0], 5)
    state = ranks[0].state_dict()
    assert (state["epoch"], state["slot"]) == (1, 5) and whole > 5
    own = {name: value for name, value in state.items() if not name.endswith(("2", "5"))}
    completed = complete_state(ranks[0], [own], last)
    again = ranks_of(made, 1, completed)[0]
    assert next_hashes(again, 1000) == next_hashes(ranks[0], 1000)


def test_states_that_do_not_fit_are_rejected(shards: str) -> None:
    ranks = ranks_of(partial(toy_pipeline, shards), 3)
    first = sp.merge_states(rank.state_dict() for rank in ranks)
    own = ranks[0].state_dict()
    steps(ranks, 2)
    later = sp.merge_states(rank.state_dict() for rank in ranks)
    with pytest.raises(sp.CheckpointMismatchError, match=r"later \(slot 6 of epoch 0\) than the survivors"):
        complete_state(ranks[0], [own], later)
    with pytest.raises(sp.CheckpointMismatchError, match="differ in slot: 6 and 0"):
        complete_state(ranks[0], [own, ranks[1].state_dict()], first)
    other = sp.SavableLoader(partial(toy_pipeline, shards), seed=4, lanes=12).state_dict()
    with pytest.raises(sp.CheckpointMismatchError, match="the last state is of another run, with another fingerprint"):
        complete_state(ranks[0], [own], {**first, "fingerprint": other["fingerprint"]})
    with pytest.raises(StateError, match="fingerprint: "):
        complete_state(ranks[0], [own], {**first, "fingerprint": b"damaged"})
    with pytest.raises(sp.CheckpointMismatchError, match="needs lane 1"):
        complete_state(ranks[0], [ranks[0].state_dict()], own)
    with pytest.raises(ValueError, match="at least one state"):
        complete_state(ranks[0], [], first)


def test_last_state_of_moved_data_belongs_to_the_run(shards: str, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "copy")
    here, there = (partial(toy_pipeline, folder) for folder in (shards, str(tmp_path / "copy")))
    last = ranks_of(there, 1)[0].state_dict()
    ranks = ranks_of(here, 3, last)
    steps(ranks, 4)
    expected = sp.merge_states(rank.state_dict() for rank in ranks)
    assert last["fingerprint"] != expected["fingerprint"]  # packed, with where the data lies
    assert complete_state(ranks[0], [ranks[0].state_dict()], last) == expected


FORMS_AGAIN = """
import os, sys
from datetime import timedelta
sys.path.insert(0, "tools/soak")
import torch.distributed as dist
from survivors import leave_group

served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
child = os.fork()
rank = int(child == 0)
store = dist.TCPStore("127.0.0.1", served.port, is_master=False)
if rank == 0:
    try:
        one = dist.PrefixStore("one", store)
        dist.init_process_group("gloo", store=one, rank=0, world_size=2, timeout=timedelta(seconds=0.5))
    except RuntimeError:
        print("failed")
    leave_group()
other = dist.PrefixStore("other", store)
dist.init_process_group("gloo", store=other, rank=rank, world_size=2, timeout=timedelta(seconds=20))
leave_group()
if rank == 0:
    os.waitpid(child, 0)
"""


@pytest.mark.landing
def test_rank_that_failed_to_join_a_group_joins_the_next() -> None:
    run = subprocess.run([sys.executable, "-c", FORMS_AGAIN], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (run.returncode, run.stdout) == (0, "failed\n"), run.stderr[-2000:]


def survive(folder: Path, kills: int) -> dict[str, Any]:
    """Run tools/soak/survivors.py, and return its result."""
    command = [sys.executable, str(ROOT / "tools/soak/survivors.py"), str(folder), str(kills)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * kills)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.landing
def test_survivors_of_killed_ranks_train_on_every_slot_once(tmp_path: Path) -> None:
    found = survive(tmp_path, kills=10)
    assert found["kills"] == 10 and found["slots"] >= 30
    assert found["trained_once"] and found["as_one_rank"]
    assert found["made_up"] > 0


class Nodes:
    """Two agents of torchrun on this machine, one of which may be killed."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._conf = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5"
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        often = ["--max-restarts=50", "--monitor-interval=0.1", "--rdzv-id=elastic"]
        self._command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        self._arguments = [*rendezvous, *often, "-m", "tests.support.toy_elastic", str(folder / "shards"), str(folder)]

    def start(self, node: int) -> None:
        errors = (self.folder / f"errors{node}").open("ab")
        conf = f"--rdzv-conf={self._conf},is_host={int(node == 0)}"  # the first has the store, and must live
        command = [*self._command, conf, *self._arguments]
        self.agents[node] = subprocess.Popen(command, stdout=errors, stderr=errors)

    def kill_rank(self, rank: int, world_size: int) -> None:
        kill(int((self.folder / f"{rank}_of_{world_size}.pid").read_text()))

    def kill_node(self, node: int) -> None:
        """Kill an agent and its processes."""
        agent = self.agents.pop(node)
        below = descendants(agent.pid)
        for pid in (agent.pid, *below):
            kill(pid)
        agent.wait()

    def errors(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("errors*")))

    def wait_for(self, world_size: int) -> int:
        """Wait for the next checkpoint by this many ranks, and return its slot."""
        pids, saved, deadline = self.folder / f"0_of_{world_size}.pid", self.folder / "checkpoint.pt", time.time() + 120
        while not (pids.exists() and saved.exists() and saved.stat().st_mtime > pids.stat().st_mtime):
            assert time.time() < deadline, self.errors()
            time.sleep(0.02)
        for pid in self.folder.glob("*.pid"):
            if pid.name.split("_")[2] != f"{world_size}.pid":
                pid.unlink()
        return int(torch.load(saved)["data"]["slot"])


@pytest.mark.long
def test_torchrun_resumes_from_the_last_checkpoint_after_ranks_and_nodes_die(tmp_path: Path) -> None:
    write_numbered_shards(tmp_path / "shards", [40, 7, 160])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = Nodes(tmp_path, port)
    nodes.start(0)
    nodes.start(1)
    slots = [nodes.wait_for(2)]
    nodes.kill_rank(1, 2)
    (tmp_path / "0_of_2.pid").unlink()
    slots.append(nodes.wait_for(2))
    nodes.kill_node(1)
    slots.append(nodes.wait_for(1))
    (tmp_path / "enough").touch()
    assert [agent.wait(120) for agent in nodes.agents.values()] == [0], nodes.errors()
    assert slots == sorted(slots)
    saved = torch.load(tmp_path / "checkpoint.pt")
    end = saved["data"]["slot"]
    one = sp.SavableLoader(partial(toy_pipeline, str(tmp_path / "shards")), **SETTINGS)
    counts, hashes = saved["model"].tolist()
    assert counts == [int(slot < end) for slot in range(len(counts))]
    assert hashes[:end] == [int(batch[:10], 16) for batch in next_hashes(one, end)]
