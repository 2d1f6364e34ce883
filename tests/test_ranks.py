"""Which rank has which lanes and slots, and where rank and world size come from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import savable_pipeline as sp
from savable_pipeline.ranks import Ranks, find_ranks
from tests.streams import take
from tests.toy_pipelines import toy_pipeline


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with a single rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def found(**given: Any) -> tuple[int, int]:
    ranks = find_ranks(**{"rank": None, "world_size": None, "group": None, "mesh": None, "lanes": 12, **given})
    return ranks.rank, ranks.world_size


# Lanes and slots.


def test_ranks_and_lanes_are_those_of_the_drawing() -> None:
    first, second = Ranks(0, 2, None), Ranks(1, 2, None)
    assert (list(first.lanes(4)), list(second.lanes(4))) == ([0, 2], [1, 3])
    assert [(first.slot(start), second.slot(start)) for start in (0, 2, 4)] == [(0, 1), (2, 3), (4, 5)]
    assert [(first.slot(start), second.slot(start)) for start in (1, 3)] == [(2, 1), (4, 3)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_each_lane_and_each_slot_of_a_step_belongs_to_one_rank(world_size: int) -> None:
    ranks = [Ranks(rank, world_size, None) for rank in range(world_size)]
    assert sorted(lane for rank in ranks for lane in rank.lanes(12)) == list(range(12))
    for start in range(30):
        slots = [rank.slot(start) for rank in ranks]
        assert sorted(slots) == list(range(start, start + world_size))
        assert all(slot % 12 in rank.lanes(12) for rank, slot in zip(ranks, slots, strict=True))


# Where they come from.


def test_without_anything_there_is_one_rank() -> None:
    assert found() == (0, 1)


def test_rank_and_world_size_are_taken_as_given() -> None:
    assert found(rank=2, world_size=3) == (2, 3)


def test_they_come_from_the_process_group_or_a_mesh(one_process_group: None) -> None:
    assert found() == found(group=dist.group.WORLD) == (0, 1)
    assert found(mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))) == (0, 1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert found(mesh=mesh["dp"]) == (0, 1)
    with pytest.raises(ValueError, match=r"one dimension.*mesh\['dp'\]"):
        found(mesh=mesh)
    with pytest.raises(ValueError, match="no group"):
        found(mesh=mesh["dp"], group=dist.group.WORLD)
    assert found(rank=1, world_size=4) == (1, 4)


def test_a_loader_of_a_group_gathers_and_ends_as_alone(one_process_group: None, make_shards: Any) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=1)
    alone = sp.SavableLoader(pipeline, seed=3, lanes=12, rank=0, world_size=1)
    loader = sp.SavableLoader(pipeline, seed=3, lanes=12)
    assert take(loader, 5) == take(alone, 5)
    assert loader.global_state_dict() == loader.state_dict() == loader.global_state_dict(dist.group.WORLD)
    assert take(loader, 1000) == take(alone, 1000)


@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 1}, {"rank": 3}])
def test_one_of_rank_and_world_size_alone_is_an_error(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give both rank and world_size, or neither"):
        found(**given)


@pytest.mark.parametrize("rank,world_size", [(2, 2), (-1, 2), (0, 0), (0, -1), (1, 1)])
def test_a_rank_outside_the_world_is_an_error(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} does not lie in 0 … {world_size - 1}"):
        found(rank=rank, world_size=world_size)


def test_a_world_size_that_does_not_divide_the_lanes_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(ValueError, match="5 ranks do not divide 12 lanes; world sizes that do: 1, 2, 3, 4, 6, 12"):
        found(rank=0, world_size=5)
    with pytest.raises(ValueError, match="24 ranks do not divide 12 lanes"):
        found(rank=0, world_size=24)


def test_a_world_that_is_announced_but_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets WORLD_SIZE; without init_process_group each rank would take itself for the only one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=4 .* call init_process_group before making the loader"):
        found()
    assert found(rank=1, world_size=4) == (1, 4)
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        assert found() == (0, 1)


@pytest.mark.parametrize("lanes", [0, -12])
def test_a_number_of_lanes_below_one_is_an_error(lanes: int) -> None:
    with pytest.raises(ValueError, match=f"lanes must be at least 1, not {lanes}"):
        found(lanes=lanes)


# Agreeing.


def test_ranks_given_as_numbers_cannot_agree_on_an_end_and_say_so(make_shards: Any) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=1)
    loader = sp.SavableLoader(pipeline, seed=3, lanes=12, rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"the 2 ranks of a finite run must agree on its end.*init_process_group"):
        next(loader)
    with pytest.raises(ValueError, match="merge_states"):
        loader.global_state_dict()


def test_an_endless_run_needs_no_one_to_agree_with(make_shards: Any) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    assert "WORLD_SIZE" not in os.environ
    assert len(take(sp.SavableLoader(pipeline, seed=3, lanes=12, rank=1, world_size=2), 30)) == 30
