"""Evaluations: every pass the same, whatever was broken off before; every sample once, in as few slots as it takes."""

from __future__ import annotations

import logging
from functools import partial
from itertools import islice
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.testing import _take_step, assert_exact_resume
from tests.support.streams import next_hashes
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(
        pipeline, **{"seed": 3, "lanes": 6, "num_workers": num_workers, "on_iter": "restart", **settings}
    )


@pytest.fixture(params=["counted", "packed"])
def pipeline(request: pytest.FixtureRequest, make_shards: Any) -> Any:
    """One whose length is known and one whose length is not; both draw."""
    shards = str(make_shards([60, 60]))
    return partial(counted_pipeline, shards) if request.param == "counted" else partial(toy_pipeline, shards, epochs=1)


# on_iter="restart".


def test_every_evaluation_yields_the_same_bytes_after_any_break(pipeline: Any) -> None:
    whole = next_hashes(loader(pipeline, on_iter="continue"), 1000)
    with loader(pipeline, 2) as own:
        start = own.state_dict()
        for taken in (2, 10, 1000, 0, 1, len(whole), 1000, 1000):  # a sanity check, a limit, whole, …
            assert next_hashes(own, taken) == whole[:taken]
            assert own.epoch == 0
        own.skip(6)
        assert next_hashes(own, 1000) == whole
        assert own.state_dict() == start, "after a whole pass"
        assert next_hashes(islice(own, len(whole)), 1000) == whole and own.state_dict() == start


def test_first_iter_after_a_load_continues_and_later_ones_restart(pipeline: Any) -> None:
    whole = next_hashes(loader(pipeline), 1000)
    first = loader(pipeline)
    next_hashes(first, 5)
    state = first.state_dict()
    with loader(pipeline, 2) as own:
        for before in (0, 3, 1000):
            next_hashes(own, before)
            own.load_state_dict(state)
            assert next_hashes(own, 1000) == whole[5:]
            assert next_hashes(own, 4) == whole[:4]


def test_on_iter_is_one_of_two_values(pipeline: Any) -> None:
    with pytest.raises(ValueError, match="on_iter must be 'continue' or 'restart', not 'again'"):
        loader(pipeline, on_iter="again")


@pytest.mark.parametrize("tail", ["stop", "pad"])
def test_ranks_that_break_at_different_batches_vote_only_before_the_first(pipeline: Any, tail: str) -> None:
    """Else one would wait for another that has gone on to its next pass."""
    if tail == "pad":
        pipeline = partial(counted_pipeline, *pipeline.args)
    settings: dict[str, Any] = {"seed": 3, "lanes": 6, "on_iter": "restart", "tail": tail}
    runs = [Run(LoaderSettings(pipeline, ranks=(rank, 2), **settings)) for rank in range(2)]
    whole = next_hashes(loader(pipeline, tail=tail), 1000)
    first = _take_step(runs)
    assert len(first) == 2
    for passes in ((3, 1000), (1000, 1), (1000, 1000), (0, 1)):
        for rank, (own, taken) in enumerate(zip(runs, passes, strict=True)):
            assert next_hashes(own, taken) == whole[rank::2][:taken]  # none votes: rank and world size are numbers


# tail="pad".


@pytest.mark.parametrize("lanes", [4, 12, 96])
def test_400_samples_in_eights_are_50_batches_whatever_the_lanes_and_ranks(make_shards: Any, lanes: int) -> None:
    pipeline = partial(counted_pipeline, str(make_shards([400])), size=8)
    alone = loader(pipeline, lanes=lanes, tail="pad")
    batches = list(alone)
    assert len(alone) == len(batches) == 50 and all(batch["valid"].all() for batch in batches)
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(400))
    for world_size in (world for world in (1, 2, 3, 4) if lanes % world == 0):
        settings: dict[str, Any] = {"seed": 3, "lanes": lanes, "tail": "pad"}
        runs = [Run(LoaderSettings(pipeline, ranks=(rank, world_size), **settings)) for rank in range(world_size)]
        found = [entry.batch for _ in range(-(-50 // world_size)) for entry in _take_step(runs)]
        assert [batch["id"].tolist() for batch in found[:50]] == [batch["id"].tolist() for batch in batches]
        assert len(found) - 50 < world_size and not any(batch["valid"].any() for batch in found[50:])
        assert [next(one, None) for one in runs] == [None] * world_size


def test_unshuffled_evaluation_yields_file_order_each_time(make_shards: Any) -> None:
    pipeline = partial(counted_pipeline, str(make_shards([101])), size=7, shuffle=False)
    for settings in ({"on_iter": "restart"}, {"on_iter": "continue"}):
        own = loader(pipeline, lanes=12, tail="pad", **settings)
        for _ in range(3):
            found = [number for batch in own for number in batch["id"][batch["valid"]].tolist()]
            assert found == list(range(101))


def test_480_samples_on_96_lanes_warn_and_on_60_lanes_are_60_full_batches(
    make_shards: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = partial(counted_pipeline, str(make_shards([480])), size=8)
    with caplog.at_level(logging.WARNING):
        list(loader(pipeline, lanes=96, tail="stop"))
    assert "Start with lanes=60 or fewer" in caplog.text
    batches = list(loader(pipeline, lanes=60, tail="stop"))
    assert [len(batch["id"]) for batch in batches] == [8] * 60


@pytest.mark.parametrize(("samples", "steps"), [(37, 22), pytest.param(96, 60, marks=pytest.mark.landing)])
def test_other_ranks_resume_over_the_end_of_a_padded_epoch_exactly(make_shards: Any, samples: int, steps: int) -> None:
    """37 samples are an epoch of 10 batches."""
    pipeline = partial(counted_pipeline, str(make_shards([samples])), size=4)
    settings: dict[str, Any] = {"lanes": 12, "steps": steps, "workers": [0, 1], "world_sizes": [1, 2, 3, 4]}
    assert assert_exact_resume(pipeline, tail="pad", chains=1 + steps // 60, **settings) > steps


# Another batch size in mid-epoch.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_length_is_unknown_in_an_epoch_started_with_another_batch_size(make_shards: Any, num_workers: int) -> None:
    """Also after a second resume, which finds the same settings as here: the state says it."""
    small, large = (partial(counted_pipeline, str(make_shards([120])), size=size) for size in (2, 5))
    own = loader(small, on_iter="continue", tail="pad")
    given = [next(own) for _ in range(15)]
    state = own.state_dict()
    with loader(large, num_workers, on_iter="continue", tail="pad") as own:
        own.load_state_dict(state, allow={"batch_size"})
        given += [next(own) for _ in range(7)]
        state = own.state_dict()
    with loader(large, num_workers, on_iter="continue", tail="pad") as own:
        own.load_state_dict(state)
        given += list(own)
        assert sorted(number for batch in given for number in batch["id"][batch["valid"]].tolist()) == list(range(120))
        assert len(list(own)) == len(own) == 24
