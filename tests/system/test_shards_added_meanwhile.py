"""A run reads the shards that it began with, however late a process of it opens them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.run.loader.ranks import Ranks
from tests.conftest import write_numbered_shards
from tests.support.processes import started_workers
from tests.support.toy_faults import NumberEncoder

SIZES = [8, 12, 9, 11]
STEPS = 30  # several epochs of the first two shards


def shuffled(folder: str, lane: sp.Lane) -> custom.Stage:
    samples = sp.TarShardReader(folder, lane, block_size=2, subset=0.9)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=3), NumberEncoder()), size=2)


class JoinedNumbers(NumberEncoder):
    """A sample's number, and that of the joined one, -1 without."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], "other.json" in sample


def joined(folder: str, lane: sp.Lane) -> custom.Stage:
    samples = sp.TarShardReader(f"{folder}/../all", lane, shuffle=False)
    samples = custom.Join(samples, {"other": folder}, missing="empty")
    return sp.Batcher(sp.Encode(samples, JoinedNumbers()), size=2)


def loader(folder: Path, make: Any = shuffled, **more: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(make, str(folder)), seed=1, lanes=4, **more)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of the shards 1 and 2 of four; `add` copies others into it."""
    write_numbered_shards(tmp_path / "all", SIZES)
    (tmp_path / "now").mkdir()
    add(tmp_path / "now", 1)
    add(tmp_path / "now", 2)
    return tmp_path / "now"


def add(folder: Path, shard: int) -> None:
    shutil.copy(folder.parent / "all" / f"{shard:04d}.tar", folder)


def expected(folder: Path, make: Any = shuffled, steps: int = STEPS) -> tuple[list[Any], dict[str, Any]]:
    """The batches and the state of a run that nothing disturbs."""
    with loader(folder, make) as made:
        return [next(made) for _ in range(steps)], made.state_dict()


@pytest.mark.parametrize(
    ("method", "make"),
    [
        *(pytest.param("spawn", make, marks=pytest.mark.long) for make in (shuffled, joined)),
        *(("fork", make) for make in (shuffled, joined)),
    ],
)
def test_workers_that_open_the_folder_after_the_trainer_use_its_shards(data: Path, method: str, make: Any) -> None:
    batches, state = expected(data, make)
    with loader(data, make, num_workers=1, workers=sp.Workers(start_method=method)) as made:
        made.state_dict()  # opens the shards here
        add(data, 3)
        assert [next(made) for _ in range(STEPS)] == batches
        assert made.state_dict() == state


def test_fork_server_that_opened_the_folder_earlier_uses_the_trainers_shards(data: Path) -> None:
    with loader(data, num_workers=1, workers=sp.Workers(start_method="fork")) as made:
        wait_for_server(data)
        add(data, 3)
        batches, state = expected(data)
        assert [next(made) for _ in range(STEPS)] == batches
        assert made.state_dict() == state


def wait_for_server(data: Path) -> None:
    """Until the index is there, which the server has made."""
    for _ in range(1000):
        if (data / ".nv-meta/savable.index").exists():
            return
        time.sleep(0.01)
    raise AssertionError("no index")


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_replacement_worker_uses_the_trainers_shards(data: Path, method: str) -> None:
    batches, state = expected(data)
    with loader(data, num_workers=1, workers=sp.Workers(start_method=method)) as made:
        given = [next(made) for _ in range(3)]
        add(data, 3)
        kill_what_makes_batches(made)
        assert [*given, *(next(made) for _ in range(STEPS - 3))] == batches
        assert made.state_dict() == state and made.stats()["restarts"] == 1


def kill_what_makes_batches(made: sp.SavableLoader) -> None:
    """The worker, and the zygote, which would have kept the shards open for the next worker."""
    host: Any = made._run.backend._host  # type: ignore[attr-defined]
    for pid in [host.pid, *started_workers(made)]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("make", [shuffled, joined])
def test_reopened_loader_uses_its_first_shards(data: Path, make: Any, caplog: Any) -> None:
    batches, state = expected(data, make)
    made = loader(data, make)
    given = [next(made) for _ in range(3)]
    made.close()
    add(data, 3)
    assert [*given, *(next(made) for _ in range(STEPS - 3))] == batches
    assert made.state_dict() == state
    assert "1 shards were added since this run started, from 0003.tar on" in caplog.text
    made.close()


def test_new_shard_before_the_others_is_an_error_that_names_it(data: Path) -> None:
    with loader(data) as made:
        next(made)
        made.close()
        add(data, 0)
        with pytest.raises(sp.ShardError, match=r"other shards than the 2 of this run.*\nadded: 0000\.tar"):
            next(made)


@pytest.mark.long
def test_worker_reports_a_new_shard_before_the_others(data: Path) -> None:
    with loader(data, num_workers=1, workers=sp.Workers(start_method="spawn")) as made:
        made.state_dict()
        add(data, 0)
        with pytest.raises(sp.ShardError, match=r"added: 0000\.tar"):
            next(made)


def ranks_at_different_times(data: Path, shard: int) -> list[sp.SavableLoader]:
    """Two ranks, of which the second opens the folder after a shard was added."""
    ranks = [loader(data, ranks=(rank, 2)) for rank in range(2)]
    next(ranks[0])
    add(data, shard)
    return ranks


class OldGroup:
    """A process group of torch before 2.8, which has no method for its store."""


@pytest.mark.parametrize("old", [False, True])
def test_ranks_that_open_the_folder_at_different_times_agree(
    data: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """They have a store in common, as the ranks of torch.distributed have."""
    store = dist.HashStore()
    group = OldGroup() if old else SimpleNamespace(get_group_store=lambda: store)
    if old:
        monkeypatch.setitem(distributed_c10d._world.pg_map, group, ("gloo", store))
    monkeypatch.setattr(Ranks, "_find_group", lambda ranks: group)
    first, second = ranks_at_different_times(data, 3)
    with pytest.raises(
        sp.CheckpointMismatchError, match=r"rank 1 and rank 0 found different shards.*\n  3 here, 2 there"
    ):
        next(second)
    next(first)  # asks no more
    for fresh in [loader(data, ranks=(rank, 2)) for rank in range(2)]:  # another run, later
        next(fresh)


def test_ranks_with_different_numbers_of_earlier_runs_agree(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lived on when the others were replaced has a new group with them."""
    groups = [SimpleNamespace(get_group_store=store) for store in (lambda: old, lambda: new)]
    old, new = dist.HashStore(), dist.HashStore()
    monkeypatch.setattr(Ranks, "_find_group", lambda ranks: groups[0])
    next(loader(data, ranks=(0, 2)))
    monkeypatch.setattr(Ranks, "_find_group", lambda ranks: groups[1])
    _, second = ranks_at_different_times(data, 3)
    with pytest.raises(sp.CheckpointMismatchError, match="rank 1 and rank 0 found different shards"):
        next(second)


