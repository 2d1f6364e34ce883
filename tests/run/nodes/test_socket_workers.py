"""Workers on other machines: the same batches and states as local ones, and from one to the other and back."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.nodes import node_workers, socket_host
from savable_pipeline.run.nodes.socket_host import AgentAddress
from tests.conftest import write_numbered_shards
from tests.support.agents import Agent, agents, socket_workers, write_key
from tests.support.faulty_proxy import FaultyProxy
from tests.support.processes import descendants
from tests.support.toy_faults import (
    CuredEncoder,
    FaultyEncoder,
    LargeEncoder,
    NumberEncoder,
    number_pipeline,
    packed_numbers,
)

LANES = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("nodes") / "shards"
    write_numbered_shards(folder, [40, 7, 60])
    return str(folder)


@pytest.fixture(scope="module")
def one(nodes: tuple[list[Agent], Path]) -> tuple[list[Agent], Path]:
    """One of them: each loader begins an interpreter on each."""
    return nodes[0][:1], nodes[1]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Agent], Path]]:
    """Two agents, which the tests that kill none share."""
    with agents(tmp_path_factory.mktemp("agents"), 2, 1) as made:
        yield made


def taken(loader: sp.SavableLoader, steps: int) -> list[tuple[Any, Any]]:
    """Batches, each with the state after it."""
    return [(next(loader), loader.state_dict()) for _ in range(steps)]


def until(condition: Callable[[], bool], seconds: float = 120.0) -> float:
    """Wait; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds
        time.sleep(0.01)
    return time.monotonic() - began


def test_socket_and_local_workers_exchange_batches_and_states(shards: str, nodes: tuple[list[Agent], Path]) -> None:
    pipeline = partial(packed_numbers, shards)
    expected = taken(sp.SavableLoader(pipeline, seed=3, lanes=LANES), 40)
    made, key_file = nodes
    begin, state = 0, None
    for workers in (
        sp.Workers(2),
        socket_workers(made, key_file),
        sp.Workers(0),
        socket_workers(made[:1], key_file, prefetch=1),
    ):
        with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            assert taken(loader, 10) == expected[begin : begin + 10]
            begin, state = begin + 10, loader.state_dict()


@pytest.mark.parametrize(
    ("workers", "shares"),
    [([2, 1], [2, 1]), ([1], [1, 1]), ([3, 3], [3, 3]), ([1, 1, 5], [3, 2, 2]), ([4, 4], [2, 2, 2, 2])],
    ids=str,
)
def test_ranks_share_the_workers_of_each_agent(workers: list[int], shares: list[int]) -> None:
    """Whose share there is none takes one all the same."""
    hosts = [socket_host.SocketHost.__new__(socket_host.SocketHost) for _ in shares]
    for rank, host in enumerate(hosts):
        host._rank, host._ranks = rank, len(shares)
        host._nodes = [socket_host.Node(AgentAddress("cpu", number, b"")) for number in range(len(workers))]
        for node, count in zip(host._nodes, workers, strict=True):
            node.workers, node.link = count, object()  # type: ignore[assignment]
    assert [host.count(1) for host in hosts] == shares


def test_two_ranks_use_one_agent(shards: str, nodes: tuple[list[Agent], Path]) -> None:
    pipeline = partial(packed_numbers, shards)
    made, key_file = nodes
    with contextlib.ExitStack() as opened:
        for rank in range(2):
            ranked: Any = {"seed": 3, "lanes": LANES, "ranks": (rank, 2)}
            loader = sp.SavableLoader(pipeline, workers=socket_workers(made[1:], key_file), **ranked)
            expected = sp.SavableLoader(pipeline, **ranked)
            assert [next(opened.enter_context(loader)) for _ in range(6)] == [next(expected) for _ in range(6)]
            assert loader.stats()["num_workers"] == 1


def test_batches_referenced_by_the_trainer_are_not_overwritten(shards: str, one: tuple[list[Agent], Path]) -> None:
    pipeline = partial(number_pipeline, shards, encoder=LargeEncoder(100_000))
    expected = [int(batch[0]) for batch, _ in taken(sp.SavableLoader(pipeline, seed=3, lanes=LANES), 40)]
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=socket_workers(*one)) as loader:
        kept = [next(loader) for _ in range(20)]
        assert loader.stats()["viewed_batches"] >= 20
        places = set()
        for number in expected[20:]:
            batch = next(loader)
            places.add(batch.data_ptr())
            assert bool((batch == number).all())
        assert [int(batch[0]) for batch in kept] == expected[:20] and all(bool((b == b[0]).all()) for b in kept)
        assert len(places) < 12  # memory is used again


