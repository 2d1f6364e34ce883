"""Nodes of a Ray cluster: an agent an actor; two of three are lost, others join, and no batch is another."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import pytest

import savable_pipeline as sp
from tests.conftest import write_numbered_shards
from tests.support.ray_cluster import ray_cluster
from tests.support.toy_faults import packed_numbers


@pytest.mark.landing
def test_run_survives_the_loss_of_two_of_three_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_numbered_shards(tmp_path / "shards", [40, 7, 60])
    pipeline = partial(packed_numbers, str(tmp_path / "shards"))
    expected = sp.SavableLoader(pipeline, seed=3, lanes=6)
    with ray_cluster(3, monkeypatch) as cluster:
        import ray

        try:
            workers = sp.RayWorkers(nodes=(2, 3), num_cpus=1)
            with sp.SavableLoader(pipeline, seed=3, lanes=6, workers=workers) as loader:

                def go_on(workers: int) -> None:
                    deadline = time.monotonic() + 90
                    while loader.stats()["num_workers"] != workers:
                        assert next(loader) == next(expected) and time.monotonic() < deadline
                        time.sleep(0.01)
                    for _ in range(20):
                        assert next(loader) == next(expected)
                        assert loader.state_dict() == expected.state_dict()

                go_on(3)
                for node in cluster.nodes[:2]:
                    cluster.kill(node)
                go_on(1)
                cluster.add()
                go_on(2)
                assert loader.stats()["restarts"] == 0
        finally:
            ray.shutdown()
    assert re.search(r"node \d+ of Ray is lost", caplog.text)


@pytest.mark.parametrize(
    "wrong",
    [{"nodes": 0}, {"nodes": (3, 2)}, {"nodes": 1, "num_cpus": 0}],
    ids=["none", "less than least", "no processor"],
)
def test_wrong_settings_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="num_cpus"):
        sp.RayWorkers(**{"num_cpus": 1, **wrong})  # type: ignore[arg-type]