class OddStore:
    """A store of a backend, which answers `compare_set` with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def add(self, key: str, number: int) -> int:
        return number

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        raise self._error


@pytest.mark.parametrize("error", [NotImplementedError(), RuntimeError("INTERNAL ASSERT FAILED: Not implemented.")])
def test_ranks_with_a_store_that_cannot_compare_continue(
    data: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Ranks, "_find_group", lambda _: SimpleNamespace(get_group_store=lambda: OddStore(error)))
    next(loader(data, ranks=(0, 2)))


def test_a_store_that_does_not_answer_is_an_error(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = dist.DistNetworkError("Connection was likely closed")
    monkeypatch.setattr(Ranks, "_find_group", lambda _: SimpleNamespace(get_group_store=lambda: OddStore(error)))
    with pytest.raises(dist.DistNetworkError, match="likely closed"):
        next(loader(data, ranks=(0, 2)))


def test_ranks_with_different_exclude_lists_are_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    group = SimpleNamespace(get_group_store=lambda: store)
    monkeypatch.setattr(Ranks, "_find_group", lambda ranks: group)
    lists = [tmp_path / f"{rank}.txt" for rank in range(2)]
    for path, sample in zip(lists, sp.open_dataset(data), strict=False):
        path.write_text(f"{sample.key}\n")

    def of(rank: int) -> sp.SavableLoader:
        def pipeline(lane: sp.Lane) -> custom.Stage:
            return sp.Batcher(sp.TarShardReader(str(data), lane, exclude=lists[rank]), size=2)

        return sp.SavableLoader(pipeline, seed=1, lanes=4, ranks=(rank, 2))

    next(of(0))
    with pytest.raises(sp.CheckpointMismatchError, match="exclude= files"):
        next(of(1))


@pytest.mark.parametrize("epochs", [None, 1])
def test_ranks_with_different_seeds_are_an_error(
    data: Path, monkeypatch: pytest.MonkeyPatch, epochs: int | None
) -> None:
    """Of 192 samples 40 never came and 40 came twice, where each rank of two permuted them by its own seed."""
    store = dist.HashStore()
    group = SimpleNamespace(get_group_store=lambda: store)
    monkeypatch.setattr(Ranks, "_find_group", lambda ranks: group)

    def of(rank: int, seed: int) -> sp.SavableLoader:
        def pipeline(lane: sp.Lane) -> custom.Stage:
            encoder = NumberEncoder()
            encoder.one_to_one = True
            return sp.Batcher(sp.Encode(sp.TarShardReader(str(data), lane, epochs=epochs), encoder), size=2)

        return sp.SavableLoader(pipeline, seed=seed, lanes=4, ranks=(rank, 2))

    next(of(1, 7 + 1))
    with pytest.raises(ValueError, match=r"rank 0 has seed=7, but rank 1 has seed=8. Pass the same seed"):
        next(of(0, 7))
    for other in (3, 4):  # other runs, later, on the same data
        for rank in range(2):
            next(of(rank, other))


def test_ranks_without_a_store_detect_differences_when_merging_states(data: Path) -> None:
    first, second = ranks_at_different_times(data, 3)
    next(second)
    with pytest.raises(sp.CheckpointMismatchError):
        sp.merge_states([first.state_dict(), second.state_dict()])


def skips_all(error: sp.SavableError) -> bool:
    return True


def skips_all_here(error: sp.SavableError) -> bool:
    """The same function as another process has it."""
    return True


@pytest.mark.parametrize("decides", [("raise", "raise"), ("skip", "skip"), (skips_all, skips_all_here)])
def test_later_process_reads_the_runs_first_shards(data: Path, decides: Any) -> None:
    pinned: dict[str, bytes] = {}
    first, second = decides
    began_with = sp.TarShardReader(data, sp.Lane(worker=WorkerContext(pinned=pinned)), on_error=first).population
    add(data, 3)
    assert (
        sp.TarShardReader(data, sp.Lane(worker=WorkerContext(pinned=pinned)), on_error=second).population
        == began_with
        == 21
    )