def test_encoder_error_equals_that_of_a_local_worker(
    shards: str, one: tuple[list[Agent], Path], tmp_path: Path
) -> None:
    pipeline = partial(number_pipeline, shards, encoder=FaultyEncoder("value", 20, tmp_path / "cured"))
    loader = sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=socket_workers(*one))
    with loader, pytest.raises(sp.EncodeError, match="no such colour"):
        taken(loader, 24)


def test_a_sample_that_kills_its_workers_is_named_and_skipped(
    shards: str, one: tuple[list[Agent], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = partial(
        number_pipeline, shards, encoder=FaultyEncoder("segfault", 20, tmp_path / "cured"), on_error="skip"
    )
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=socket_workers(*one)) as loader:
        found = [number for _ in range(20) for number in next(loader)]
        assert loader.stats()["restarts"] == 4
    assert 20 not in found and {18, 19, 21, 22} <= set(found)
    assert "ended by signal SIGSEGV, while it built a batch of lane" in caplog.text
    assert "The sample is skipped from now on" in caplog.text and "in fail" in caplog.text  # its stack
    assert one[0][0].address in caplog.text


def test_a_worker_that_hangs_is_replaced_and_its_stack_is_in_the_message(
    shards: str, one: tuple[list[Agent], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = partial(number_pipeline, shards, encoder=CuredEncoder("hang", 20, 1, tmp_path / "log"))
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=socket_workers(*one, timeout=1.5)) as loader:
        found = [batch for batch, _ in taken(loader, 24)]
        assert loader.stats()["restarts"] == 1
    assert found == [
        next(each) for each in [sp.SavableLoader(partial(number_pipeline, shards), seed=3, lanes=LANES)] * 24
    ]
    assert "gave no batch in 1.5 s and was killed" in caplog.text and "in fail" in caplog.text


def test_overwritten_shard_is_reported_at_close(tmp_path: Path, one: tuple[list[Agent], Path]) -> None:
    write_numbered_shards(tmp_path / "shards", [84])
    loader = sp.SavableLoader(
        partial(number_pipeline, str(tmp_path / "shards")), seed=3, lanes=2, workers=socket_workers(*one)
    )
    taken(loader, 6)
    shard = tmp_path / "shards/0000.tar"
    raw = shard.read_bytes().replace(b'{"id": ', b'{"id":-')
    time.sleep(0.02)
    shard.write_bytes(raw)
    with pytest.raises(sp.ShardError, match=r"0000\.tar: it was overwritten"):
        taken(loader, 3)
        loader.close()


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.long), "cut"])
def test_lost_node_is_replaced_within_two_seconds(
    shards: str, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = partial(packed_numbers, shards)
    expected = taken(sp.SavableLoader(pipeline, seed=3, lanes=LANES), 30)
    with agents(tmp_path, 1, 2) as (made, key_file), contextlib.ExitStack() as proxies:
        proxy = FaultyProxy(made[1].port)
        proxies.callback(proxy.close)
        workers = sp.SocketWorkers([made[0].address, proxy.address], key_file=key_file)
        with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers) as loader:
            found = taken(loader, 10)
            until(lambda: loader.stats()["num_workers"] == 3 or bool(found.append((next(loader), loader.state_dict()))))
            gone = [made[1].process.pid, *descendants(made[1].process.pid)]
            for pid in gone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
            if how == "cut":
                proxy.troubles = {"silent": 1.0}
            began = time.time()
            while len(found) < 30:
                found.append((next(loader), loader.state_dict()))
            assert found == expected[: len(found)]
            seen = next(each.created for each in caplog.records if "was lost with its link" in each.message) - began
            assert seen < 2.0 + 18.0  # and what a busy machine takes
            assert loader.stats()["restarts"] == 0  # it was not the workers' fault
            until(lambda: loader.stats()["num_workers"] == 1 or next(loader) is None)
            for pid in gone if how == "stopped" else []:
                with contextlib.suppress(ProcessLookupError):  # those before it have ended it
                    os.kill(pid, signal.SIGCONT)
    assert f"node {proxy.address} is lost" in caplog.text


