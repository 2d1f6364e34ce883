"""Whoever builds a pipeline refuses stages that were not made for the lane that it is built for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.testing import assert_exact_resume
from savable_pipeline.tools.plan.run_plan import plan_run
from savable_pipeline.tools.preview import preview_pipeline
from tests.support.toy_faults import NumberEncoder


def batches(samples: custom.SampleStage) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=4), NumberEncoder()), size=2)


def of_another_lane(shards: str) -> Callable[[sp.Lane], custom.Stage]:
    return lambda lane: batches(sp.TarShardReader(shards, sp.Lane()))


def made_outside(shards: str) -> Callable[[sp.Lane], custom.Stage]:
    reader = sp.TarShardReader(shards, sp.Lane())
    return lambda lane: batches(reader)


def kept_from_the_first_lane(shards: str) -> Callable[[sp.Lane], custom.Stage]:
    kept: list[custom.SampleStage] = []

    def pipeline(lane: sp.Lane) -> custom.Stage:
        kept[:] = kept or [sp.TarShardReader(shards, lane)]
        return batches(kept[0])

    return pipeline


def sources_of_another_lane(shards: str) -> Callable[[sp.Lane], custom.Stage]:
    other = sp.Lane()
    return lambda lane: batches(sp.Blend({name: sp.TarShardReader(shards, other) for name in ("web", "books")}))


def by_loader(pipeline: Any, workers: int = 0) -> None:
    with sp.SavableLoader(pipeline, seed=7, lanes=4, num_workers=workers) as own:
        for _ in range(8):
            next(own)


def by_runner(pipeline: Any) -> None:
    runner = LaneRunner(LaneJob(pipeline, 7, 4), shared={})
    for lane in (0, 1):
        runner.build(lane, 0)


DOORS: dict[str, Callable[[Any], Any]] = {
    "loader": by_loader,
    "workers": lambda pipeline: by_loader(pipeline, workers=2),
    "runner": by_runner,
    "plan": lambda pipeline: plan_run(LoaderSettings(pipeline, seed=7, lanes=4)),
    "preview": lambda pipeline: preview_pipeline(pipeline, "p", seed=7, lane=1, lanes=4),
    "resume": lambda pipeline: assert_exact_resume(pipeline, lanes=4, steps=8),
}


@pytest.mark.parametrize("door", ["loader", "workers", "plan", "preview", "resume"])
def test_pipeline_function_that_creates_its_own_lane_is_rejected(make_shards: Any, door: str) -> None:
    with pytest.raises(ValueError, match=r"TarShardReader was made for Lane\(0 of 1, seed=0\), not for Lane\(. of 4"):
        DOORS[door](of_another_lane(str(make_shards([40]))))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (made_outside, "TarShardReader was made for Lane(0 of 1"),
        (kept_from_the_first_lane, "TarShardReader was made for Lane(0 of 4, seed=7)"),
        (sources_of_another_lane, "TarShardReader of the source 'books' was made for Lane(0 of 1"),
    ],
)
def test_reader_of_another_lane_is_an_error_with_a_fix(make_shards: Any, make: Any, named: str) -> None:
    pipeline = make(str(make_shards([40])))
    with pytest.raises(ValueError, match=f"{re.escape(named)}.*Create each reader in the pipeline function"):
        by_runner(pipeline)


def test_every_builder_accepts_the_functions_lane(make_shards: Any) -> None:
    shards = str(make_shards([40]))
    for door in DOORS.values():
        door(lambda lane: batches(sp.TarShardReader(shards, lane)))
