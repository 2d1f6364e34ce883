"""Which worker makes what: a free one never waits, whatever the numbers of lanes and workers; and nothing changes."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.engine.pool import Pool
from tests.support.processes import descendants, kill, wait_until_gone, workers
from tests.support.streams import take
from tests.support.toy_faults import NumberEncoder, number_pipeline
from tests.support.toy_pipelines import toy_pipeline


class SleepyEncoder(NumberEncoder):
    """Takes a while."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        time.sleep(0.02)
        return items


@pytest.mark.parametrize("lanes,num_workers", [(12, 5), (3, 4)])
def test_lanes_move_between_workers_and_the_batches_are_the_same(
    make_shards: Any, lanes: int, num_workers: int
) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    settings: dict[str, Any] = {"seed": 3, "lanes": lanes}
    expected = take(sp.SavableLoader(pipeline, **settings), 30)
    with sp.SavableLoader(pipeline, num_workers=num_workers, **settings) as own:
        assert take(own, 30) == expected


def test_no_worker_is_idle_while_lanes_wait_for_another_and_it_forgets_those_that_have_moved(make_shards: Any) -> None:
    """4 workers on 6 lanes: dealt fixed, two of them would hold two lanes each, and the others one."""
    pipeline = partial(number_pipeline, str(make_shards([600])), encoder=SleepyEncoder())
    with sp.SavableLoader(pipeline, seed=3, lanes=6, num_workers=4) as own:
        assert [next(own) for _ in range(48)] == [[2 * i, 2 * i + 1] for i in range(48)]
        assert own.stats()["moved_lanes"] > 10
        pool = own._run.prefetcher._makers
        assert isinstance(pool, Pool)
        held = {lane: state.worker for lane, state in pool._lanes.items()}
        told = [number for worker in pool._workers for number in worker.forget if held[number] is worker]
        assert told == [] and sum(len(worker.forget) for worker in pool._workers) < 12


def test_the_server_may_be_killed_too(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    expected = take(sp.SavableLoader(pipeline, seed=3, lanes=12), 30)
    before = descendants(os.getpid())
    with sp.SavableLoader(pipeline, seed=3, lanes=12, num_workers=2) as own:
        found = take(own, 7)
        pids = workers(own)
        (server,) = set(descendants(os.getpid())) - set(before) - set(pids)
        kill(server)
        wait_until_gone([server, *pids])
        found += take(own, 23)
        assert found == expected
        assert server not in descendants(os.getpid()) and set(workers(own)).isdisjoint(pids)
    assert descendants(os.getpid()) == before
