"""Peers get the batches that one loader alone gets, whatever they do with them; here they are threads."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.run.loader.savable_loader import run_of
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers.device import OnDevice
from tests.conftest import MakeShards
from tests.support.peer_threads import peer_loaders, run_in_threads, unshared_loader
from tests.support.streams import next_hashes
from tests.support.toy_peers import descendants

pytestmark = pytest.mark.usefixtures("own_interpreters")


@pytest.fixture
def shards(make_shards: MakeShards) -> Path:
    return make_shards([40, 40, 40])


@contextmanager
def closing(found: list[sp.SavableLoader]) -> Iterator[list[sp.SavableLoader]]:
    try:
        yield found
    finally:
        for loader in reversed(found):
            loader.close()


def on_each(found: list[Any], call: Callable[[Any], Any]) -> list[Any]:
    return run_in_threads([partial(call, loader) for loader in found])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("peers", [2, 4])
def test_each_peer_gets_the_batches_of_a_loader_alone(shards: Path, workers: int, peers: int) -> None:
    expected = next_hashes(unshared_loader(shards), 12)
    with closing(peer_loaders(shards, peers, num_workers=workers)) as found:
        assert on_each(found, lambda loader: next_hashes(loader, 12)) == [expected] * peers
        states = [loader.state_dict() for loader in found]
    one = unshared_loader(shards)
    next_hashes(one, 12)
    assert states == [one.state_dict()] * peers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_peer_may_overwrite_its_batches(shards: Path, workers: int) -> None:
    """Each peer writes its own number into each batch, and reads it back after the others have written theirs."""

    def overwrite(numbered: tuple[int, sp.SavableLoader]) -> list[str]:
        number, loader = numbered
        seen, before = [], None
        for _, batch in zip(range(40), loader, strict=False):
            seen.append(digest(batch))
            if before is not None:
                assert bool((before["row"] == number).all()), "another peer changed a batch"
            batch["row"].fill_(number)
            before = batch
        return seen

    expected = next_hashes(unshared_loader(shards), 40)
    with closing(peer_loaders(shards, 3, num_workers=workers)) as found:
        assert on_each(list(enumerate(found)), overwrite) == [expected] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_viewed_batch_stays_valid_while_the_first_rank_takes_others(shards: Path, workers: int) -> None:
    expected = next_hashes(unshared_loader(shards), 30)
    with closing(peer_loaders(shards, 2, num_workers=workers)) as found:
        on_each(found, lambda loader: next_hashes(loader, 1))
        assert next_hashes(found[0], 2) == expected[1:3]
        for number in range(1, 27):
            batch = next(found[1])
            assert next_hashes(found[0], 1) == expected[number + 2 : number + 3]
            assert digest(batch) == expected[number]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_peer_may_collect_many_batches(shards: Path, workers: int) -> None:
    expected = next_hashes(unshared_loader(shards), 20)
    with closing(peer_loaders(shards, 2, num_workers=workers)) as found:
        collected = on_each(found, lambda loader: [next(loader) for _ in range(20)])
        assert [[digest(batch) for batch in batches] for batches in collected] == [expected] * 2
        assert all(loader.stats()["viewed_batches"] <= 8 * 2 + 8 for loader in found)
        del collected
        gc.collect()
        assert [loader.stats()["viewed_batches"] <= 4 for loader in found] == [True] * 2


def test_peers_reuse_segments(shards: Path) -> None:
    def count_segments() -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[4] for line in maps if "savable_pipeline batch" in line})

    gc.collect()
    before = count_segments()
    with closing(peer_loaders(shards, 2)) as found:
        on_each(found, lambda loader: next_hashes(loader, 60))
        assert 1 <= count_segments() - before <= 6


def segments_of(loader: sp.SavableLoader) -> set[Any]:
    """The segments that a peer has mapped."""
    return set(run_of(loader).backend._upstream.reader.segments._segments)  # type: ignore[attr-defined]


def test_descriptor_of_a_segment_is_sent_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, send = [], Channel.send

    def counting(channel: Channel, message: bytes, descriptors: Any = ()) -> None:
        passed.extend(os.fstat(descriptor).st_ino for descriptor in descriptors)
        send(channel, message, descriptors)

    monkeypatch.setattr(Channel, "send", counting)
    with closing(peer_loaders(shards, 2)) as found:
        on_each(found, lambda loader: next_hashes(loader, 40))
        assert len(set(passed)) == len(passed) < 10  # of 40 batches; one that is ahead may not be mapped yet
        assert 1 <= len(segments_of(found[1])) <= len(passed)


def test_segments_of_a_dead_worker_are_unmapped(shards: Path) -> None:
    expected = next_hashes(unshared_loader(shards), 40)
    with closing(peer_loaders(shards, 2, num_workers=1)) as found:
        assert on_each(found, lambda loader: next_hashes(loader, 20)) == [expected[:20]] * 2
        before = segments_of(found[1])
        os.kill(descendants(run_of(found[0]).backend._builder._host.pid)[0], signal.SIGKILL)  # type: ignore[attr-defined]
        assert on_each(found, lambda loader: next_hashes(loader, 20)) == [expected[20:]] * 2
        assert before and not before & segments_of(found[1])


def test_first_rank_requests_less_while_a_peer_is_behind(shards: Path) -> None:
    with closing(peer_loaders(shards, 2, num_workers=2)) as found:  # each of which may be two batches ahead
        on_each(found, lambda loader: next_hashes(loader, 1))
        backend = run_of(found[0]).backend
        assert backend.capacity == 4
        next_hashes(found[0], 2)
        assert backend.capacity == 2
        next_hashes(found[1], 2)
        backend._handle_messages(1.0)  # type: ignore[attr-defined]
        assert backend.capacity == 4


def test_only_the_first_rank_builds_batches(shards: Path) -> None:
    with closing(peer_loaders(shards, 3, num_workers=2)) as found:
        on_each(found, lambda loader: next_hashes(loader, 3))
        assert [loader.stats()["num_workers"] for loader in found] == [2, 0, 0]


@pytest.mark.parametrize("tail", ["stop", "pad"])
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_end_at_the_same_batch_on_all_peers(shards: Path, tail: Any, workers: int) -> None:
    def epochs(loader: sp.SavableLoader) -> list[list[str]]:
        return [next_hashes(loader, 1000) for _ in range(2)]

    expected = epochs(unshared_loader(shards, epochs=1, tail=tail))
    with closing(peer_loaders(shards, 2, epochs=1, tail=tail, num_workers=workers)) as found:
        assert on_each(found, epochs) == [expected] * 2


def test_evaluation_restarts_equally_on_all_peers(shards: Path) -> None:
    def evaluate(loader: sp.SavableLoader) -> list[list[str]]:
        return [next_hashes(loader, 3), next_hashes(loader, 1000), next_hashes(loader, 2)]

    expected = evaluate(unshared_loader(shards, epochs=1, on_iter="restart"))
    with closing(peer_loaders(shards, 2, epochs=1, on_iter="restart", num_workers=1)) as found:
        assert on_each(found, evaluate) == [expected] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_peers_skip_load_and_return_to_the_same_position(shards: Path, workers: int) -> None:
    def travel(loader: sp.SavableLoader) -> list[list[str]]:
        seen = [next_hashes(loader, 3)]
        state = loader.state_dict()
        loader.skip(3)
        seen.append(next_hashes(loader, 3))
        loader.load_state_dict(state)
        seen.append(next_hashes(loader, 2))
        loader.skip(1)
        return [*seen, next_hashes(loader, 2)]

    expected = travel(unshared_loader(shards))
    with closing(peer_loaders(shards, 3, num_workers=workers)) as found:
        assert on_each(found, travel) == [expected] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_peers_apply_the_same_decisions(shards: Path, workers: int) -> None:
    def decide(loader: sp.SavableLoader) -> list[Any]:
        seen = next_hashes(loader, 3)
        loader.reconfigure(exclude=["0001", "0017"])
        return [*seen, *next_hashes(loader, 6), loader.state_dict()]

    expected = decide(unshared_loader(shards))
    with closing(peer_loaders(shards, 2, num_workers=workers)) as found:
        assert on_each(found, decide) == [expected] * 2


def test_on_device_saves_the_batch_before_the_one_ahead(shards: Path) -> None:
    def train(loader: sp.SavableLoader) -> list[Any]:
        batches = OnDevice(loader, "cpu")
        return [*next_hashes(batches, 3), batches.state_dict(), *next_hashes(batches, 2)]

    expected = train(unshared_loader(shards))
    with closing(peer_loaders(shards, 2, num_workers=1)) as found:
        assert on_each(found, train) == [expected] * 2


def test_a_closed_loader_continues_when_all_are_closed(shards: Path) -> None:
    def train(loader: sp.SavableLoader) -> list[str]:
        seen = next_hashes(loader, 4)
        loader.close()
        return [*seen, *next_hashes(loader, 3)]

    with closing(peer_loaders(shards, 2, num_workers=1)) as found:
        assert on_each(found, train) == [next_hashes(unshared_loader(shards), 7)] * 2


def test_peers_may_prefetch_different_numbers_of_batches(shards: Path) -> None:
    """After the first batch, the first rank takes two more before the other one takes any, and ends before it."""
    expected = next_hashes(unshared_loader(shards), 4)
    with closing(peer_loaders(shards, 2, num_workers=1)) as found:
        assert on_each(found, lambda loader: next_hashes(loader, 1)) == [expected[:1]] * 2
        assert next_hashes(found[0], 2) == expected[1:3]
        assert on_each(found, lambda loader: next_hashes(loader, 1 if loader is found[0] else 3)) == [
            expected[3:],
            expected[1:],
        ]


# What ends all peers.


def test_peers_at_different_positions_are_an_error_on_all_ranks(shards: Path) -> None:
    one = unshared_loader(shards)
    next_hashes(one, 3)
    with closing(peer_loaders(shards, 3)) as found:
        found[2].load_state_dict(one.state_dict())
        errors = on_each(found, next)
        assert all(isinstance(error, SavableError) for error in errors)
        assert {str(error) for error in errors} == {
            "ranks 2 and 0 share batches, but not their steps: ('batch', 3) and ('batch', 0). Load, skip and take "
            "batches alike on each of them."
        }


def test_another_position_of_one_lane_is_an_error_on_all_ranks(shards: Path) -> None:
    one = unshared_loader(shards)
    next_hashes(one, 4)
    with closing(peer_loaders(shards, 2)) as found:
        found[0].load_state_dict(one.state_dict())
        assert all("ranks 1 and 0 share batches" in str(error) for error in on_each(found, next))


def test_loading_on_one_rank_alone_is_an_error_on_all_before_a_batch(shards: Path) -> None:
    with closing(peer_loaders(shards, 2)) as found:
        on_each(found, lambda loader: next_hashes(loader, 3))
        found[0].load_state_dict(unshared_loader(shards).state_dict())
        assert all("ranks 1 and 0 share batches" in str(error) for error in on_each(found, next))


def test_another_seed_is_an_error(shards: Path) -> None:
    first = peer_loaders(shards, 2, workers=sp.Workers(timeout=0.5))
    other = unshared_loader(shards, seed=6, ranks=run_of(first[1]).ranks)
    with closing([first[0], other]) as found:
        with pytest.raises(SavableError, match=r"rank 0 waited 0\.5 s for rank 1"):
            next(found[0])
        with pytest.raises(ValueError, match="rank 1 has seed=6, but rank 0 has seed=5"):
            next(found[1])


def test_a_different_first_batch_is_an_error_on_all(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10))
    module = "savable_pipeline.run.peers.peer_backend.digest"
    monkeypatch.setattr(module, lambda batch: f"{digest(batch)} {next(count)}")
    with closing(peer_loaders(shards, 2)) as found:
        assert all(
            "the first batch of rank 1 differs from that of rank 0" in str(error) for error in on_each(found, next)
        )


def test_a_skip_on_one_rank_alone_is_an_error_on_all(shards: Path) -> None:
    with closing(peer_loaders(shards, 2)) as found:
        on_each(found, lambda loader: next_hashes(loader, 2))
        found[0].skip(1)
        errors = on_each(found, lambda loader: next_hashes(loader, 8))
        assert all(isinstance(error, SavableError) for error in errors)
        assert all("ranks 1 and 0 share batches, but not their steps" in str(error) for error in errors)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_encoder_is_raised_on_all_and_may_be_repeated(
    shards: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Any, sample: sp.Sample, rng: sp.Rng) -> Any:
        if sample.json()["id"] == 33:
            raise ValueError("number 33")
        return {"row": torch.zeros(6000)}

    monkeypatch.setattr("tests.support.peer_threads.Rows.encode", encode)

    def train(loader: sp.SavableLoader) -> list[Any]:
        seen: list[Any] = []
        try:
            while True:
                seen.append(digest(next(loader)))
        except SavableError as error:
            seen.append((type(error), str(error).splitlines()[0], loader.state_dict()))
        with pytest.raises(SavableError, match="number 33"):
            next(loader)
        return seen

    expected = train(unshared_loader(shards))
    with closing(peer_loaders(shards, 2, num_workers=workers)) as found:
        assert on_each(found, train) == [expected] * 2


def test_peer_that_does_not_connect_is_named(shards: Path) -> None:
    with closing(peer_loaders(shards, 3, workers=sp.Workers(timeout=6))) as found:
        on_each(found, lambda loader: loader.state_dict())  # so that both come in time
        errors = on_each(found[:2], next)
        assert all(isinstance(error, SavableError) and "rank 2" in str(error) for error in errors)


def test_a_peer_that_takes_no_batches_is_named(shards: Path) -> None:
    with closing(peer_loaders(shards, 2, workers=sp.Workers(timeout=4))) as found:
        on_each(found, next)
        with pytest.raises(WorkerError, match="rank 0 waited 4 s for rank 1"):
            next_hashes(found[0], 5)
        states = [loader.state_dict() for loader in found]
        with pytest.raises(WorkerError, match="rank 0 waited 4 s for rank 1"):
            next_hashes(found[1], 5)
    resumed = unshared_loader(shards)
    resumed.load_state_dict(states[1])
    assert next_hashes(resumed, 3) == next_hashes(unshared_loader(shards), 4)[1:]


def test_rank_that_closed_its_loader_is_named(shards: Path) -> None:
    with closing(peer_loaders(shards, 2)) as found:
        on_each(found, next)
        found[0].close()
        with pytest.raises(SavableError, match="rank 0 closed its loader, which shares batches with rank 1"):
            next(found[1])


def test_a_first_rank_that_hangs_is_named(shards: Path) -> None:
    with closing(peer_loaders(shards, 2, workers=sp.Workers(timeout=2))) as found:
        on_each(found, next)
        with pytest.raises(WorkerError, match="rank 1 waited 2 s for rank 0"):
            next(found[1])


def test_a_rank_that_waits_for_another_is_not_named(shards: Path) -> None:
    """The first rank waits for rank 2, and rank 1 for the first one, which gives signs of life."""
    with closing(peer_loaders(shards, 3, workers=sp.Workers(timeout=5))) as found:
        on_each(found, next)
        errors = on_each(found[:2], lambda loader: next_hashes(loader, 5))
        assert all("rank 0 waited 5 s for rank 2" in str(error) for error in errors)


def test_peers_wait_for_a_hanging_worker_to_be_replaced(shards: Path) -> None:
    """The first rank kills them after one timeout, and needs a part of another until their successors build."""
    expected = next_hashes(unshared_loader(shards), 30)
    with closing(peer_loaders(shards, 2, num_workers=2, workers=sp.Workers(timeout=5))) as found:
        assert on_each(found, lambda loader: next_hashes(loader, 5)) == [expected[:5]] * 2
        zygote = run_of(found[0]).backend._builder._host.pid  # type: ignore[attr-defined]
        for worker in descendants(zygote):
            os.kill(worker, signal.SIGSTOP)
        assert on_each(found, lambda loader: next_hashes(loader, 25)) == [expected[5:]] * 2
        assert found[0].stats()["restarts"] >= 2


def test_a_lost_peer_of_another_loader_frees_no_segment(shards: Path) -> None:
    """Two loaders of a process may have other peers by the same number."""
    with closing(peer_loaders(shards, 2)) as found, closing(peer_loaders(shards, 2)) as others:
        on_each(others, next)
        batches = on_each(found, next)
        segments = list(run_of(found[0]).backend._own.segments._segments.values())  # type: ignore[attr-defined]
        assert 1 in [each.flags[1] for each in segments]
        run_of(others[1]).backend._upstream._channel._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        with pytest.raises(SavableError, match="rank 1 ended"):
            next_hashes(others[0], 5)
        assert 1 in [each.flags[1] for each in segments]
        del batches


def test_a_peer_that_closes_its_loader_ends_the_first_rank(shards: Path) -> None:
    """As one does that failed, such as for want of descriptors."""
    with closing(peer_loaders(shards, 3)) as found:
        on_each(found, next)
        found[2].close()
        for loader in found[:2]:
            with pytest.raises(SavableError, match="rank 2 closed its loader, which shares batches with rank 0"):
                next(loader)


def test_acknowledging_loader_is_rejected_by_peers(shards: Path) -> None:
    with pytest.raises(ValueError, match="peers would acknowledge at different times"):
        peer_loaders(shards, 2, acknowledge=True)


def test_only_the_first_rank_writes_the_ledger(shards: Path, tmp_path: Path) -> None:
    with closing(peer_loaders(shards, 2, ledger=tmp_path / "ledger")) as found:
        on_each(found, lambda loader: next_hashes(loader, 3))
        on_each(found, lambda loader: loader.state_dict())
    assert len(list((tmp_path / "ledger").iterdir())) == 1
