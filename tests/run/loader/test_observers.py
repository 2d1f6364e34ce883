"""The books of a run: what observers are told of, what they may refuse, and that a run knows none of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader import run as run_module
from savable_pipeline.run.loader.position import BatchStep, Observer, Position, Repeater
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.savable_loader import run_of
from tests.support.fake_backend import FakeBackend, fake_run

BOOKS = {"acknowledgements", "ledger_keeper", "rows_in_flight", "stats"}


class Count(Observer):
    """Counts the batches, in an entry of its own; lists what it is told."""

    def __init__(self) -> None:
        self.batches, self.told = 0, list[str]()
        self.refuses: set[int] = set()  # the numbers of batches that it refuses once

    def on_batch(self, step: BatchStep) -> None:
        if step.number in self.refuses:
            self.refuses.remove(step.number)
            raise OSError("the disk is full")
        self.batches += 1
        step.batch = (*step.batch, "counted")

    def on_skip(self, position: Position) -> None:
        self.told.append(f"end of epoch {position.epoch}" if position.is_over else f"skip at {position.slot}")

    def on_save(self, position: Position, state: MutableMapping[str, Any], lag: int) -> None:
        state["counted"] = position.history.batch_count - lag

    def on_load(self, position: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        if state is not None and "counted" not in state:
            raise sp.CheckpointMismatchError("the state has no count. Load one that was saved with it.")
        return None if state is None else lambda: setattr(self, "batches", state["counted"])

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([20]))


def counted_run(shards: str, capacity: int = 0, **settings: Any) -> tuple[Run, Count]:
    run, count = fake_run(FakeBackend([3, 3], capacity), shards, lanes=2, epochs=1, **settings), Count()
    run.observers.append(count)
    return run, count


def test_observers_are_called_for_each_step_in_order(shards: str) -> None:
    run, count = counted_run(shards)
    assert next(run) == (0, 0, 0, "counted")
    run.skip(2)
    assert [next(run), next(run), next(run)] == [(0, 1, 1, "counted"), (0, 0, 2, "counted"), (0, 1, 2, "counted")]
    with pytest.raises(StopIteration):
        next(run)
    run.close()
    assert count.batches == 4 and count.told == ["skip at 1", "end of epoch 0", "close"]


@pytest.mark.parametrize("capacity", [0, 3])
def test_batch_rejected_by_an_observer_is_repeated_and_the_state_stays(shards: str, capacity: int) -> None:
    run, count = counted_run(shards, capacity)
    expected = [(0, slot % 2, slot // 2, "counted") for slot in range(6)]
    count.refuses = {0, 3, 5}
    found = []
    while len(found) < 6:
        before = run.state_dict()
        try:
            found.append(next(run))
        except OSError:
            assert all(run.state_dict()[name] == before[name] for name in ("epoch", "slot", "counted"))
    assert found == expected and not count.refuses


def test_observers_have_their_own_state_entries_and_error_messages(shards: str) -> None:
    run, _ = counted_run(shards)
    next(run), next(run)
    state = run.state_dict()
    resumed, count = counted_run(shards)
    resumed.load_state_dict(state)
    assert count.batches == 2 and next(resumed) == (0, 0, 1, "counted")
    before = resumed.state_dict()
    del state["counted"]
    with pytest.raises(sp.CheckpointMismatchError, match="the state has no count"):
        resumed.load_state_dict(state)
    assert resumed.state_dict() == before and count.batches == 3


def test_a_state_that_an_observer_rejects_changes_nothing(make_shards: Any) -> None:
    shards = str(make_shards([12, 12]))
    pipeline = sp.read(shards).map(_key).batch(2)
    with sp.SavableLoader(pipeline, seed=1, lanes=2) as loader:
        next(loader)
        loader.reconfigure(exclude=[sample.key for sample in sp.open_dataset(shards)][:3])
        state = loader.state_dict()
    with sp.SavableLoader(pipeline, seed=1, lanes=2, acknowledge=True) as other:
        next(other)
        run, before = run_of(other), other.state_dict()
        facts, fingerprint = run.local.facts, run.states.packed
        run.observers.append(Count())
        with pytest.raises(sp.CheckpointMismatchError, match="the state has no count"):
            other.load_state_dict(state)
        assert run.local.facts == facts and run.states.packed == fingerprint
        run.observers.pop()
        assert other.state_dict() == before


def test_an_entry_of_rows_in_flight_that_is_missing_is_rejected_by_its_sentence(shards: str) -> None:
    with sp.SavableLoader(sp.read(shards).map(_key).batch(2), seed=1, lanes=2, acknowledge=True) as loader:
        next(loader)
        state = loader.state_dict()
        del state["flight_00001"]
        with pytest.raises(sp.CheckpointMismatchError, match="lane_00001, but no flight_00001"):
            loader.load_state_dict(state)


def _key(sample: sp.Sample) -> str:
    return sample.key


def test_run_and_stepper_name_no_observer() -> None:
    folder = Path(run_module.__file__ or "").parent
    for name in ("run", "prefetcher", "epoch_end", "position", "states"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {module.rpartition(".")[2] for module in imported} & BOOKS, name


def test_observers_have_five_hooks_and_one_kind_repeats_batches() -> None:
    hooks = {name for name in vars(Observer) if not name.startswith("_")}
    assert hooks == {"on_batch", "on_skip", "on_save", "on_load", "close"}
    assert Repeater.__subclasses__() == [RowsInFlight]


def test_a_position_has_few_members() -> None:
    assert len([name for name in vars(Position) if not name.startswith("_")]) <= 25
