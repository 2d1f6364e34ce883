"""Peers of several machines: descriptors that do not pass, as between two of them; and who is let in."""

from __future__ import annotations

import os
import socket
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.savable_loader import run_of
from savable_pipeline.run.peers import meeting
from tests.conftest import MakeShards
from tests.run.peers.test_peer_backend import closing
from tests.support.peer_threads import DictStore, peer_loaders, run_in_threads, unshared_loader
from tests.support.streams import next_hashes

pytestmark = pytest.mark.usefixtures("own_interpreters")
caller = threading.local()


def on_machines(found: list[sp.SavableLoader], call: Any, machines: list[int], monkeypatch: Any) -> list[Any]:
    """Call a function for each loader, of which no descriptor passes between the machines."""
    reach = meeting.reach

    def reach_own(family: int, address: Any) -> Any:
        if family == socket.AF_UNIX:
            values = run_of(found[0]).ranks.sharing.store.values  # type: ignore[union-attr]
            key = next(key for key, value in list(values.items()) if value == repr(address).encode())
            if machines[int(key.split()[-1])] != caller.machine:
                return None
        return reach(family, address)

    def called(number: int) -> Any:
        caller.machine = machines[number]
        return call(found[number])

    monkeypatch.setattr(meeting, "reach", reach_own)
    return run_in_threads([partial(called, number) for number in range(len(found))])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("machines", [[0, 1], [0, 0, 1, 1], [0, 1, 2, 1], [0, 1, 0, 1]])
def test_peers_of_other_machines_get_the_same_batches(
    make_shards: MakeShards, machines: list[int], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards([40, 40, 40])

    def train(loader: sp.SavableLoader) -> list[Any]:
        seen: list[Any] = []
        for _, batch in zip(range(8), loader, strict=False):
            seen += next_hashes([batch], 1)
            batch["row"].fill_(7)  # its own
        loader.skip(2)
        return [*seen, *next_hashes(loader, 3), loader.state_dict()]

    expected = train(unshared_loader(shards))
    with closing(peer_loaders(shards, len(machines), num_workers=workers)) as found:
        assert on_machines(found, train, machines, monkeypatch) == [expected] * len(machines)


def test_epochs_end_alike_on_two_machines(make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards([40, 40, 40])

    def epochs(loader: sp.SavableLoader) -> list[list[str]]:
        return [next_hashes(loader, 1000) for _ in range(2)]

    expected = epochs(unshared_loader(shards, epochs=1))
    with closing(peer_loaders(shards, 3, epochs=1)) as found:
        assert on_machines(found, epochs, [0, 1, 1], monkeypatch) == [expected] * 3


def test_the_first_rank_does_not_wait_for_the_network(make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machine takes nothing while the first rank takes batches that no socket has room for."""

    def encode(encoder: Any, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"], "row": torch.full((2_000_000,), rng.random())}

    monkeypatch.setattr("tests.support.peer_threads.Rows.encode", encode)
    shards = make_shards([40])
    expected = next_hashes(unshared_loader(shards), 4)
    with closing(peer_loaders(shards, 2, workers=sp.Workers(timeout=20))) as found:
        assert on_machines(found, partial(take_some, 1), [0, 1], monkeypatch) == [expected[:1]] * 2
        assert next_hashes(found[0], 2) == expected[1:3]
        rest = [partial(next_hashes, found[0], 1), partial(next_hashes, found[1], 3)]
        assert run_in_threads(rest) == [expected[3:], expected[1:]]


def test_bytes_of_a_batch_are_sent_once_per_machine(make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards([40, 40, 40])
    with closing(peer_loaders(shards, 4)) as found:
        on_machines(found, partial(take_some, 2), [0, 1, 1, 1], monkeypatch)
        readers = [[peer.rank for peer in run_of(loader).backend._readers] for loader in found]  # type: ignore[attr-defined]
        assert readers == [[1], [2, 3], [], []]


def take_some(number: int, loader: sp.SavableLoader) -> list[str]:
    return next_hashes(loader, number)


def test_positions_that_differ_on_two_machines_are_an_error_on_all(
    make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards([40, 40, 40])
    one = unshared_loader(shards)
    next_hashes(one, 3)
    with closing(peer_loaders(shards, 3)) as found:
        found[2].load_state_dict(one.state_dict())
        errors = on_machines(found, next, [0, 1, 1], monkeypatch)
        assert all("share batches, but not their steps" in str(error) for error in errors)


def test_a_process_without_the_secret_is_rejected(make_shards: MakeShards) -> None:
    """It connects to the first rank while that waits; the peers meet all the same."""
    shards = make_shards([40, 40, 40])
    with closing(peer_loaders(shards, 2)) as found:
        store: DictStore = run_of(found[0]).ranks.sharing.store  # type: ignore[union-attr]
        results: list[Any] = []
        first = threading.Thread(target=lambda: results.append(next_hashes(found[0], 3)))
        first.start()
        while not any(key.endswith("unix 0") for key in list(store.values)):
            time.sleep(0.01)
        address = next(value for key, value in list(store.values.items()) if key.endswith("unix 0"))
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(eval(address))
        stranger.sendall(os.urandom(200))
        results.append(next_hashes(found[1], 3))
        first.join()
        assert results == [next_hashes(unshared_loader(shards), 3)] * 2
        stranger.settimeout(5)
        with pytest.raises(OSError):
            while stranger.recv(100):
                pass
            raise OSError("closed")
        stranger.close()


def test_peers_of_two_users_are_rejected(make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting.os, "geteuid", lambda: 4711)
    with closing(peer_loaders(make_shards([40]), 2)) as found:
        errors = run_in_threads([partial(next, loader) for loader in found])
        assert all(isinstance(error, SavableError) and "as users 4711 and 0" in str(error) for error in errors)
