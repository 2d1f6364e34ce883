"""Random histories of real nodes, behind a network that fails: no wrong batch, no wrong state."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.nodes import socket_host
from tests.conftest import write_numbered_shards
from tests.support.agents import Agent, write_key
from tests.support.faulty_proxy import TROUBLES, FaultyProxy
from tests.support.processes import descendants
from tests.support.toy_faults import LargeEncoder, number_pipeline, packed_numbers

LANES = 6
STEPS = 24  # of a history
HISTORIES = 1
MORE = 1_000  # of the long test
SIGNALS = ("killed", "stopped")


class Large(LargeEncoder):
    """Batches of 1 MB that say which they are."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        import numpy as np

        return np.full(1 << 20, items[0] % 256, np.uint8), items


def large_numbers(shards: str, lane: sp.Lane) -> Any:
    return number_pipeline(shards, lane, Large())


PIPELINES = [packed_numbers, number_pipeline, large_numbers]


class Nodes:
    """Two agents, each behind a proxy, that are begun again when they have died."""

    def __init__(self, folder: Path) -> None:
        self.key_file = write_key(folder)
        self.agents = [Agent(self.key_file, 2), Agent(self.key_file, 1)]
        self.proxies = [FaultyProxy(agent.port, seed) for seed, agent in enumerate(self.agents)]

    def see_to(self) -> None:
        for i, agent in enumerate(self.agents):
            if agent.process.poll() is not None:
                agent.end()
                self.agents[i] = Agent(self.key_file, 2 - i, agent.port)

    def signal(self, draw: random.Random, number: int) -> int:
        """Send a signal to some process of a node; returns its process id."""
        agent = draw.choice(self.agents).process
        pid = draw.choice([agent.pid, *descendants(agent.pid)])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        for agent in self.agents:
            agent.end()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("agents"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, list[Any], list[Any]]]:
    """Each pipeline, its batches without workers, and the states before each and after the last."""
    folder = tmp_path_factory.mktemp("histories") / "shards"
    write_numbered_shards(folder, [40, 7, 60])
    found = []
    for pipeline in [partial(each, str(folder)) for each in PIPELINES]:
        loader = sp.SavableLoader(pipeline, seed=3, lanes=LANES)
        states, batches = [loader.state_dict()], []
        for _ in range(STEPS):
            batches.append(next(loader))
            states.append(loader.state_dict())
        found.append((pipeline, batches, states))
    return found


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(socket_host, "_RETRY_S", 0.2)
    monkeypatch.setattr(socket_host, "_PING_S", 0.2)
    monkeypatch.setattr(socket_host, "_CONNECT_S", 1.0)
    monkeypatch.setattr(socket_host, "_SESSION_S", 5.0)  # a session that was stopped while it starts
    caplog.set_level(logging.CRITICAL, "savable_pipeline")


def history(nodes: Nodes, expected: list[tuple[Any, list[Any], list[Any]]], seed: int, seen: Counter[str]) -> None:
    """One run in a drawn network, from which it goes to local workers and back from time to time."""
    draw = random.Random(f"node history {seed}")
    pipeline, batches, states = draw.choice(expected)
    for proxy in nodes.proxies:
        proxy.draw = random.Random(draw.random())
        proxy.troubles = {name: draw.choice((0.0, 0.0, 0.003, 0.03)) for name in TROUBLES}
    signals = draw.choice((0.0, 0.05, 0.2))
    stopped: list[int] = []

    def loader(*, local: bool = False) -> sp.SavableLoader:
        addresses = [proxy.address for proxy in nodes.proxies]
        how: dict[str, Any] = {"timeout": 3.0, "prefetch": draw.randint(1, 3), "max_restarts": 1000}
        workers = sp.Workers(1, **how) if local else sp.SocketWorkers(addresses, key_file=nodes.key_file, **how)
        return sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers)

    made, step = loader(), 0
    try:
        while step < STEPS:
            if draw.random() < signals:
                how = draw.choice(SIGNALS)
                seen[how] += 1
                if how == "killed":
                    nodes.signal(draw, signal.SIGKILL)
                else:
                    stopped.append(nodes.signal(draw, signal.SIGSTOP))
            if stopped and draw.random() < 0.3:
                _go_on(stopped)
            if draw.random() < 0.03:
                seen["cut"] += 1
                draw.choice(nodes.proxies).cut()
            time.sleep(draw.choice((0.0, 0.0, 0.0, 0.05)))  # it trains
            nodes.see_to()
            try:
                batch = next(made)
            except sp.WorkerError:  # the same sample was stopped or killed four times: the state is whole
                seen["errors"] += 1
                _go_on(stopped)
                continue
            assert same(batch, batches[step]), f"step {step}"
            step += 1
            if draw.random() < 0.2:
                assert made.state_dict() == states[step], f"the state after {step}"
            if draw.random() < 0.05:
                state = made.state_dict()
                made.close()
                made = loader(local=draw.random() < 0.5)
                made.load_state_dict(state)
                seen["moved"] += 1
        assert made.state_dict() == states[STEPS]
    finally:
        _go_on(stopped)
        made.close()
        for proxy in nodes.proxies:
            proxy.troubles = {}
            proxy.cut()


def same(one: Any, other: Any) -> bool:
    return bool(one == other) if isinstance(one, list) else one[1] == other[1] and (one[0] == other[0]).all()


def _go_on(stopped: list[int]) -> None:
    while stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped.pop(), signal.SIGCONT)


def histories(nodes: Nodes, expected: list[tuple[Any, list[Any], list[Any]]], seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for proxy in nodes.proxies:
        proxy.seen = dict.fromkeys(TROUBLES, 0)
    for seed in seeds:
        try:
            history(nodes, expected, seed, seen)
        except BaseException as error:
            error.add_note(f"in history {seed}")
            raise
    for proxy in nodes.proxies:
        seen.update(proxy.seen)
    return seen


def test_random_node_histories_change_no_batch_and_no_state(nodes: Nodes, expected: list[Any]) -> None:
    seen = histories(nodes, expected, range(HISTORIES))
    assert seen.total() > 0, seen


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_many_random_histories_change_no_batch_and_no_state(nodes: Nodes, expected: list[Any]) -> None:
    few = int(os.environ.get("NODE_HISTORIES", MORE))
    seen = histories(nodes, expected, range(HISTORIES, HISTORIES + few))
    print(few, dict(seen))
    assert all(seen[name] for name in (*TROUBLES, *SIGNALS, "cut", "moved")), seen
