"""`sp.Workers`: what a loader takes beside the number of its workers, checked where it is written."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader.savable_loader import settings_of
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"count": -1}, "the number of workers must be at least 0, not -1"),
        ({"prefetch": 0}, "prefetch must be at least 1, not 0"),
        ({"timeout": 0}, "timeout must be above 0 seconds, not 0"),
        ({"timeout": float("nan")}, "timeout must be above 0 seconds"),
        ({"start_method": "threads"}, "start_method must be one of fork, .*, thread, not 'threads'"),
        ({"start_method": 3}, "start_method must be one of fork, .*, thread, not 3"),
        ({"start_method": multiprocessing.get_context("fork")}, "start_method must be one of fork, .*, not <multipr"),
    ],
)
def test_a_wrong_setting_is_an_error_at_its_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sp.Workers(**wrong)


def test_number_of_workers_is_passed_once(make_shards: Any) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40])))
    expected = next_hashes(sp.SavableLoader(pipeline, seed=3, lanes=4), 6)
    with sp.SavableLoader(pipeline, seed=3, lanes=4, workers=sp.Workers(2)) as loader:
        assert settings_of(loader).num_workers == 2
        assert next_hashes(loader, 6) == expected
    with pytest.raises(ValueError, match=r"pass num_workers=3 or sp\.Workers\(2\), not both"):
        sp.SavableLoader(pipeline, seed=3, num_workers=3, workers=sp.Workers(2))


def test_max_in_flight_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_in_flight must be at least 1, not 0"):
        sp.Acknowledge(max_in_flight=0)
