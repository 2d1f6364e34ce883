"""Real ranks: 2, then 4 that go on from the checkpoint of the 2; beside them one rank here.

They are forked as torchrun starts them; `-m long` has torchrun start the 2, which imports torch three times.
"""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import savable_pipeline as sp
from tests.support.shards import write_numbered_shards
from tests.support.streams import next_hashes
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline
from tests.support.toy_rank import SETTINGS, STEPS

SAVED_AT = 2 * STEPS


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.support.toy_rank"]
FORKED = ["tests.support.forked_ranks", "tests.support.toy_rank"]
STARTS = {"forked": [[*FORKED, "2,4"]], "torchrun": [TORCHRUN, [*FORKED, "4"]]}


@pytest.fixture(scope="module", params=["forked", pytest.param("torchrun", marks=pytest.mark.long)])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """The folder, and by world size what each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    write_numbered_shards(folder / "shards", [40, 7, 105])
    for start in STARTS[request.param]:
        command = [sys.executable, "-m", *start, str(folder / "shards"), str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, run.stderr
    return folder, {size: [torch.load(folder / f"rank{rank}_of_{size}.pt") for rank in range(size)] for size in (2, 4)}


def alone(folder: Path, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(toy_pipeline, str(folder / "shards"), **settings), **SETTINGS)


def by_slot(ranks: list[list[str]], first: int = 0) -> list[str]:
    """The batches of all ranks in the order of the slots, of steps that began at slot `first`."""
    world_size = len(ranks)
    return [
        ranks[slot % world_size][(slot - first) // world_size] for slot in range(first, first + sum(map(len, ranks)))
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_a_finite_run_get_the_slots_of_one_rank_and_end_together(runs: Any, world_size: int) -> None:
    folder, seen = runs
    one = alone(folder, epochs=1)
    expected = [next_hashes(one, 1000), next_hashes(one, 1000), next_hashes(one, world_size)]
    for epoch in range(3):
        ranks = [rank["epochs"][epoch] for rank in seen[world_size]]
        assert len({len(batches) for batches in ranks}) == 1
        assert by_slot(ranks) == expected[epoch]
    assert len(expected[0]) % 12 == 0 < len(expected[0]) and expected[0] != expected[1]
    merged = sp.merge_states(rank["end"] for rank in seen[world_size])
    assert merged == one.state_dict()


@pytest.mark.parametrize("name,settings", [("endless", {}), ("finite", {"epochs": 1})])
def test_distributed_checkpoint_of_2_ranks_resumes_on_2_4_and_1(runs: Any, name: str, settings: dict[str, Any]) -> None:
    folder, seen = runs
    one = alone(folder, **settings)
    next_hashes(one, SAVED_AT)
    expected, following = next_hashes(one, 1000 if settings else 24), next_hashes(one, 1000) if settings else []
    for world_size in (2, 4):
        found = by_slot([rank[name] for rank in seen[world_size]], SAVED_AT)
        assert by_slot([rank[f"{name}_next"] for rank in seen[world_size]]) == following
        left_out = -SAVED_AT % world_size  # at the end: too few slots for a step of them all
        assert found == expected[: len(expected) - left_out if settings else 6 * world_size]

    fresh = alone(folder, **settings)
    state = {"data": fresh.state_dict()}
    with redirect_stderr(io.StringIO()), pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=folder / f"checkpoint_{name}")
    fresh.load_state_dict(state["data"])
    assert next_hashes(fresh, len(expected)) == expected


@pytest.mark.parametrize("name,settings", [("endless", {}), ("finite", {"epochs": 1})])
def test_gathered_state_equals_the_merged_one_on_every_rank(runs: Any, name: str, settings: dict[str, Any]) -> None:
    folder, seen = runs
    ranks = seen[2]
    merged = sp.merge_states(rank[f"own_{name}"] for rank in ranks)
    assert [rank[f"global_{name}"] for rank in ranks] == [merged] * 2
    one = alone(folder, **settings)
    next_hashes(one, SAVED_AT)
    assert one.state_dict() == merged


def test_ranks_resume_a_padded_epoch_and_yield_each_sample_once(runs: Any) -> None:
    folder, seen = runs
    one = sp.SavableLoader(partial(counted_pipeline, str(folder / "shards")), **SETTINGS, tail="pad")
    next_hashes(one, SAVED_AT)
    expected, following = next_hashes(one, 1000), next_hashes(one, 1000)
    assert SAVED_AT + len(expected) == len(following) == 76  # of 152 samples in twos
    for world_size in (2, 4):
        found = by_slot([rank["padded"] for rank in seen[world_size]], SAVED_AT)
        assert found[: len(expected)] == expected and len(found) == -(-len(expected) // world_size) * world_size
        assert by_slot([rank["padded_next"] for rank in seen[world_size]]) == following


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["counted", "packed"])
def test_ranks_may_interrupt_evaluations_at_different_batches(runs: Any, name: str, world_size: int) -> None:
    folder, seen = runs
    pipelines = {"counted": counted_pipeline, "packed": partial(toy_pipeline, epochs=1)}
    one = sp.SavableLoader(partial(pipelines[name], str(folder / "shards")), **SETTINGS, tail="pad")
    whole = next_hashes(one, 1000)
    passes = [rank[f"passes_{name}"] for rank in seen[world_size]]
    assert by_slot([found[1] for found in passes])[: len(whole)] == whole
    for rank, found in enumerate(passes):
        assert found[4] == found[1] and len(found[1]) == -(-len(whole) // world_size)
        assert [found[0], found[2], found[3]] == [found[1][:n] for n in (1 + rank, 2 * rank, 1)]
