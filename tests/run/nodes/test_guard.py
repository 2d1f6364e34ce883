"""Nobody gets in without the key; and who tries takes little memory, few descriptors, and one line of the log."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline.run.nodes import handshake, wire
from savable_pipeline.run.nodes.agent import Agent as NodeAgent
from savable_pipeline.run.nodes.agent import read_address
from tests.conftest import write_numbered_shards
from tests.support.agents import Agent, agents, remote
from tests.support.toy_faults import number_pipeline


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Path]]:
    with agents(tmp_path_factory.mktemp("agent"), 1) as (made, key_file):
        yield made[0], key_file


def connected(agent: Agent) -> socket.socket:
    return socket.create_connection(("127.0.0.1", agent.port), 60)


def greeted(agent: Agent, key: bytes, purpose: int = handshake.FOR_SESSION) -> tuple[socket.socket, wire.Secret]:
    end = connected(agent)
    return end, handshake.greet(end, key, handshake.Wanted(purpose, os.urandom(16), 1))


def is_refused(end: socket.socket) -> bool:
    """Whether the agent closes the connection before it answers."""
    end.settimeout(60)
    try:
        found = b""
        while more := end.recv(4096):
            found += more
        return len(found) <= handshake.HELLO_BYTES
    except ConnectionError:
        return True


def test_a_wrong_key_is_refused_by_either_side(guarded: tuple[Agent, Path]) -> None:
    with pytest.raises(ConnectionError, match="the same --key-file"):
        greeted(guarded[0], b"another key, of others")
    ours, theirs = socket.socketpair()
    theirs.sendall(handshake.new_hello() + bytes(32))  # no agent, but who wants a trainer to unpickle
    with pytest.raises(ConnectionError, match="has not proved that it has the key"):
        handshake.greet(ours, b"a key of ours, a secret", handshake.Wanted(1, bytes(16), 1))


HUGE = struct.pack("<4sBxxxI8sQIQ", b"SvP1", 1, 1, bytes(8), 0, 9, 1 << 60) * 3


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(handshake.REPLY_BYTES),
        HUGE,
    ],
    ids=["a port scanner", "zeros", "a frame of 2**60 bytes"],
)
def test_what_strangers_send_is_refused(guarded: tuple[Agent, Path], sent: bytes) -> None:
    with connected(guarded[0]) as end:
        end.sendall(sent)
        assert is_refused(end)


def test_half_a_handshake_is_refused_in_seconds(guarded: tuple[Agent, Path]) -> None:
    with connected(guarded[0]) as end:
        end.sendall(b"x" * 40)
        assert is_refused(end)


def test_what_was_heard_cannot_be_said_again(guarded: tuple[Agent, Path]) -> None:
    """Neither the proof of another connection, nor the agent's own."""
    key = handshake.read_key(guarded[1])
    said: list[bytes] = []

    class Heard(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            said.append(bytes(data))
            super().sendall(data, flags)

    with Heard() as end:
        end.connect(("127.0.0.1", guarded[0].port))
        handshake.greet(end, key, handshake.Wanted(handshake.FOR_SESSION, os.urandom(16), 1))
    with connected(guarded[0]) as again:
        again.sendall(said[0])
        assert is_refused(again)


@pytest.mark.parametrize("forged", ["kind", "nonce", "generation", "number", "length", "head", "key"])
def test_a_frame_that_is_not_the_next_of_its_connection_ends_it(forged: str) -> None:
    ours, theirs = socket.socketpair()
    secret = wire.Secret(b"a" * 32, b"b" * 32, b"nonce...", 7)
    mine = wire.Link(ours, wire.Secret(secret.receives, secret.sends, secret.nonce, 7))
    sends = secret._replace(
        nonce=b"another." if forged == "nonce" else secret.nonce,
        generation=8 if forged == "generation" else 7,
        sends=b"c" * 32 if forged == "key" else secret.sends,
    )
    caught, relayed = socket.socketpair()
    wire.Link(caught, sends).send(wire.REQUEST, b"a pickle")
    frame = bytearray(relayed.recv(4096))
    places = {"kind": 4, "number": 20, "head": len(frame) - 1}
    if forged in places:
        frame[places[forged]] ^= 1
    if forged == "length":
        frame[28:44] = struct.pack("<IQ", 8, 1 << 60) + frame[40:44]
    theirs.sendall(frame)
    with pytest.raises(wire.WireError):
        mine.receive()
    good = socket.socketpair()
    wire.Link(good[0], secret).send(wire.REQUEST, b"a pickle")
    taker = wire.Link(good[1], wire.Secret(secret.receives, secret.sends, secret.nonce, 7))
    assert [bytes(each.head) for each in taker.receive()] == [b"a pickle"]


def test_two_hundred_that_say_nothing_keep_nobody_out(guarded: tuple[Agent, Path], tmp_path: Path) -> None:
    agent, key_file = guarded
    write_numbered_shards(tmp_path / "shards", [40])
    before = len(os.listdir(f"/proc/{agent.process.pid}/fd"))  # noqa: PTH208
    strangers = [connected(agent) for _ in range(200)]
    try:
        pipeline = partial(number_pipeline, str(tmp_path / "shards"))
        expected = sp.SavableLoader(pipeline, seed=3, lanes=6)
        with sp.SavableLoader(pipeline, seed=3, lanes=6, workers=remote([agent], key_file)) as loader:
            assert [next(loader) for _ in range(10)] == [next(expected) for _ in range(10)]
            assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) < before + 80  # noqa: PTH208
    finally:
        for each in strangers:
            each.close()
    assert agent.log.read_text().count("refused") == 1  # in the first minute, with all that the tests above did


