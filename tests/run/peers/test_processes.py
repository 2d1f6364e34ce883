"""Peers that are processes of torch.distributed (gloo): two data-parallel ranks, votes, states and kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from savable_pipeline.run.state.state_dict import lane_numbers
from tests.conftest import MakeShards
from tests.support.peer_threads import alone
from tests.support.streams import take


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
    assert seen[0] == seen[1] and seen[2] == seen[3]
    one = alone(shards)
    in_slots = [batch for step in zip(seen[0]["before"], seen[2]["before"], strict=True) for batch in step]
    assert in_slots == take(one, 12)
    assert [lane_numbers(seen[rank]["state"]) for rank in range(4)] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert [seen[rank]["global"] for rank in range(4)] == [one.state_dict()] * 4
    in_slots = [batch for step in zip(seen[0]["after"], seen[2]["after"], strict=True) for batch in step]
    assert in_slots == take(one, 8)
    in_slots = [batch for step in zip(seen[0]["epoch"], seen[2]["epoch"], strict=True) for batch in step]
    expected = take(alone(shards, epochs=1), 1000)
    assert in_slots == expected[: len(in_slots)] and len(expected) - len(in_slots) < 2


@pytest.mark.parametrize(("victim", "workers"), [(0, 1), (2, 0)])
def test_a_killed_peer_ends_all_by_name(make_shards: MakeShards, tmp_path: Path, victim: int, workers: int) -> None:
    shards = make_shards([40, 40, 40])
    seen = run(tmp_path, 3, "die", str(shards), str(victim), str(workers), ends=False)
    survivors = {0, 1, 2} - {victim}
    assert survivors <= seen.keys()
    for rank in survivors:
        assert f"rank {victim} ended" in seen[rank]["error"]
        taken = len(seen[rank]["batches"])
        assert 3 <= taken <= 6 and seen[rank]["batches"] == take(alone(shards), taken)
        resumed = alone(shards)
        resumed.load_state_dict(seen[rank]["state"])
        assert take(resumed, 3) == take(alone(shards), taken + 3)[taken:]


def test_first_ranks_in_two_data_groups_are_refused(make_shards: MakeShards, tmp_path: Path) -> None:
    seen = run(tmp_path, 4, "wrong_groups", str(make_shards([4])))
    for errors in seen.values():
        assert "have one data group, but one alone is a first peer" in errors["errors"][-1]
