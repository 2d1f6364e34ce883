"""An epoch ends when its last batch is given; workers live on into the next one; what was not given is the next one."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import islice
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader import observers
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import _take_step
from tests.support.processes import workers
from tests.support.streams import next_hashes, through_a_file
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 6, "num_workers": num_workers, **settings})


@pytest.fixture
def counted(make_shards: Any) -> Any:
    """A pipeline whose length is known: 120 samples, 60 batches."""
    return partial(counted_pipeline, str(make_shards([60, 60])))


@pytest.fixture
def packed(make_shards: Any) -> Any:
    """One whose length is not."""
    return partial(toy_pipeline, str(make_shards([60, 60])), epochs=1)


@pytest.mark.parametrize(("num_workers", "tail"), [(0, "stop"), (2, "pad")])
def test_trainer_that_takes_len_batches_gets_whole_epochs(counted: Any, num_workers: int, tail: str) -> None:
    """As HF Trainer, Lightning and Composer do. They never hear of the end."""
    with loader(counted, num_workers, tail=tail) as own:
        passes = [next_hashes(islice(own, len(own)), 1000) for _ in range(4)]
    assert [len(one) for one in passes] == [60] * 4
    alone = loader(counted, tail=tail)
    assert passes == [next_hashes(alone, 1000) for _ in range(4)]


@pytest.mark.parametrize("kind", ["counted", "packed"])
def test_loop_body_at_the_last_batch_sees_its_epoch_and_trace(kind: str, request: pytest.FixtureRequest) -> None:
    own = loader(request.getfixturevalue(kind))
    for epoch in range(3):
        seen = [(own.epoch, own.trace().slot, len(own.trace().samples) > 0) for _ in own]
        assert seen == [(epoch, slot, True) for slot in range(len(seen))] and len(seen) >= 6
        assert own.epoch == epoch + 1
    assert next(own, None) is None and next(own, None) is None, "an iterator that has ended stays so"


@pytest.mark.parametrize(("kind", "world_size"), [("counted", 2), ("packed", 1), ("packed", 3)])
def test_the_state_after_the_last_batch_is_the_start_of_the_next_epoch_for_any_ranks(
    kind: str, world_size: int, request: pytest.FixtureRequest
) -> None:
    pipeline = request.getfixturevalue(kind)
    alone = loader(pipeline)
    first, second = next_hashes(alone, 1000), next_hashes(alone, 1000)
    own = loader(pipeline)
    assert next_hashes(islice(own, len(first)), 1000) == first
    state = own.state_dict()
    assert (state["epoch"], state["slot"]) == (1, 0)
    settings: dict[str, Any] = {"seed": 3, "lanes": 6}
    runs = [Run(LoaderSettings(pipeline, ranks=(rank, world_size), **settings)) for rank in range(world_size)]
    for one in runs:
        one.load_state_dict(through_a_file(state))
    found = [digest(entry.batch) for _ in range(len(second) // world_size) for entry in _take_step(runs)]
    assert found == second


@pytest.mark.parametrize(
    ("on_iter", "method"),
    [
        ("continue", "fork"),
        ("restart", "fork"),
        pytest.param("restart", "spawn", marks=pytest.mark.long),
        pytest.param("continue", "spawn", marks=pytest.mark.long),
    ],
)
def test_workers_persist_between_epochs(packed: Any, method: str, on_iter: str) -> None:
    with loader(packed, 2, workers=sp.Workers(start_method=method), on_iter=on_iter) as own:
        pids = []
        for _ in range(3):
            assert len(next_hashes(own, 1000)) >= 6
            pids.append(workers(own))
        next_hashes(own, 2)
        assert pids == [workers(own)] * 3 and own.stats()["restarts"] == 0


def test_ranks_vote_once_per_round_even_if_steps_fail_and_repeat(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = loader(packed)
    rounds = [len(next_hashes(alone, 1000)) // 6 for _ in range(2)]
    settings: dict[str, Any] = {"seed": 3, "lanes": 6, "pin_memory": True}
    runs = [Run(LoaderSettings(packed, ranks=(rank, 2), **settings)) for rank in range(2)]
    for epoch in range(2):
        votes = 0
        for one in runs:
            iter(one)
        while runs[0].position.previous is None:
            votes += votes_of_step(runs, monkeypatch)
        assert votes == rounds[epoch] + 1


def votes_of_step(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the ranks vote in a step that fails at first; taken again, they do not vote."""
    monkeypatch.setattr(observers, "in_pinned_memory", fails)
    sent, votes = None, 0
    while asked := [vote for one in runs if (vote := asked_by(one, sent)) is not None]:
        assert len(asked) == len(runs), "all ranks vote or none"
        sent, votes = min(asked), votes + 1
    monkeypatch.setattr(observers, "in_pinned_memory", lambda batch: batch)
    for one in runs:
        assert asked_by(one, None) is None, "the ranks would not be in step"
    return votes


class Asked(Exception):
    pass


def fails(batch: Any) -> Any:
    raise RuntimeError("no memory")


def asked_by(one: Run, sent: int | None) -> int | None:
    """The vote that a run's next step asks for; None if it has been taken or has failed."""
    known, asked = [sent], []

    def agree(vote: int) -> int:
        if (found := known.pop() if known else None) is None:
            asked.append(vote)
            raise Asked
        return found

    one.vote_function = agree
    with contextlib.suppress(RuntimeError, Asked):
        next(one)
    return asked[0] if asked else None


def test_a_known_length_needs_no_vote(counted: Any) -> None:
    def refuse(vote: int) -> int:
        raise AssertionError("no one to talk to")

    for tail in ("stop", "pad"):
        own = Run(LoaderSettings(counted, seed=3, lanes=6, ranks=(1, 2), tail=tail), refuse)  # type: ignore[arg-type]
        assert [len(list(own)) for _ in range(2)] == [30, 30]


@pytest.mark.parametrize(("num_workers", "epochs"), [(0, None), (2, 1)])
def test_received_batch_that_was_not_yielded_is_the_next_one(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch, num_workers: int, epochs: int | None
) -> None:
    """As where there is no page-locked memory left."""

    def fails_at_the_fourth(batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("no memory")
        return batch

    calls: list[int] = []
    monkeypatch.setattr(observers, "in_pinned_memory", fails_at_the_fourth)
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=epochs)
    expected = next_hashes(sp.SavableLoader(pipeline, seed=3, lanes=3), 9)
    with sp.SavableLoader(pipeline, seed=3, lanes=3, num_workers=num_workers, pin_memory=True) as loader:
        found = next_hashes(loader, 3)
        before = loader.state_dict()
        with pytest.raises(RuntimeError, match="no memory"):
            next(loader)
        assert loader.state_dict() == before
        assert found + next_hashes(loader, 6) == expected
