"""Which rank has which lanes and slots, and where rank and world size come from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.ranks import Ranks, check_same_data, find_ranks
from savable_pipeline.run.loader.savable_loader import run_of
from tests.support.streams import next_hashes
from tests.support.toy_numbers import Numbers, counted_pipeline
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with a single rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def found(ranks: Any = None, lanes: int = 12) -> tuple[int, int]:
    there = find_ranks(ranks, lanes)
    return there.rank, there.world_size


# Lanes and slots.


def test_ranks_and_lanes_match_the_drawing_in_the_docs() -> None:
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


def test_ranks_come_from_a_process_group_or_mesh(one_process_group: None) -> None:
    assert found() == found(dist.group.WORLD) == (0, 1)
    assert find_ranks(dist.group.WORLD, 12).group is dist.group.WORLD
    assert found(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))) == (0, 1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert found(mesh["dp"]) == (0, 1)
    with pytest.raises(ValueError, match=r"one dimension.*mesh\['dp'\]"):
        found(mesh)
    assert found((1, 4)) == found([1, 4]) == found(sp.Ranks(1, 4)) == (1, 4)


def test_loader_of_a_process_group_gathers_and_ends_like_a_single_one(
    one_process_group: None, make_shards: Any
) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=1)
    alone = sp.SavableLoader(pipeline, seed=3, lanes=12, ranks=(0, 1))
    loader = sp.SavableLoader(pipeline, seed=3, lanes=12)
    assert next_hashes(loader, 5) == next_hashes(alone, 5)
    assert loader.global_state_dict() == loader.state_dict() == loader.global_state_dict(dist.group.WORLD)
    assert loader.global_state_dict(lag=2) == loader.state_dict(lag=2) != loader.state_dict()
    assert next_hashes(loader, 1000) == next_hashes(alone, 1000)


@pytest.mark.parametrize("given", [0, (1,), (0, 1, 2), ("0", "1"), "web", object()])
def test_invalid_ranks_are_an_error(given: object) -> None:
    with pytest.raises(ValueError, match=r"ranks must be \(rank, world_size\), a process group, a mesh or sp.Ranks"):
        found(given)


@pytest.mark.parametrize("rank,world_size", [(2, 2), (-1, 2), (0, 0), (0, -1), (1, 1)])
def test_a_rank_outside_the_world_is_an_error(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank must be 0 to {world_size - 1}, not {rank}"):
        found(ranks=(rank, world_size))


def test_a_world_size_that_does_not_divide_the_lanes_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(
        ValueError,
        match=r"5 ranks do not divide lanes=12\. Start a run with lanes=15, or use .* 1, 2, 3, 4, 6, 12",
    ):
        found(ranks=(0, 5))
    with pytest.raises(ValueError, match=r"24 ranks do not divide lanes=12\. Start a run with lanes=24"):
        found(ranks=(0, 24))


def test_announced_world_without_a_process_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets WORLD_SIZE; without init_process_group each rank would take itself for the only one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=4.* Call init_process_group first"):
        found()
    assert found(ranks=(1, 4)) == (1, 4)
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        assert found() == (0, 1)


@pytest.mark.parametrize("lanes", [0, -12])
def test_a_number_of_lanes_below_one_is_an_error(lanes: int) -> None:
    with pytest.raises(ValueError, match=f"lanes must be at least 1, not {lanes}"):
        found(lanes=lanes)


# A world that comes later.


def ranks_now(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """As if torch.distributed had been initialised with other ranks, by another process's fork or `mp.spawn`."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world_size)


