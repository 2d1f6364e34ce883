"""What `savable plan --measure` measures: a real run of one rank."""

from __future__ import annotations

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.tools.plan import measure as measuring
from savable_pipeline.tools.plan.measure import measure, worker_counts
from tests.conftest import MakeShards


class Slow(sp.TaskEncoder):
    """Takes some time for a sample."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        np.sort(np.random.default_rng(0).random(2_000))
        return int(sample.json()["id"])


def test_workers_are_tried_up_to_the_cores_or_the_lanes_of_a_rank() -> None:
    assert worker_counts(12, 100) == [0, 1, 2, 4, 8, 12]
    assert worker_counts(16, 3) == [0, 1, 2, 3]
    assert worker_counts(1, 1) == [0, 1]


def test_a_rank_is_run_stage_by_stage_and_resumed(make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "worker_counts", lambda cores, lanes: [0, 1])
    folder = make_shards([64])

    def pipeline(lane: sp.Lane) -> sp.Stage:
        samples = sp.ShuffleBuffer(sp.TarShardReader(folder, lane, epochs=1), size=8)
        return sp.Batcher(sp.Encode(samples, Slow()), size=2)

    told: list[tuple[int, int]] = []
    settings = LoaderSettings(pipeline, seed=5, lanes=4)
    found = measure(settings, ranks=2, seconds=0.05, told=lambda done, total: told.append((done, total)))
    assert list(found.stages) == ["TarShardReader", "ShuffleBuffer", "Encode", "Batcher"]
    assert max(found.stages, key=lambda name: found.stages[name]) == "Encode"
    assert [rate.workers for rate in found.rates] == [0, 1]
    for rate in found.rates:
        assert rate.batches > 0 and rate.first_s > 0
        assert rate.items_per_s == pytest.approx(2 * rate.batches_per_s, rel=0.6)
    with Run(LoaderSettings(pipeline, seed=5, lanes=4, rank=0, world_size=2), agree=lambda vote: vote) as run:
        next(run)
        size = sum(len(value) for value in run.state_dict().values() if isinstance(value, bytes))
    assert found.state_bytes == pytest.approx(size, rel=0.5)
    assert found.resume_s > 0 and found.state_ms > 0
    assert told[-1] == (4, 4)
