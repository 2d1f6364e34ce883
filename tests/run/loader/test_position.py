"""A position never changes, and a loader moves to the next one only when its trainer receives the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.loader import run
from savable_pipeline.run.loader.position import MAX_LAG, Position
from savable_pipeline.run.loader.ranks import Ranks
from tests.support.streams import take
from tests.support.toy_pipelines import toy_pipeline


def test_a_step_moves_the_slot_one_lane_and_the_history_and_leaves_the_position_before_as_it_was() -> None:
    start = Position.start(0, Ranks(1, 2, None), 4, pad=False)
    before = start.lanes[1]
    after = start.advanced(Delivery(None, b"after", more=True))
    assert (start.slot, start.lanes[1], start.history) == (0, before, ())
    assert (after.slot, after.own_slot, after.lanes[1]) == (2, 3, (b"after", True))
    assert after.lanes[3] is start.lanes[3] and after.history == ((0, 1, before, (), {}),)
    assert after.before(1).flat(b"") == start.flat(b"")


def test_the_history_ends_after_so_many_batches() -> None:
    position = Position.start(0, Ranks(0, 1, None), 1, pad=False)
    for _ in range(MAX_LAG + 3):
        position = position.advanced(Delivery(None, b"", more=True))
    assert [given.step for given in position.history] == list(range(3, MAX_LAG + 3))


def test_lanes_are_asked_for_more_only_where_it_is_not_known() -> None:
    position = Position.start(0, Ranks(0, 1, None), 3, pad=False)
    assert position.unknown_lanes == [0, 1, 2]
    position = position.learned({1: Delivery(None, b"", more=False)})
    assert position.unknown_lanes == [0, 2]
    assert position.with_changes().unknown_lanes == [0, 1, 2]


@pytest.mark.parametrize(("num_workers", "epochs"), [(0, None), (2, 1)])
def test_a_batch_that_came_and_was_not_given_is_the_next_one(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch, num_workers: int, epochs: int | None
) -> None:
    """As where there is no page-locked memory left."""

    def fails_at_the_fourth(batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("no memory")
        return batch

    calls: list[int] = []
    monkeypatch.setattr(run, "in_pinned_memory", fails_at_the_fourth)
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=epochs)
    expected = take(sp.SavableLoader(pipeline, seed=3, lanes=3), 9)
    with sp.SavableLoader(pipeline, seed=3, lanes=3, num_workers=num_workers, pin_memory=True) as loader:
        found = take(loader, 3)
        before = loader.state_dict()
        with pytest.raises(RuntimeError, match="no memory"):
            next(loader)
        assert loader.state_dict() == before
        assert found + take(loader, 6) == expected
