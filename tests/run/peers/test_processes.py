"""Peers that are processes of torch.distributed (gloo): two data-parallel ranks, votes, states and kills."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from savable_pipeline.run.state.state_dict import lane_numbers
from tests.conftest import MakeShards
from tests.support.peer_threads import unshared_loader
from tests.support.streams import next_hashes
from tests.support.toy_peers import STOPPED_TIMEOUT_S


def run(folder: Path, world_size: int, function: str, *arguments: str, ends: bool = True) -> dict[int, Any]:
    """What each rank wrote."""
    (folder / "seen").mkdir()
    command = ["-m", "tests.support.forked_ranks", "tests.support.toy_peers", str(world_size), function]
    command += [str(folder / "seen"), *arguments]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0 or not ends, ended.stderr
    return {int(path.stem): torch.load(path) for path in (folder / "seen").iterdir()}


@pytest.mark.parametrize(
    ("how", "workers"), [("2", 2), pytest.param("mesh", 0, marks=pytest.mark.long)], ids=["groups", "mesh"]
)
def test_two_data_parallel_ranks_of_two_peers(make_shards: MakeShards, tmp_path: Path, how: str, workers: int) -> None:
    shards = make_shards([40, 40, 40])
    seen = run(tmp_path, 4, "train", str(shards), how, str(workers))
    for each in seen.values():
        del each["links"]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    one = unshared_loader(shards)
    in_slots = [batch for step in zip(seen[0]["before"], seen[2]["before"], strict=True) for batch in step]
    assert in_slots == next_hashes(one, 12)
    assert [lane_numbers(seen[rank]["state"]) for rank in range(4)] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert [seen[rank]["global"] for rank in range(4)] == [one.state_dict()] * 4
    in_slots = [batch for step in zip(seen[0]["after"], seen[2]["after"], strict=True) for batch in step]
    assert in_slots == next_hashes(one, 8)
    in_slots = [batch for step in zip(seen[0]["epoch"], seen[2]["epoch"], strict=True) for batch in step]
    expected = next_hashes(unshared_loader(shards, epochs=1), 1000)
    assert in_slots == expected[: len(in_slots)] and len(expected) - len(in_slots) < 2


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("victim", "workers"), [(0, 1), (2, 0)])
def test_a_peer_that_is_killed_or_stopped_ends_all_by_name(
    make_shards: MakeShards, tmp_path: Path, victim: int, workers: int, kind: str
) -> None:
    """One that stops does so within one timeout, not five as earlier; the limit of the test is generous."""
    shards = make_shards([40, 40, 40])
    seen = run(tmp_path, 3, "die", str(shards), str(victim), str(workers), kind, ends=False)
    survivors = {0, 1, 2} - {victim}
    assert survivors <= seen.keys()
    for rank in survivors:
        waited = rf"rank \d waited {STOPPED_TIMEOUT_S:g} s for rank {victim}\."
        assert re.match(waited if kind == "SIGSTOP" else f"rank {victim} ended", seen[rank]["error"])
        assert seen[rank]["waited_s"] < 4 * STOPPED_TIMEOUT_S
        taken_count = len(seen[rank]["batches"])
        assert 3 <= taken_count <= 6 and seen[rank]["batches"] == next_hashes(unshared_loader(shards), taken_count)
        resumed = unshared_loader(shards)
        resumed.load_state_dict(seen[rank]["state"])
        assert next_hashes(resumed, 3) == next_hashes(unshared_loader(shards), taken_count + 3)[taken_count:]


def test_first_ranks_in_two_data_groups_are_rejected(make_shards: MakeShards, tmp_path: Path) -> None:
    seen = run(tmp_path, 4, "wrong_groups", str(make_shards([4])))
    for errors in seen.values():
        assert "have one data group, but one alone is a first peer" in errors["errors"][-1]


@pytest.fixture
def two_networks() -> Iterator[list[str]]:
    """Two network namespaces, A at 10.77.0.1 and B at 10.77.0.2."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and ip")
    names = [f"peers{os.getpid()}{side}" for side in "ab"]
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add va{os.getpid()} netns {names[0]} type veth peer name vb{os.getpid()} netns {names[1]}"]
    for name, end, host in zip(names, "ab", (1, 2), strict=True):
        commands += [f"-n {name} address add 10.77.0.{host}/24 dev v{end}{os.getpid()}"]
        commands += [f"-n {name} link set v{end}{os.getpid()} up", f"-n {name} link set lo up"]
    try:
        for command in commands:
            if subprocess.run(["ip", *command.split()], capture_output=True).returncode:
                pytest.skip("network namespaces cannot be made here")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.long
def test_two_network_namespaces_are_two_machines(
    make_shards: MakeShards, tmp_path: Path, two_networks: list[str]
) -> None:
    shards = make_shards([40, 40, 40])
    ranks = []
    for rank in range(4):
        name = two_networks[rank // 2]
        env = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577"}
        env["GLOO_SOCKET_IFNAME"] = f"v{'ab'[rank // 2]}{os.getpid()}"
        words = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.support.toy_peers", "train", str(tmp_path)]
        ranks.append(subprocess.Popen([*words, str(shards), "4", "1"], env={**os.environ, **env}))
    assert [rank.wait(200) for rank in ranks] == [0] * 4
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    assert [each.pop("links") for each in seen] == [[True, False], [], [True], []]
    assert seen == [seen[0]] * 4
    one = unshared_loader(shards)
    assert seen[0]["before"] == next_hashes(one, 6) and seen[0]["state"] == one.state_dict()
    assert seen[0]["after"] == next_hashes(one, 4) and seen[0]["epoch"] == next_hashes(
        unshared_loader(shards, epochs=1), 1000
    )


@pytest.mark.parametrize(
    ("first", "last"), [(0, 2), *(pytest.param(each, each + 10, marks=pytest.mark.long) for each in range(2, 202, 10))]
)
def test_runs_killed_at_random_resume_with_other_sharing(make_shards: MakeShards, first: int, last: int) -> None:
    """Four ranks share by 4, 2 and 1, and one alone resumes; a rank or a worker is killed in each of the first."""
    words = ["-m", "tests.support.killed_peers", str(make_shards([40, 40, 40])), str(first), str(last)]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0 and len(ended.stdout.splitlines()) == last - first, ended.stdout + ended.stderr