def test_a_worker_of_no_session_is_refused(guarded: tuple[Agent, Path]) -> None:
    with pytest.raises(ConnectionError):
        greeted(guarded[0], handshake.read_key(guarded[1]), handshake.FOR_WORKER)


@pytest.mark.parametrize(
    ("mode", "key", "message"),
    [(0o644, b"x" * 32, "chmod 600"), (0o600, b"x" * 15, "15 bytes"), (0o640, b"x" * 32, "read by others")],
)
def test_a_key_that_is_no_secret_is_refused(tmp_path: Path, mode: int, key: bytes, message: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(key + b"\n")
    file.chmod(mode)
    with pytest.raises(ValueError, match=message):
        handshake.read_key(file)
    with pytest.raises(ValueError, match=r"No such file.*is made by"):
        handshake.read_key(tmp_path / "none")


@pytest.mark.parametrize("address", ["7000", ":7000", "cpu1:", "cpu1:70000", "cpu1:http"])
def test_an_agent_binds_to_an_address_that_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="no HOST:PORT"):
        read_address(address)


def test_an_address_of_another_machine_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(OSError, match=r"^192\.0\.2\.1:0: .*; give an address of this machine, and a free port"):
        NodeAgent("192.0.2.1:0", b"k" * 32, 1)


def test_an_interrupt_while_a_frame_arrives_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    secret = wire.Secret(b"a" * 32, b"a" * 32, b"nonce...", 7)
    sender, taker = wire.Link(ours, secret), wire.Link(theirs, secret)
    sender.send(wire.REQUEST, b"a pickle")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(wire.hmac, "compare_digest", interrupted)
        taker.receive()
    with pytest.raises(wire.WireError, match="interrupted"):
        taker.receive()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (0, 2)], ids=["twice", "swapped", "one lost"])
def test_whole_frames_that_come_twice_or_in_another_order_end_the_connection(order: tuple[int, int]) -> None:
    caught, relayed = socket.socketpair()
    secret = wire.Secret(b"a" * 32, b"a" * 32, b"nonce...", 7)
    sender = wire.Link(caught, secret)
    frames = []
    for number in range(3):
        sender.send(wire.REQUEST, b"request %d" % number)
        frames.append(relayed.recv(4096))
    ours, theirs = socket.socketpair()
    ours.sendall(b"".join(frames[number] for number in order))
    taker, found = wire.Link(theirs, secret), []
    with pytest.raises(wire.WireError, match="one is lost, or came twice"):
        for _ in range(4):
            found += [bytes(each.head) for each in taker.receive()]
    assert found == [b"request 0"][: 1 - order[0]]