def test_an_agent_may_join_a_running_loader(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_host, "_RETRY_S", 0.1)
    pipeline = partial(packed_numbers, shards)
    expected = sp.SavableLoader(pipeline, seed=3, lanes=LANES)
    with agents(tmp_path, 1, 1) as (made, key_file):
        address = made[1].address
        made[1].end()
        with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=socket_workers(made, key_file)) as loader:
            assert [next(loader) for _ in range(8)] == [next(expected) for _ in range(8)]
            assert loader.stats()["num_workers"] == 1
            made[1] = Agent(key_file, 3, int(address.rpartition(":")[2]))
            until(lambda: next(loader) == next(expected) and loader.stats()["num_workers"] == 4)
            assert [next(loader) for _ in range(8)] == [next(expected) for _ in range(8)]


@pytest.mark.parametrize(
    "large", [pytest.param(False, marks=pytest.mark.long, id="small"), pytest.param(True, id="large")]
)
def test_a_trainer_that_was_stopped_loses_no_node(
    shards: str, nodes: tuple[list[Agent], Path], caplog: pytest.LogCaptureFixture, large: bool
) -> None:
    """With large batches, the agents wait with full sockets meanwhile."""
    pipeline = partial(number_pipeline, shards, encoder=LargeEncoder(300_000) if large else None)
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=socket_workers(*nodes, prefetch=4)) as loader:
        taken(loader, 6)
        until(lambda: loader.stats()["num_workers"] == 3 or next(loader) is None)
        pid = os.getpid()
        subprocess.run(["sh", "-c", f"(kill -STOP {pid}; sleep 2.5; kill -CONT {pid}) & sleep 0.1"], check=True)
        time.sleep(0.5)
        taken(loader, 12)
        time.sleep(2.5)  # a long step
        taken(loader, 12)
    assert "lost" not in caplog.text


def test_slow_link_is_not_mistaken_for_a_lost_one(
    shards: str, nodes: tuple[list[Agent], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A megabyte takes longer than a connection may be silent."""
    made, key_file = nodes
    proxy = FaultyProxy(made[1].port)
    pipeline = partial(number_pipeline, shards, encoder=LargeEncoder(300_000))
    expected = next(sp.SavableLoader(pipeline, seed=3, lanes=LANES))
    workers = sp.SocketWorkers([proxy.address], key_file=key_file, prefetch=1)
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers) as loader:
        proxy.bytes_per_s = 4e5
        try:
            assert bool((next(loader) == expected).all())
        finally:
            proxy.bytes_per_s = None
    proxy.close()
    assert "lost" not in caplog.text


class ArrowEncoder(LargeEncoder):
    """Batches as Arrow tables, whose offsets a changed byte would let point anywhere."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        import pyarrow as pa

        return pa.table({"text": [str(item) for item in items * 5000]})


@pytest.mark.parametrize("trusted", [False, True])
def test_a_changed_body_of_a_table_is_never_a_batch(
    shards: str, one: tuple[list[Agent], Path], caplog: pytest.LogCaptureFixture, trusted: bool
) -> None:
    proxy = FaultyProxy(one[0][0].port)
    pipeline = partial(number_pipeline, shards, encoder=ArrowEncoder())
    expected = sp.SavableLoader(pipeline, seed=3, lanes=LANES)
    workers = sp.SocketWorkers([proxy.address], key_file=one[1], trusted_network=trusted)
    proxy.troubles = {} if trusted else {"changed": 0.3}
    try:
        with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers) as loader:
            for _ in range(12):
                batch = next(loader)
                batch.validate(full=True)
                assert batch.equals(next(expected))
            assert loader.stats()["restarts"] == 0
    finally:
        proxy.close()
    assert trusted or proxy.seen["changed"]
    assert trusted or re.search(rf"with its link to {proxy.address} \(the body of message \d+ was changed", caplog.text)


@pytest.mark.landing
def test_a_network_that_changes_every_body_is_an_error_that_names_the_connection(
    shards: str, one: tuple[list[Agent], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_host, "_RETRY_S", 0.1)
    monkeypatch.setattr(socket_host, "_NO_AGENT_S", 0.5)
    monkeypatch.setattr(socket_host, "_MOST_FAILED", 1)
    proxy = FaultyProxy(one[0][0].port)
    proxy.troubles = {"changed": 1.0}
    pipeline = partial(number_pipeline, shards, encoder=LargeEncoder(100_000))
    workers = sp.SocketWorkers([proxy.address], key_file=one[1])
    changed = rf"no agent answered in 0.5 s \({proxy.address}: the body of message \d+ was changed in transit"
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers) as loader:
        with pytest.raises(sp.WorkerError, match=changed):
            next(loader)
        proxy.troubles = {}
        monkeypatch.setattr(socket_host, "_NO_AGENT_S", 120.0)
        assert bool((next(loader) == next(sp.SavableLoader(pipeline, seed=3, lanes=LANES))).all())
    proxy.close()


def test_socket_workers_need_cryptography_or_a_trusted_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_workers, "can_authenticate_bodies", lambda: False)
    key_file = write_key(tmp_path)
    with pytest.raises(ValueError, match=r"need `cryptography`\. Run pip install cryptography on all machines"):
        sp.SocketWorkers(["127.0.0.1:1"], key_file=key_file)
    with pytest.raises(ValueError, match=r"need `cryptography`\. Run pip install cryptography on all machines"):
        sp.RayWorkers(1, num_cpus=1)
    assert sp.SocketWorkers(["127.0.0.1:1"], key_file=key_file, trusted_network=True).trusted_network


