"""Which worker makes what: a free one never waits, whatever the numbers of lanes and workers; and nothing changes."""

from __future__ import annotations

import os
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.core.run_facts import NO_FACTS
from savable_pipeline.run.engine.pool import LaneAssignment, Pool
from tests.support.processes import descendants, kill, wait_until_gone, workers
from tests.support.streams import next_hashes
from tests.support.toy_faults import NumberEncoder, number_pipeline
from tests.support.toy_pipelines import toy_pipeline


class SleepyEncoder(NumberEncoder):
    """Takes a while."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        time.sleep(0.02)
        return items


class FakeWorker:
    """As much of a worker as the choice looks at."""

    def __init__(self, requests: int, busy_since: float = 0.0) -> None:
        self.requests = [None] * requests
        self.busy_since = time.monotonic() - busy_since


def choice(
    batch_s: float, busy: list[int], *, holder: int | None = None, sent_count: int = 0, rebuild_s: float = 0.0
) -> Any:
    """The number of the worker that is chosen, of some that have so many requests each."""
    pool = Pool.__new__(Pool)
    pool._prefetch, pool._batch_s = 2, batch_s
    pool._host = SimpleNamespace(now=time.monotonic)  # type: ignore[assignment]
    found: Any = [FakeWorker(requests) for requests in busy]
    pool._workers = found
    lane = LaneAssignment(b"", NO_FACTS, None if holder is None else found[holder], sent_count, rebuild_s)
    chosen = pool._choose_worker(lane)
    return None if chosen is None else found.index(chosen)


def test_a_new_lane_goes_to_the_worker_with_the_fewest_requests() -> None:
    assert choice(0.0, [1, 0, 2]) == 1
    assert choice(0.1, [2, 1, 0]) == 2
    assert choice(0.1, [0, 0, 0]) == 0
    assert choice(0.1, [2, 2, 2]) is None


def test_lane_stays_with_its_worker_unless_another_starts_it_sooner() -> None:
    assert choice(0.1, [0, 0], holder=1) == 1
    assert choice(0.1, [0, 1], holder=1) == 0
    assert choice(0.001, [0, 1], holder=1) == 1, "to move takes longer than to wait"
    assert choice(0.1, [0, 1], holder=1, rebuild_s=0.5) == 1, "what it holds would have to be made again"
    assert choice(0.1, [0, 2], holder=1, rebuild_s=0.15) == 0
    assert choice(0.1, [1, 2], holder=1, rebuild_s=0.15) is None, "it waits until its holder has room"


def test_running_lane_stays_with_its_worker() -> None:
    assert choice(0.1, [0, 1], holder=1, sent_count=1) == 1
    assert choice(0.1, [0, 2], holder=1, sent_count=2) is None


@pytest.mark.parametrize("lanes,num_workers", [(12, 5), (3, 4)])
def test_moving_lanes_between_workers_changes_no_batch(make_shards: Any, lanes: int, num_workers: int) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    settings: dict[str, Any] = {"seed": 3, "lanes": lanes}
    expected = next_hashes(sp.SavableLoader(pipeline, **settings), 30)
    with sp.SavableLoader(pipeline, num_workers=num_workers, **settings) as own:
        assert next_hashes(own, 30) == expected


def test_idle_workers_take_over_waiting_lanes_and_old_ones_forget_them(make_shards: Any) -> None:
    """4 workers on 6 lanes: dealt fixed, two of them would hold two lanes each, and the others one."""
    pipeline = partial(number_pipeline, str(make_shards([600])), encoder=SleepyEncoder())
    with sp.SavableLoader(pipeline, seed=3, lanes=6, num_workers=4) as own:
        assert [next(own) for _ in range(48)] == [[2 * i, 2 * i + 1] for i in range(48)]
        assert own.stats()["moved_lanes"] > 10
        pool = own._run.backend
        assert isinstance(pool, Pool)
        held = {lane: state.worker for lane, state in pool._lanes.items()}
        told = [number for worker in pool._workers for number in worker.forget if held[number] is worker]
        assert told == [] and sum(len(worker.forget) for worker in pool._workers) < 12


def test_fork_server_may_be_killed(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    expected = next_hashes(sp.SavableLoader(pipeline, seed=3, lanes=12), 30)
    before = descendants(os.getpid())
    with sp.SavableLoader(pipeline, seed=3, lanes=12, num_workers=2) as own:
        found = next_hashes(own, 7)
        pids = workers(own)
        (server,) = set(descendants(os.getpid())) - set(before) - set(pids)
        kill(server)
        wait_until_gone([server, *pids])
        found += next_hashes(own, 23)
        assert found == expected
        assert server not in descendants(os.getpid()) and set(workers(own)).isdisjoint(pids)
    assert descendants(os.getpid()) == before
