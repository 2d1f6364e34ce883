"""Saving and loading: at any step, before the first and after the last, again and again, joined and reached back."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.errors import StateError
from savable_pipeline.run.loader.position import MAX_LAG
from savable_pipeline.stages.batch_difference import digest
from tests.support.processes import descendants, kill, wait_until_gone, workers
from tests.support.streams import next_hashes, through_a_file
from tests.support.toy_faults import number_pipeline
from tests.support.toy_pipelines import numbers, toy_pipeline


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])))


@pytest.fixture
def finite(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=1)


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 12, "num_workers": num_workers, **settings})


def resumed(pipeline: Any, state: dict[str, Any], num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    fresh = loader(pipeline, num_workers, **settings)
    fresh.load_state_dict(through_a_file(state))
    return fresh


# Before the first batch.


def test_a_state_before_the_first_batch_starts_nothing(pipeline: Any, tmp_path: Path) -> None:
    own = loader(pipeline, 2)
    threads, children = threading.active_count(), descendants(os.getpid())
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    state = own.state_dict()
    assert descendants(os.getpid()) == children and threading.active_count() == threads
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before
    opened = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(tmp_path)) and path.endswith(".tar")]
    with resumed(pipeline, state, 1) as fresh:
        assert next_hashes(own, 5) == next_hashes(fresh, 5) == next_hashes(loader(pipeline), 5)
    own.close()


def test_a_state_of_a_resumed_loader_before_its_first_batch_is_the_state_it_loaded(pipeline: Any) -> None:
    own = loader(pipeline)
    next_hashes(own, 17)
    state = own.state_dict()
    assert resumed(pipeline, resumed(pipeline, state, 2).state_dict()).state_dict() == state


# In the middle.


def test_a_state_after_each_batch_resumes_with_the_next(pipeline: Any) -> None:
    with loader(pipeline, 2) as own:
        found, states = [], []
        for _, batch in zip(range(18), own, strict=False):
            found.append(digest(batch))
            states.append(own.state_dict())
    for step, state in enumerate(states[:15], 1):
        assert next_hashes(resumed(pipeline, state), 3) == found[step : step + 3]


def test_state_within_a_fan_out_resumes_with_the_remaining_parts(make_shards: Any) -> None:
    """Every sample has three parts and a batch has one, so two of three states lie inside a sample."""
    pipeline = partial(toy_pipeline, str(make_shards([40])), buffer=None, pack=None, size=1, skip=0, fan_out=1)
    own = loader(pipeline, lanes=1)
    found, states = [], []
    for _, batch in zip(range(9), own, strict=False):
        found.append(batch["items"][0])
        states.append(own.state_dict())
    assert [item["id"] for item in found[:3]] == [found[0]["id"]] * 3
    for step in range(1, 9):
        batch = next(resumed(pipeline, states[step - 1], lanes=1))
        assert str(batch["items"][0]) == str(found[step])


def test_state_does_not_change_when_the_loader_continues(pipeline: Any) -> None:
    own = loader(pipeline)
    next_hashes(own, 3)
    state = own.state_dict()
    kept = dict(state)
    next_hashes(own, 3)
    assert state == kept != own.state_dict()


def test_a_state_is_a_flat_dict_of_small_plain_values(pipeline: Any) -> None:
    own = loader(pipeline)
    next_hashes(own, 3)
    state = own.state_dict()
    assert list(state) == [
        "order",
        "state",
        "lanes",
        "epoch",
        "slot",
        "fingerprint",
        "facts",
        "acknowledge",
        *(f"lane_{i:05d}" for i in range(12)),
    ]
    assert {type(value) for value in state.values()} == {int, bytes}
    assert b"" not in state.values()  # torch.load refuses it
    assert through_a_file(state) == state


def test_save_state_and_restore_state_are_the_same_two_methods(pipeline: Any) -> None:
    own, fresh = loader(pipeline), loader(pipeline)
    next_hashes(own, 5)
    assert own.save_state() == own.state_dict()
    fresh.restore_state(own.save_state())
    assert next_hashes(fresh, 5) == next_hashes(own, 5)


def test_live_list_in_a_stages_state_is_copied(make_shards: Any) -> None:
    """As the last stage of a finite pipeline, whose next batch is made to know that there is one."""
    pipeline = partial(pairing_pipeline, str(make_shards([60])))
    own = loader(pipeline, lanes=2)
    expected = [str(batch) for batch in loader(pipeline, lanes=2)]
    assert len(expected) > 10
    for step in range(len(expected)):
        assert [str(batch) for batch in resumed(pipeline, own.state_dict(), lanes=2)] == expected[step:]
        next(own)


class OverlappingPairs(custom.BatchStage):
    """Gives each item with the one before it, and returns as its state the list that it goes on changing."""

    ref = ()

    def __init__(self, source: custom.Stage) -> None:
        super().__init__(source)
        self.held: list[Any] = []

    def __next__(self) -> Any:
        item = next(self.source)
        pair = [self.source.fetch(ref) for ref in self.held] + [item]
        self.held.append(self.source.ref)
        del self.held[:-1]
        return pair

    def save_state(self) -> Any:
        return {"held": self.held, "source": self.source.save_state()}

    def restore_state(self, state: Any) -> None:
        self.held = [tuple(ref) for ref in state["held"]]
        self.source.restore_state(state["source"])


def pairing_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    from tests.support.toy_faults import NumberEncoder

    return OverlappingPairs(sp.Encode(sp.TarShardReader(shards, lane, epochs=1), NumberEncoder()))


# Epochs.


def test_state_after_the_last_batch_starts_the_next_epoch(finite: Any) -> None:
    alone = loader(finite)
    first, second = next_hashes(alone, 1000), next_hashes(alone, 1000)
    with loader(finite, 2) as own:
        batches = iter(own)
        assert next_hashes(batches, len(first)) == first
        before = own.state_dict()
        assert next(batches, None) is None
        assert own.state_dict() == before
    assert (before["epoch"], before["slot"]) == (1, 0)
    with resumed(finite, before, 2) as fresh:
        assert fresh.epoch == 1
        assert next_hashes(fresh, 1000) == second


def test_the_second_epoch_differs_from_the_first_and_resumes(finite: Any) -> None:
    alone = loader(finite)
    first, second, third = (next_hashes(alone, 1000) for _ in range(3))
    assert len({*first, *second, *third}) == len(first) + len(second) + len(third)
    with loader(finite) as own:
        next_hashes(own, 1000)
        assert next_hashes(own, 5) == second[:5]
        state = own.state_dict()
    with resumed(finite, state, 2) as fresh:
        assert next_hashes(fresh, 1000) == second[5:]
        assert next_hashes(fresh, 1000) == third


# Loading late.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_inside_a_running_loop_takes_effect_with_the_next_batch(pipeline: Any, num_workers: int) -> None:
    expected = next_hashes(loader(pipeline), 12)
    found: list[str] = []
    with loader(pipeline, num_workers) as own:
        for batch in own:
            found.append(digest(batch))
            if len(found) == 3:
                state = own.state_dict()
            if len(found) == 8:
                own.load_state_dict(state)
            if len(found) == 14:
                break
    assert found == expected[:8] + expected[3:9]


def test_loading_into_a_finished_loader_continues_from_the_state(finite: Any) -> None:
    own = loader(finite)
    next_hashes(own, 7)
    state = own.state_dict()
    rest = next_hashes(own, 1000)
    own.load_state_dict(state)
    assert own.epoch == 0
    assert [digest(next(own)), *next_hashes(own, 1000)] == rest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_failed_load_does_not_move_the_loader(pipeline: Any, num_workers: int) -> None:
    expected = next_hashes(loader(pipeline), 12)
    with loader(pipeline, num_workers) as own:
        assert next_hashes(own, 4) == expected[:4]
        good = own.state_dict()
        other = loader(pipeline, seed=4).state_dict()
        half = {name: value for name, value in good.items() if name != "lane_00009"}
        broken = {**good, "lane_00009": good["lane_00009"][:-1]}
        for state, error in [
            (other, sp.CheckpointMismatchError),
            (half, sp.CheckpointMismatchError),
            (broken, StateError),
            ({}, StateError),
        ]:
            with pytest.raises(error):
                own.load_state_dict(state)
            assert own.state_dict() == good
        assert next_hashes(own, 8) == expected[4:]


# Looking back.


def test_lag_returns_an_earlier_state(pipeline: Any) -> None:
    with loader(pipeline, 2, lanes=4) as own:
        states = [own.state_dict()]
        for step in range(1, 24):
            next(own)
            states.append(own.state_dict())
            for lag in range(min(step, MAX_LAG) + 1):
                assert own.state_dict(lag=lag) == states[step - lag]


def test_lag_of_a_rank_counts_its_own_batches(pipeline: Any) -> None:
    own = loader(pipeline, ranks=(1, 3))
    states = [own.state_dict()]
    for _ in range(9):
        next(own)
        states.append(own.state_dict())
    assert [own.state_dict(lag=9 - step) for step in range(10)] == states


@pytest.mark.parametrize("lag", [-1, 3, MAX_LAG + 1])
def test_lag_beyond_the_yielded_batches_is_an_error(pipeline: Any, lag: int) -> None:
    own = loader(pipeline)
    next_hashes(own, 2)
    with pytest.raises(ValueError, match=f"lag={lag}: at most 2 batches can be taken back"):
        own.state_dict(lag=lag)


def test_lag_does_not_reach_before_a_load_or_the_epoch(finite: Any) -> None:
    own = loader(finite)
    next_hashes(own, 1000)
    for given, begin in ((0, lambda: iter(own)), (3, lambda: own.load_state_dict(own.state_dict()))):
        next_hashes(own, given)
        begin()
        state = own.state_dict()
        assert own.state_dict(lag=1) == own.state_dict(lag=MAX_LAG) == state, "none was given since: the start itself"
        following = next_hashes(own, 1)
        assert (
            next_hashes(resumed(finite, own.state_dict(lag=1)), 1)
            == next_hashes(resumed(finite, state), 1)
            == following
        )
        with pytest.raises(ValueError, match=r"lag=2: at most 1 batches .* Save after as many batches as"):
            own.state_dict(lag=2)


def test_lag_after_the_last_batch_reaches_into_its_epoch(finite: Any) -> None:
    own = loader(finite)
    batches, states = iter(own), [own.state_dict()]
    for _ in range(len(next_hashes(loader(finite), 1000))):
        next(batches)
        states.append(own.state_dict())
    last = len(states) - 1
    assert states[last]["epoch"] == 1
    assert [own.state_dict(lag=lag) for lag in range(last)] == states[:0:-1]
    assert (own.state_dict(lag=last)["epoch"], own.state_dict(lag=last)["slot"]) == (0, 0)
    assert next(batches, None) is None
    assert own.state_dict(lag=1) == own.state_dict() == states[last]


def test_a_trainer_that_fetches_one_ahead_and_saves_with_lag_1_resumes_with_the_next(finite: Any) -> None:
    """As accelerate and Lightning do: they know at the last batch that it is the last."""
    alone = loader(finite)
    expected = next_hashes(alone, 1000) + next_hashes(alone, 3)
    with loader(finite) as own:
        states, trained = [own.state_dict(lag=1)], []
        for _ in range(2):
            batches = iter(own)
            fetched = next(batches, None)
            while fetched is not None and len(trained) < len(expected) - 1:
                batch, fetched = fetched, next(batches, None)
                trained.append(digest(batch))
                states.append(own.state_dict(lag=1))
    assert trained == expected[:-1]
    for step, state in enumerate(states):
        assert next_hashes(resumed(finite, state), 1) == expected[step : step + 1]


# The states of several ranks.


def rank_states(pipeline: Any, world_size: int, steps: int) -> list[dict[str, Any]]:
    states = []
    for rank in range(world_size):
        own = loader(pipeline, ranks=(rank, world_size))
        next_hashes(own, steps)
        states.append(own.state_dict())
    return states


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_the_joined_states_of_some_ranks_resume_with_any_other_number_of_ranks(
    pipeline: Any, before: int, after: int
) -> None:
    expected = next_hashes(loader(pipeline), 5 * before + 2 * after)[5 * before :]
    joined = sp.merge_states(through_a_file(state) for state in rank_states(pipeline, before, 5))
    found = [next_hashes(resumed(pipeline, joined, ranks=(rank, after)), 2) for rank in range(after)]
    slots = range(5 * before, 5 * before + 2 * after)
    assert expected == [found[slot % after][i // after] for i, slot in enumerate(slots)]


def test_a_ranks_own_state_is_enough_for_the_same_rank(pipeline: Any) -> None:
    expected = next_hashes(loader(pipeline), 24)
    for rank, state in enumerate(rank_states(pipeline, 3, 4)):
        assert list(state)[8:] == [f"lane_{lane:05d}" for lane in range(rank, 12, 3)]
        assert next_hashes(resumed(pipeline, state, ranks=(rank, 3)), 4) == expected[12 + rank :: 3]


def test_state_with_missing_lanes_names_them(pipeline: Any) -> None:
    states = rank_states(pipeline, 4, 2)
    with pytest.raises(sp.CheckpointMismatchError, match=r"has lanes 0, 4, 8 of 12, .* needs lane 1\. .*merge"):
        loader(pipeline).load_state_dict(states[0])
    joined = sp.merge_states(states[:2])
    with pytest.raises(sp.CheckpointMismatchError, match=r"has lanes 0-1, 4-5, 8-9 of 12, .* needs lane 2"):
        loader(pipeline).load_state_dict(joined)
    assert next_hashes(resumed(pipeline, joined, ranks=(1, 4)), 2) == next_hashes(loader(pipeline), 16)[9::4]


def test_states_saved_at_different_steps_are_rejected_by_name(pipeline: Any) -> None:
    early, late = rank_states(pipeline, 2, 3)[0], rank_states(pipeline, 2, 20)[1]
    with pytest.raises(sp.CheckpointMismatchError, match="differ in slot: 40 and 6; save all at one step"):
        sp.merge_states([early, late])
    for mixed in ({**early, **late}, {**late, **early}):  # as a tool that knows nothing of slots would join them
        with pytest.raises(sp.CheckpointMismatchError, match="Load states of one step"):
            loader(pipeline).load_state_dict(mixed)


def test_exchanged_lanes_are_detected(pipeline: Any) -> None:
    state = loader(pipeline).state_dict()
    with pytest.raises(
        sp.CheckpointMismatchError, match="lane_00001 is at batch 0 of lane 2, epoch 0, instead of batch 0 of lane 1"
    ):
        loader(pipeline).load_state_dict({**state, "lane_00001": state["lane_00002"]})


def test_saving_sends_no_request_to_workers(make_shards: Any) -> None:
    """With all workers dead the state is the one before."""
    pipeline = partial(number_pipeline, str(make_shards([60])))
    with loader(pipeline, 2) as own:
        next_hashes(own, 5)
        state = own.state_dict()
        pids = workers(own)
        for pid in pids:
            kill(pid)
        wait_until_gone(pids)
        assert len(pids) == 2
        assert own.state_dict() == state


def test_loading_logs_nothing_when_nothing_differs(pipeline: Any, caplog: pytest.LogCaptureFixture) -> None:
    own = loader(pipeline)
    next_hashes(own, 3)
    with caplog.at_level(logging.DEBUG):
        resumed(pipeline, own.state_dict())
    assert not caplog.records


# With another batch size.


@pytest.mark.parametrize(
    ("lanes", "pack", "drop_last", "num_workers"),
    [
        (3, "best_fit", True, 2),
        (3, None, False, 0),
        pytest.param(7, None, True, 0, marks=pytest.mark.landing),
        pytest.param(7, "best_fit", False, 2, marks=pytest.mark.landing),
    ],
)
def test_changed_batch_sizes_keep_each_lanes_order_and_yield_each_sample_once(
    make_shards: Any, lanes: int, pack: str | None, drop_last: bool, num_workers: int
) -> None:
    settings: dict[str, Any] = {"epochs": 1, "skip": 0, "pack": pack, "drop_last": drop_last}
    shards = str(make_shards([120, 7, 180]))
    items = [list(map(ids, toy_pipeline(shards, sp.Lane(lane, lanes, 3), size=1, **settings))) for lane in range(lanes)]
    found: list[list[Any]] = [[] for _ in range(lanes)]
    state, slot = None, 0
    for size, steps in ((2, lanes + 2), (3, lanes - 1), (1, lanes + 3), (2, 1), (1, 1000)):
        with loader(partial(toy_pipeline, shards, size=size, **settings), num_workers, lanes=lanes) as own:
            if state is not None:
                own.load_state_dict(through_a_file(state), allow={"batch_size"})
            for _, batch in zip(range(steps), own, strict=False):
                assert len(batch["items"]) == size
                found[slot % lanes] += [ids(batch, item) for item in range(size)]
                slot += 1
            state = own.state_dict()
    for lane in range(lanes):
        assert found[lane] == items[lane][: len(found[lane])]
        assert len(items[lane]) - len(found[lane]) <= 20  # after the last round that every lane can fill
    given = [number for lane in found for item in lane for number in item]
    whole = Counter(number for lane in items for item in lane for number in item)
    assert len(given) > 250 and Counter(given) <= whole == Counter({n: 1 if n % 5 else 3 for n in range(307)})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epoch_with_less_than_a_larger_batch_remaining_ends(make_shards: Any, num_workers: int) -> None:
    small, large = (
        partial(toy_pipeline, str(make_shards([9])), size=size, epochs=1, drop_last=True, pack=None, skip=0, fan_out=0)
        for size in (2, 5)
    )
    order = [number for batch in list(loader(small, lanes=1)) for number in numbers(batch)]
    for steps, epoch in ((1, 0), (2, 0), (3, 1)):
        with loader(small, lanes=1) as own:
            next_hashes(own, steps)
            state = own.state_dict()
        with loader(large, num_workers, lanes=1) as fresh:
            fresh.load_state_dict(state, allow={"batch_size"})
            found = numbers(next(fresh))
            assert fresh.epoch == epoch and next(fresh, None) is None
            assert epoch or found[:4] == order[2 * steps : 2 * steps + 5][:4]


def ids(batch: Any, item: int = 0) -> list[int]:
    """The numbers of the samples in an item of a batch."""
    return numbers({"items": [batch["items"][item]]})