def test_loader_built_before_its_process_group_is_an_error_at_the_first_batch(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    early = [sp.SavableLoader(pipeline, seed=3, lanes=12) for _ in range(3)]
    given = sp.SavableLoader(pipeline, seed=3, lanes=12, ranks=(0, 1))
    ranks_now(monkeypatch, 1, 4)
    told = r"created for rank 0 of 1, .* says rank 1 of 4\. Create it after init_process_group"
    for _ in range(2):
        with pytest.raises(ValueError, match=told):
            next(early[0])
    with pytest.raises(ValueError, match=told):
        early[1].skip(4)
    next(given)
    ranks_now(monkeypatch, 0, 1)
    next(early[0])


def test_loader_whose_ranks_changed_is_an_error(
    one_process_group: None, make_shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was made in a process that was forked later."""
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    found, of_a_group = (
        sp.SavableLoader(pipeline, seed=3, lanes=12, ranks=group) for group in (None, dist.group.WORLD)
    )
    ranks_now(monkeypatch, 2, 3)
    with pytest.raises(ValueError, match=r"created for rank 0 of 1, .* says rank 2 of 3"):
        next(found)
    next(of_a_group)


def test_world_announced_before_the_first_batch_without_a_group_is_an_error(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sp.SavableLoader(partial(toy_pipeline, str(make_shards([40]))), seed=3, lanes=12)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 says that there are several"):
        next(own)


# Agreeing.


def test_ranks_as_numbers_cannot_agree_on_an_end(make_shards: Any) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=1)
    loader = sp.SavableLoader(pipeline, seed=3, lanes=12, ranks=(0, 2))
    with pytest.raises(ValueError, match=r"the 2 ranks of a finite run must agree on its end.*init_process_group"):
        next(loader)
    with pytest.raises(ValueError, match="merge_states"):
        loader.global_state_dict()


def test_ranks_as_numbers_use_a_matching_torch_process_group(
    one_process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(dist, "all_reduce", lambda value, op, group: asked.append((op, group)))
    ranks_now(monkeypatch, 1, 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    assert Ranks(1, 2, None).agree(7, smallest=True) == Ranks(1, 2, None).agree(7, smallest=False) == 7
    assert asked == [(dist.ReduceOp.MIN, dist.group.WORLD), (dist.ReduceOp.MAX, dist.group.WORLD)]
    for other in (Ranks(0, 2, None), Ranks(1, 4, None)):
        with pytest.raises(ValueError, match="must agree on its end"):
            other.agree(7, smallest=True)


def test_ranks_as_numbers_need_no_agreement_if_the_length_is_known(make_shards: Any) -> None:
    pipeline = partial(counted_pipeline, str(make_shards([50])))
    alone = sp.SavableLoader(pipeline, seed=3, lanes=4, ranks=(0, 1))
    expected = next_hashes(alone, 1000) + next_hashes(alone, 1000)
    ranks = [sp.SavableLoader(pipeline, seed=3, lanes=4, ranks=(rank, 2)) for rank in range(2)]
    found = [next_hashes(rank, 1000) + next_hashes(rank, 1000) for rank in ranks]
    assert [batch for step in zip(*found, strict=True) for batch in step] == expected


def test_skip_in_an_epoch_of_known_length_is_an_error(make_shards: Any) -> None:
    class Skips(Numbers):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            number, drawn = super().encode(sample, rng)
            return sp.Skip("odd") if number == 31 else (number, drawn)

    def pipeline(lane: sp.Lane, on_error: Any = "raise") -> custom.Stage:
        samples = sp.TarShardReader(shards, lane, epochs=1)
        return sp.Batcher(sp.Encode(samples, Skips(), on_error=on_error), size=2)

    shards = str(make_shards([50]))
    ranks = [sp.SavableLoader(pipeline, seed=3, lanes=4, ranks=(rank, 2)) for rank in range(2)]
    with pytest.raises(sp.EncodeError, match="one_to_one"):
        [next_hashes(rank, 1000) for rank in ranks]
    with pytest.raises(ValueError, match="must agree on its end"):
        next(sp.SavableLoader(partial(pipeline, on_error="skip"), seed=3, lanes=4, ranks=(0, 2)))


ALONE = """
import os, sys
import torch.distributed as dist
import savable_pipeline as sp
from savable_pipeline import custom

rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
loader = sp.SavableLoader(lambda lane: sp.Batcher(sp.TarShardReader(sys.argv[1], lane), size=4), seed=3, lanes=4)
loader.global_state_dict()  # on both
if rank == 0:
    try:
        loader.global_state_dict()
    except sp.SavableError as error:
        print(error)
os._exit(0) if rank else os.wait()
"""


def test_global_state_requested_only_on_rank_0_is_an_error(make_shards: Any) -> None:
    folder = make_shards([40])
    run = subprocess.run([sys.executable, "-c", ALONE, str(folder)], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "rank 0 could not gather the states of 2 ranks" in run.stdout
    assert "Call global_state_dict on every rank" in run.stdout


class Counting(sp.TaskEncoder):
    """Has a setting whose name is that of a reader's."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]

    def settings(self) -> dict[str, Any]:
        return {"shards": 5}


def test_encoder_setting_named_shards_is_not_compared_between_ranks(make_shards: Any) -> None:
    folder = str(make_shards([8]))
    with sp.SavableLoader(lambda lane: _encoded(folder, lane), seed=1, lanes=2) as loader:
        told: list[str] = []
        check_same_data(_Alone(told), run_of(loader).states.fingerprint)  # type: ignore[arg-type]
    assert told[0].split()[1:] == ["0", "1", "1"], "the rank, one shard, and the seed"


def _encoded(folder: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(folder, lane), Counting()), size=2)


class _Alone:
    """The first rank that says what it reads."""

    name = 0

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def first_value(self, key: str, said: str) -> str:
        self._told.append(said)
        return said
