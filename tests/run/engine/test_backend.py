"""What each `Backend` promises, and what a run does with one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.core.run_facts import NO_FACTS
from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.lane_state import fresh_lane
from tests.conftest import write_numbered_shards
from tests.support.agents import agents, socket_workers
from tests.support.fake_backend import COUNTERS, FakeBackend, fake_run
from tests.support.fake_workers import FakeWorkers, World
from tests.support.toy_faults import number_pipeline

LANES = 3
KINDS = ["in process", "processes", "threads", "sockets", "fake workers", "fake"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("backend") / "shards"
    write_numbered_shards(folder, [40, 20])
    return str(folder)


def opened(kind: str, shards: str, folder: Path) -> Iterator[Backend]:
    """One of each kind, open. Lane n of the pipeline has every third pair of 60 numbers: ten batches."""
    if kind == "fake":
        yield FakeBackend([10] * LANES)
        return
    with agents(folder, *[1] * (kind == "sockets")) as nodes:
        workers: dict[str, Any] = {
            "in process": sp.Workers(0),
            "processes": sp.Workers(2),
            "threads": sp.Workers(2, start_method="thread"),
            "fake workers": FakeWorkers(2, world=World(0, {})),
        }
        chosen = socket_workers(*nodes) if kind == "sockets" else workers[kind]
        pipeline = partial(number_pipeline, shards, epochs=1)
        settings = LoaderSettings(pipeline, seed=3, lanes=LANES, workers=chosen)
        local = LocalLanes(settings.job, 0)
        yield settings.new_backend(local.runner, lambda: local.last_stage, local.pinned)
        local.close()


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, shards: str, tmp_path: Path) -> Iterator[Backend]:
    for made in opened(request.param, shards, tmp_path):
        made.open()
        yield made
        made.close()
        made.close()


def expected(backend: Backend, lane: int, number: int) -> Any:
    if isinstance(backend, FakeBackend):
        return 0, lane, number
    return [2 * (LANES * number + lane), 2 * (LANES * number + lane) + 1]


def fresh(lane: int) -> bytes:
    return fresh_lane(lane, 0, NO_FACTS)


def test_requests_of_a_lane_are_answered_in_order(backend: Backend) -> None:
    backend.start()
    draw = random.Random(0)
    states = {lane: fresh(lane) for lane in range(LANES)}
    for start in range(0, 9, 3):
        if backend.capacity:  # ahead: later requests of a lane continue after the first one
            tickets = {(k, lane): backend.request(lane, states[lane]) for k in range(3) for lane in range(LANES)}
            order = sorted(tickets, key=lambda _: draw.random())
            found = {asked: backend.answer(tickets[asked]) for asked in order}
        else:
            found = {}
            for k in range(3):
                for lane in range(LANES):
                    found[k, lane] = backend.answer(backend.request(lane, states[lane]))
                    states[lane] = found[k, lane].state
        assert {asked: each.batch for asked, each in found.items()} == {
            (k, lane): expected(backend, lane, start + k) for k in range(3) for lane in range(LANES)
        }


def test_lanes_restart_at_the_states_of_new_requests(backend: Backend) -> None:
    backend.start()
    first = backend.answer(backend.request(1, fresh(1)))
    second = backend.answer(backend.request(1, first.state))
    backend.request(1, second.state)  # its answer is dropped
    for forget in (backend.forget_requests, backend.stop, backend.close):
        forget()
        backend.start()
        again = backend.answer(backend.request(1, first.state))
        assert (again.batch, again.state, again.more) == (second.batch, second.state, True)


def test_lane_can_get_more_requests_and_skips(backend: Backend) -> None:
    backend.start()
    ask: Callable[..., Delivery] = lambda *request: backend.answer(backend.request(0, *request))  # noqa: E731
    peek = ask(fresh(0), "peek")
    assert peek.more and peek.batch is None
    at = peek.state
    for _ in range(9):
        at = ask(at, "skip").state
    last = ask(at)
    assert last.batch == expected(backend, 0, 9) and not last.more and not last.exhausted
    assert ask(last.state, "peek").more is False and ask(last.state).exhausted


def test_backend_of_unchanged_shards_raises_nothing_in_its_final_check(backend: Backend) -> None:
    backend.verify_delivered()
    backend.start()
    backend.answer(backend.request(0, fresh(0)))
    backend.verify_delivered()
    backend.check_shards()
    backend.stop()
    backend.verify_delivered()
    assert backend.shard_error == "" and backend.numbers().keys() == COUNTERS


# What a run does with it.


@pytest.mark.parametrize("capacity", [0, 1, 7])
def test_a_run_takes_one_batch_of_each_lane_in_turn_and_requests_ahead(shards: str, capacity: int) -> None:
    run = fake_run(FakeBackend(capacity=capacity), shards, lanes=4)
    found = [next(run) for _ in range(10)]
    assert found == [(0, slot % 4, slot // 4) for slot in range(10)]
    assert run.prefetcher.numbers()["ready_batches"] == capacity


def test_finite_run_ends_before_the_first_incomplete_round_and_checks_shards_once(shards: str) -> None:
    backend = FakeBackend([3, 2, 3], capacity=4)
    run = fake_run(backend, shards, lanes=3, epochs=1)
    assert list(run) == [(0, slot % 3, slot // 3) for slot in range(6)]
    assert backend.calls.count("check_shards") == 1
    assert list(run) == [(1, slot % 3, slot // 3) for slot in range(6)]


def test_after_an_error_of_any_answer_the_run_stops_the_backend_and_repeats_the_batch(shards: str) -> None:
    backend = FakeBackend(capacity=5)
    run = fake_run(backend, shards, lanes=4)
    draw, slot, errors = random.Random(1), 0, 0

    def fails() -> None:
        if draw.random() < 0.3:
            raise OSError("disk")

    backend.fails = fails
    while slot < 60:
        try:
            found = next(run)
        except OSError:
            errors += 1
            assert backend.calls[-1] == "stop"
            continue
        assert found == (0, slot % 4, slot // 4)
        slot += 1
        if draw.random() < 0.2:  # another run goes on from its state
            state = run.state_dict()
            run = fake_run(backend, shards, lanes=4)
            run.load_state_dict(state)
    assert errors > 10


def test_run_opens_its_backend_when_built_and_closes_it_when_released(shards: str) -> None:
    backend = FakeBackend()
    run = fake_run(backend, shards, lanes=4)
    assert backend.calls == ["open"]
    next(run)
    assert backend.calls == ["open", "start"]
    run.state_dict()
    assert backend.calls[-1] == "verify_delivered"
    del run
    assert backend.calls[-2:] == ["stop", "close"]


def test_error_in_the_backends_final_check_is_raised_once(shards: str) -> None:
    backend = FakeBackend()
    run = fake_run(backend, shards, lanes=4)
    next(run)
    backend.shard_error = "shard 3 changed"
    with pytest.raises(sp.ShardError, match="shard 3 changed"):
        run.close()
    run.close()
    run.load_state_dict(run.state_dict())
    assert backend.shard_error == "", "batches before it no longer count"