def test_when_no_agent_answers_each_is_named_with_its_reason(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_host, "_FIRST_AGENT_S", 1.0)
    workers = sp.SocketWorkers(["127.0.0.1:1"], key_file=write_key(tmp_path))
    loader = sp.SavableLoader(partial(number_pipeline, shards), seed=3, lanes=LANES, workers=workers)
    with loader, pytest.raises(sp.WorkerError, match=r"answered in 1 s \(127\.0\.0\.1:1: .*refused.*savable serve"):
        next(loader)


def test_sessions_and_their_processes_end_with_their_trainer(shards: str, tmp_path: Path) -> None:
    with agents(tmp_path, 2) as (made, key_file):
        script = (
            "import sys, os, signal; from functools import partial; import savable_pipeline as sp\n"
            "from tests.support.toy_faults import number_pipeline\n"
            "if __name__ == '__main__':\n"
            f"    workers = sp.SocketWorkers([{made[0].address!r}], key_file={str(key_file)!r})\n"
            f"    next(sp.SavableLoader(partial(number_pipeline, {shards!r}), seed=3, lanes=6, workers=workers))\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        (tmp_path / "script.py").write_text(script)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        subprocess.run([sys.executable, str(tmp_path / "script.py")], env=environment, check=False)
        until(lambda: len(descendants(made[0].process.pid)) <= 1)  # multiprocessing's tracker stays


def test_unused_socket_workers_are_not_imported(shards: str) -> None:
    script = (
        "import sys; from functools import partial; import savable_pipeline as sp\n"
        "from tests.support.toy_faults import number_pipeline\n"
        f"loader = sp.SavableLoader(partial(number_pipeline, {shards!r}), seed=3, lanes=6, num_workers=1)\n"
        "next(loader); loader.close()\n"
        "print([name for name in sys.modules if 'run.nodes' in name])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"agents": "cpu1:7000"}, "a list of HOST:PORT"),
        ({"agents": ["cpu1"]}, "'cpu1' must be HOST:PORT"),
        ({"agents": ["cpu1:7000"], "count": 4}, "on the nodes"),
        ({"agents": ["cpu1:7000"], "prefetch": 0}, "prefetch must be at least 1"),
    ],
    ids=["text", "no port", "count", "prefetch"],
)
def test_wrong_settings_are_rejected(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sp.SocketWorkers(**wrong, key_file=write_key(tmp_path))


def test_nodes_use_the_number_of_lanes_that_the_data_determine(shards: str, one: tuple[list[Agent], Path]) -> None:
    pipeline = sp.read(shards).shuffle(5).encode(NumberEncoder()).batch(1)
    expected = taken(sp.SavableLoader(pipeline, seed=3, lanes=8), 20)
    with sp.SavableLoader(pipeline, seed=3, workers=socket_workers(*one)) as loader:
        assert taken(loader, 20) == expected
