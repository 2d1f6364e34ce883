"""A loader gives its batches in the process that made it: copies in other processes would give each batch again."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.device import OnDevice
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline

LANES = 4


@pytest.fixture
def make(make_shards: Any) -> Any:
    return partial(sp.SavableLoader, partial(toy_pipeline, str(make_shards([40]))), seed=3, lanes=LANES)


class FromLoader(IterableDataset[Any]):
    """Five hashes of batches, of what `give` gives in the process that iterates."""

    def __init__(self, give: Callable[[], Any]) -> None:
        super().__init__()
        self.give = give

    def __iter__(self) -> Iterator[str]:
        batches = iter(self.give())
        return (digest(next(batches)) for _ in range(5))


def through_workers(give: Callable[[], Any], workers: int = 2) -> list[str]:
    context = "fork" if workers else None
    batches = iter(DataLoader(FromLoader(give), batch_size=None, num_workers=workers, multiprocessing_context=context))
    try:
        return list(batches)
    finally:
        if workers:
            batches._shutdown_workers()  # type: ignore[attr-defined]  # none is left for the next test to inherit


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_built_in_a_torch_worker_is_rejected(make: Any, workers: int) -> None:
    with pytest.raises(sp.SavableError, match=f"was created in worker 0 of the {workers} of torch's DataLoader"):
        through_workers(make, workers)


@pytest.mark.parametrize(
    ("wrap", "begun", "settings"),
    [
        (lambda loader: loader, False, {"ranks": (0, 1)}),
        (TrainerLoader, True, {}),
        (lambda loader: OnDevice(loader, "cpu"), True, {"ranks": (0, 1)}),
    ],
)
def test_loader_inside_torchs_workers_is_rejected_also_if_already_started(
    make: Any, wrap: Any, begun: bool, settings: dict[str, int]
) -> None:
    loader = make(**settings)
    if begun:
        next(loader)
    with pytest.raises(sp.SavableError, match="created outside of worker 0 of the 2 of torch"):
        through_workers(lambda: wrap(loader))


def test_torch_workers_with_explicit_ranks_yield_each_batch_once(make: Any) -> None:
    def share() -> Any:
        info: Any = get_worker_info()
        return make(ranks=(info.id, info.num_workers))

    assert through_workers(share) == next_hashes(make(), 10)


def test_torch_dataloader_without_workers_may_wrap_a_loader(make: Any) -> None:
    loader = make()
    assert through_workers(lambda: loader, 0) == next_hashes(make(), 5)


def in_a_fork(work: Callable[[], Any]) -> str:
    """What a forked process raises, or ""."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(writer, "".join(traceback.format_exception_only(error)).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:  # noqa: PTH123  # a pipe
        found = told.read().decode()
    os.waitpid(pid, 0)
    return found


@pytest.mark.parametrize(
    ("settings", "begun"), [({}, False), ({"num_workers": 1}, True), ({"ranks": (0, 1)}, True)], ids=str
)
def test_forked_process_may_not_iterate_its_parents_loader(make: Any, settings: dict[str, int], begun: bool) -> None:
    expected = next_hashes(make(), 6)
    with make(**settings) as loader:
        found = next_hashes(loader, 3) if begun else []
        told = in_a_fork(lambda: next(iter(loader)))
        assert f"SavableError: this loader was created in process {os.getpid()} but is used in its fork" in told
        assert "SavableError" in in_a_fork(lambda: loader.skip(LANES))
        assert found + next_hashes(loader, 6 - len(found)) == expected  # the parent's goes on


def test_forked_process_may_inspect_its_parents_loader_and_build_its_own(make: Any) -> None:
    loader = make()
    next(loader)
    state = loader.state_dict()

    def work() -> None:
        assert loader.state_dict() == state
        own = make()
        own.load_state_dict(state)
        assert next_hashes(own, 2) == next_hashes(make(), 3)[1:]

    assert in_a_fork(work) == ""
