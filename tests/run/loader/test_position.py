"""A position never changes, and a loader moves to the next one only when its trainer receives the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader import run
from tests.support.streams import take
from tests.support.toy_pipelines import toy_pipeline


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
