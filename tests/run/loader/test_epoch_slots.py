"""`epoch_slots`: an endless run in epochs that have a length; they change nothing of what comes."""

from __future__ import annotations

from functools import partial
from itertools import chain, islice
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import assert_exact_resume, sorted_by_slot
from tests.support.processes import workers
from tests.support.streams import next_hashes, through_a_file
from tests.support.toy_numbers import Numbers, counted_pipeline


@pytest.fixture
def endless(make_shards: Any) -> Any:
    """An endless run over 100 samples, with a shuffle buffer."""
    return partial(buffered, str(make_shards([60, 40])))


def buffered(shards: str, lane: sp.Lane) -> custom.Stage:
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=7)
    return sp.Batcher(sp.Encode(samples, Numbers()), size=2)


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    given = {"seed": 3, "lanes": 6, "num_workers": num_workers, "epoch_slots": 12, **settings}
    return sp.SavableLoader(pipeline, **given)


def without_epochs(pipeline: Any, n: int) -> list[Any]:
    return next_hashes(loader(pipeline, epoch_slots=None), n)


@pytest.mark.parametrize(("num_workers", "takes_all"), [(0, True), (2, False)])
def test_epochs_by_slots_join_to_the_endless_run(endless: Any, num_workers: int, takes_all: bool) -> None:
    """Trainers ask for one batch more, or take `len(loader)` and never do."""
    with loader(endless, num_workers) as own:
        passes = [next_hashes(own if takes_all else islice(own, len(own)), 1000) for _ in range(3)]
    assert [len(one) for one in passes] == [len(own)] * 3 == [12] * 3
    assert [*chain(*passes)] == without_epochs(endless, 36)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_slots_of_an_epoch_are_shared_by_the_ranks(endless: Any, world_size: int) -> None:
    ranks = [loader(endless, ranks=(rank, world_size)) for rank in range(world_size)]
    assert [len(own) for own in ranks] == [12 // world_size] * world_size
    steps = [list(zip(*ranks, strict=True)) for _ in range(2)]
    assert [len(epoch) for epoch in steps] == [12 // world_size] * 2
    found = [digest(batch) for epoch in steps for step in epoch for batch in step]
    assert found == without_epochs(endless, 24)


def test_every_interruption_resumes_exactly_across_epochs_workers_and_ranks(endless: Any) -> None:
    assert_exact_resume(
        endless, lanes=6, steps=14, workers=(0, 1), world_sizes=(1, 2, 3), chains=1, after=1, epoch_slots=6
    )


def test_loop_body_sees_its_epoch_and_batch(endless: Any) -> None:
    own = loader(endless)
    for epoch in range(3):
        seen = [(own.epoch, own.trace().slot) for _ in own]
        assert seen == [(epoch, 12 * epoch + slot) for slot in range(12)]
        assert own.epoch == epoch + 1
    assert next(own, None) is None and next(own, None) is None, "an iterator that has ended stays so"


def test_state_with_epoch_slots_equals_the_endless_runs_and_fits_any_length(endless: Any) -> None:
    own, plain = loader(endless), loader(endless, epoch_slots=None)
    next_hashes(islice(own, 12), 1000), next_hashes(plain, 12)
    state = own.state_dict()
    assert state == plain.state_dict()
    expected = without_epochs(endless, 36)[12:]
    for epoch_slots, lengths in [(12, [12, 12]), (24, [12, 12]), (None, [24]), (6, [6, 6, 6, 6])]:
        again = loader(endless, epoch_slots=epoch_slots)
        again.load_state_dict(through_a_file(state))
        found = [next_hashes(again, 24 if epoch_slots is None else length) for length in lengths]
        assert [*chain(*found)] == expected
        if epoch_slots == 24:  # the loader stood in the middle of its first epoch
            assert again.epoch == 1


@pytest.mark.parametrize("cut", [5, 11, 12, 13])
def test_one_batch_ahead_of_the_trainer_the_state_is_right_at_the_end_of_an_epoch(endless: Any, cut: int) -> None:
    own, state = loader(endless), {}
    for epoch in range(2):
        taken = iter(own)
        ahead = next(taken)
        for step in range(12):
            ahead = next(taken, None)
            if 12 * epoch + step + 1 == cut:
                state = own.state_dict(lag=0 if ahead is None else 1)
    again = loader(endless)
    again.load_state_dict(state)
    assert next_hashes(again, 5) == without_epochs(endless, 30)[cut : cut + 5][: 12 - cut % 12]


def test_load_at_an_epoch_start_repeats_no_earlier_batch(endless: Any) -> None:
    own = loader(endless)
    next_hashes(own, 1000)
    after = own.state_dict()
    iter(own)
    assert own.state_dict(lag=1) == after
    with pytest.raises(ValueError, match="none has been returned since"):
        own.trace()


def test_with_restart_each_iteration_is_the_first_epoch(endless: Any) -> None:
    own = loader(endless, 1, on_iter="restart")
    expected = without_epochs(endless, 12)
    with own:
        assert next_hashes(own, 1000) == expected
        state = own.state_dict()
        assert (state["slot"], own.epoch) == (0, 0)
        assert next_hashes(islice(own, 5), 5) == expected[:5]
        middle = own.state_dict()
        assert next_hashes(own, 1000) == expected
    again = loader(endless, on_iter="restart")
    again.load_state_dict(middle)
    assert [next_hashes(again, 1000), next_hashes(again, 1000)] == [expected[5:], expected]


def test_skipping_ends_with_the_epoch(endless: Any) -> None:
    own = loader(endless, 1)
    expected = without_epochs(endless, 40)
    with own:
        assert next_hashes(islice(own, 4), 4) == expected[:4]
        own.skip(3)
        assert next_hashes(islice(own, 2), 2) == expected[7:9]
        own.skip(100)
        assert next(own, None) is None  # the epoch is over
        assert next_hashes(own, 1000) == expected[12:24]


def test_run_started_between_two_steps_loses_no_slot(endless: Any) -> None:
    one = loader(endless)
    next_hashes(islice(one, 5), 5)
    runs = [Run(LoaderSettings(endless, seed=3, lanes=6, epoch_slots=12, ranks=(rank, 3))) for rank in range(3)]
    for run in runs:
        run.load_state_dict(one.state_dict())
    found, lengths, slot = [], [], 5
    for _ in range(3):
        steps = list(zip(*runs, strict=True))
        lengths.append(len(steps))
        for step in steps:
            found += [digest(batch) for batch in sorted_by_slot(list(step), slot)]
            slot += 3
    assert lengths == [3, 4, 4]
    assert found == without_epochs(endless, 38)[5:]


def test_workers_persist_and_prefetch_the_next_epoch(endless: Any) -> None:
    with loader(endless, 2) as own:
        next_hashes(islice(own, 11), 11)
        before, requested = workers(own), len(own._run.prefetcher._requests)
        next(own)
        assert len(own._run.prefetcher._requests) == requested > 0, "also where the epoch is over"
        next_hashes(own, 1000)
        assert workers(own) == before and own.stats()["restarts"] == 0


@pytest.mark.parametrize("wrong", [0, -6, 10, 3])
def test_epoch_slots_must_be_a_multiple_of_the_lanes(endless: Any, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"a multiple of the 6 lanes, such as \d+, not {wrong}$"):
        loader(endless, epoch_slots=wrong)


def test_finite_pipeline_rejects_epoch_slots(make_shards: Any) -> None:
    own = loader(partial(counted_pipeline, str(make_shards([60, 60]))))
    for use in (len, next):
        with pytest.raises(ValueError, match="epoch_slots needs an endless pipeline"):
            use(own)
