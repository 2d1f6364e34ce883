"""A loader that Load the state before, where the ledger has this run's batches already: its state was not loaded."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.run.ledger.test_ledger import folder, loader, meeting, next_of_each, shards
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline

__all__ = ["folder", "meeting", "shards"]  # fixtures


@pytest.fixture
def make(shards: str, folder: Path) -> Callable[..., sp.SavableLoader]:
    return partial(loader, partial(toy_pipeline, shards), folder)


def expect_forgotten(own: sp.SavableLoader, saved_at: int, last: int) -> None:
    with pytest.raises(
        sp.SavableError,
        match=rf"batches up to slot {last} of epoch 0.* saved at slot {saved_at} of epoch 0. "
        "Load the state before the first batch, or set another ledger=",
    ):
        next(own)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "are repeated now" in record.getMessage()]


@pytest.mark.parametrize("save", [sp.SavableLoader.state_dict, sp.SavableLoader.global_state_dict])
def test_a_state_that_was_saved_and_not_loaded_is_an_error(make: Any, folder: Path, save: Any) -> None:
    own = make()
    next_hashes(own, 3)
    save(own)
    next_hashes(own, 1)
    state = save(own)
    next_hashes(own, 3)
    again = make()
    for _ in range(2):
        expect_forgotten(again, 4, 6)
    assert len(list(folder.iterdir())) == 1
    again.load_state_dict(state)
    next_hashes(again, 3)
    assert [given.batch.slot for given in LedgerFiles(folder).batches() if not given.lost] == [0, 1, 2, 3, 4, 5, 6]


def test_last_slot_and_last_state_of_all_starts_are_named(make: Any) -> None:
    own = make()
    next_hashes(own, 5)
    state = own.state_dict()
    next_hashes(own, 4)
    own = make()
    own.load_state_dict(state)
    next_hashes(own, 1)
    expect_forgotten(make(), 5, 8)


def test_with_epoch_slots_a_saved_slot_counts_from_the_start_of_the_run(make: Any) -> None:
    own = make(epoch_slots=12)
    next_hashes(own, 1000), next_hashes(own, 2)
    own.state_dict()
    next_hashes(own, 1)
    expect_forgotten(make(epoch_slots=12), 14, 14)


def test_state_saved_by_a_trainer_counts(make: Any) -> None:
    batches = TrainerLoader(make())
    ahead = iter(batches)
    next(ahead), next(ahead)
    batches.state_dict()
    next(ahead)
    expect_forgotten(make(), 2, 2)


def test_restart_without_a_saved_state_is_a_warning(make: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = make()
    own.state_dict()  # of the start, which needs no loading
    next_hashes(own, 4)
    assert warned(caplog) == []
    again = make()
    next_hashes(again, 2)
    (told,) = warned(caplog)
    assert f"{folder} has this run's batches up to slot 3 of epoch 0, which are repeated now" in told
    assert "stop and load it before the first batch" in told
    again.close()
    next_hashes(again, 1)
    assert len(warned(caplog)) == 1


def test_run_killed_during_its_first_save_may_restart(
    make: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid = os.fork()
    if not pid:
        try:
            own = make()
            next_hashes(own, 2)
            own.state_dict()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(LedgerFiles(folder).batches())) == 2
    next_hashes(make(), 1)
    assert len(warned(caplog)) == 1


def test_state_saved_before_close_counts(make: Any) -> None:
    with make() as own:
        next_hashes(own, 2)
        own.state_dict()
    expect_forgotten(make(), 2, 1)


def test_a_save_that_failed_does_not_count(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="full"), make() as own:
        next_hashes(own, 2)
        own.state_dict()
        raise OSError("the disk is full")
    next_hashes(make(), 1)
    assert len(warned(caplog)) == 1


def test_loading_skipping_or_going_back_is_not_a_forgotten_state(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    own = make()
    start = own.state_dict()
    next_hashes(own, 2)
    own.state_dict()
    next_hashes(own, 2)
    own.load_state_dict(start)
    next_hashes(own, 1)
    loaded, skipped = make(), make()
    loaded.load_state_dict(start)
    next_hashes(loaded, 1)
    skipped.skip(4)
    next_hashes(skipped, 1)
    assert warned(caplog) == []


@pytest.mark.usefixtures("meeting")
def test_ranks_that_communicate_raise_together_and_warn_once(
    make: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = [make(ranks=(rank, 2)) for rank in range(2)]
    next_of_each(first)
    with caplog.at_level(logging.WARNING):
        assert next_of_each([make(ranks=(rank, 2)) for rank in range(2)]) == ["slot 0", "slot 1"]
    assert len(warned(caplog)) == 1
    for own in first:
        own.state_dict()
    next_of_each(first)
    files = len(list(folder.iterdir()))
    one, other = next_of_each([make(ranks=(rank, 2)) for rank in range(2)])
    assert one == other and one.startswith("rank 0: ") and "saved at slot 2 of epoch 0" in one and "rank 1" not in one
    assert len(list(folder.iterdir())) == files


def test_ledger_of_another_run_is_rejected(make: Any, shards: str, folder: Path) -> None:
    own = make()
    next_hashes(own, 2)
    own.state_dict()
    next_hashes(own, 1)
    with pytest.raises(sp.SavableError, match="has the ledger of seed=3"):
        next(sp.SavableLoader(partial(toy_pipeline, shards), seed=4, lanes=12, ledger=folder))
