"""Nobody gets in without the key; and who tries takes little memory, few descriptors, and one line of the log."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import savable_pipeline as sp
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.nodes.agent import Agent as NodeAgent
from savable_pipeline.run.nodes.agent import read_address
from tests.conftest import write_numbered_shards
from tests.support.agents import Agent, agents, socket_workers
from tests.support.toy_faults import number_pipeline


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Path]]:
    with agents(tmp_path_factory.mktemp("agent"), 1) as (made, key_file):
        yield made[0], key_file


def connected(agent: Agent) -> socket.socket:
    return socket.create_connection(("127.0.0.1", agent.port), 60)


def greeted(agent: Agent, key: bytes, purpose: int = wire.FOR_SESSION) -> tuple[socket.socket, wire.Secret]:
    end = connected(agent)
    return end, wire.greet(end, key, wire.LinkRequest(purpose, os.urandom(16), False))


def is_refused(end: socket.socket) -> bool:
    """Return whether the agent closes the connection before it answers."""
    end.settimeout(60)
    try:
        found = b""
        while more := end.recv(4096):
            found += more
        return len(found) <= wire.HELLO_BYTES
    except ConnectionError:
        return True


def test_a_wrong_key_is_rejected_by_either_side(guarded: tuple[Agent, Path]) -> None:
    with pytest.raises(ConnectionError, match="the same --key-file"):
        greeted(guarded[0], b"another key, of others")
    ours, theirs = socket.socketpair()
    theirs.sendall(wire.new_hello() + bytes(32))  # no agent, but who wants a trainer to unpickle
    with pytest.raises(ConnectionError, match="has another key"):
        wire.greet(ours, b"a key of ours, a secret", wire.LinkRequest(1, bytes(16), False))


HUGE = wire.HEADER.pack(wire.WIRE_MAGIC, 1, 9, 0, 1 << 60, bytes(32), bytes(16)) * 3


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(wire.REPLY_BYTES),
        HUGE,
    ],
    ids=["a port scanner", "zeros", "a frame of 2**60 bytes"],
)
def test_messages_without_the_key_are_rejected(guarded: tuple[Agent, Path], sent: bytes) -> None:
    with connected(guarded[0]) as end:
        end.sendall(sent)
        assert is_refused(end)


def test_half_a_handshake_is_rejected_in_seconds(guarded: tuple[Agent, Path]) -> None:
    with connected(guarded[0]) as end:
        end.sendall(b"x" * 40)
        assert is_refused(end)


def test_a_recorded_handshake_cannot_be_replayed(guarded: tuple[Agent, Path]) -> None:
    """Neither the proof of another connection, nor the agent's own."""
    key = wire.read_key(guarded[1])
    said: list[bytes] = []

    class Heard(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            said.append(bytes(data))
            super().sendall(data, flags)

    with Heard() as end:
        end.connect(("127.0.0.1", guarded[0].port))
        wire.greet(end, key, wire.LinkRequest(wire.FOR_SESSION, os.urandom(16), False))
    with connected(guarded[0]) as again:
        again.sendall(said[0])
        assert is_refused(again)


SECRET = wire.Secret(b"a" * 64, b"b" * 64)
OTHER_END = wire.Secret(SECRET.receive_key, SECRET.send_key)
BODY = bytes(range(256)) * 40


def sent(secret: wire.Secret, *heads: bytes, body: bytes = BODY) -> list[bytearray]:
    """What passes when these frames are sent."""
    ours, theirs = socket.socketpair()
    link, found = wire.Link(ours, secret), []
    for head in heads:
        link.send(wire.REQUEST, head, [body] if body else [])
        found.append(bytearray(theirs.recv(1 << 20)))
    return found


def received(passed: bytes, secret: wire.Secret = OTHER_END) -> tuple[list[bytes], str]:
    """The heads of the frames that arrive, and why no more do."""
    ours, theirs = socket.socketpair()
    ours.sendall(passed)
    ours.close()
    link, found = wire.Link(theirs, secret), []
    with contextlib.closing(link):
        while True:
            try:
                frames = link.receive()
            except (wire.WireError, EOFError) as error:
                return found, str(error)
            assert all(bytes(each.body) in (b"", BODY) for each in frames)
            found += [bytes(each.head) for each in frames]


def test_changed_byte_of_a_frame_is_rejected() -> None:
    frame = sent(SECRET, b"a pickle")[0]
    assert received(frame)[0] == [b"a pickle"]
    header = wire.HEADER.size + wire.CODE_BYTES
    for at in [*range(header + 8), *random.Random(7).sample(range(header + 8, len(frame)), 40), len(frame) - 1]:
        changed = bytearray(frame)
        changed[at] ^= 1 << at % 8
        found, why = received(changed)
        assert not found and "message 0" in why


@pytest.mark.parametrize("trusted", [False, True])
def test_mutated_stream_never_yields_another_frame(trusted: bool) -> None:
    """On a trusted network, the bodies alone may be others."""
    draw = random.Random(f"streams {trusted}")
    here, there = SECRET._replace(trusted=trusted), OTHER_END._replace(trusted=trusted)
    frames = sent(here, b"0", b"1", b"2", b"3", body=b"" if trusted else BODY)
    foreign = sent(here._replace(send_key=b"c" * 64), b"4") + sent(there, b"5")  # another connection's; the other end's
    for _ in range(300):
        stream = [bytes(each) for each in frames]
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(stream))
            how = draw.choice(["cut", "twice", "swap", "lose", "foreign", "flip", "insert"])
            if how == "cut":
                stream[at] = stream[at][: draw.randrange(len(stream[at]) + 1)]
            elif how == "twice":
                stream.insert(at, stream[at])
            elif how == "swap":
                other = draw.randrange(len(stream))
                stream[at], stream[other] = stream[other], stream[at]
            elif how == "lose":
                del stream[at]
                stream.append(b"")
            elif how == "foreign":
                stream.insert(at, bytes(draw.choice(foreign)))
            elif how == "flip" and stream[at]:
                raw = bytearray(stream[at])
                raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
                stream[at] = bytes(raw)
            else:
                stream.insert(at, draw.randbytes(draw.randint(1, 200)))
        found, _ = received(b"".join(stream), there)
        assert found == [b"0", b"1", b"2", b"3"][: len(found)]


def test_forged_header_uses_no_memory() -> None:
    ours, theirs = socket.socketpair()
    header = wire.HEADER.pack(wire.WIRE_MAGIC, wire.ANSWER, 1 << 30, 0, 1 << 36, bytes(32), bytes(16))
    ours.sendall(header + bytes(wire.CODE_BYTES))
    link = wire.Link(theirs, OTHER_END)
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError, match="was not sent by the other side"):
            link.receive()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at_once", [wire._GMAC_BYTES, 100])
def test_body_is_authenticated_with_aes_gcm(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's other interface is the oracle; the pieces of a body count as one."""
    monkeypatch.setattr(wire, "_GMAC_BYTES", at_once)
    ours, theirs = socket.socketpair()
    link = wire.Link(ours, SECRET)
    for number, body in enumerate([[BODY], [BODY[:1], b"", BODY[1:77], BODY[77:]]]):
        link.send(wire.ANSWER, b"", body)
        *_, code = wire.HEADER.unpack_from(theirs.recv(1 << 20))
        assert code == AESGCM(SECRET.send_key[32:]).encrypt(number.to_bytes(12, "little"), b"", BODY)


def test_keys_differ_by_connection_and_by_direction() -> None:
    key, secrets = b"a key of ours, a secret", []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        hello = wire.new_hello()
        theirs.sendall(hello)
        with ThreadPoolExecutor(1) as pool:
            greeted = pool.submit(wire.greet, ours, key, wire.LinkRequest(1, bytes(16), False))
            found = wire.check_reply(key, hello, theirs.recv(4096))
            assert found is not None
            theirs.sendall(found[0])
            assert greeted.result() == (found[2].receive_key, found[2].send_key, False)
        secrets.append(found[2])
    parts = [raw[at : at + 32] for each in secrets for raw in each[:2] for at in (0, 32)]
    assert len(set(parts)) == 8


def test_mutated_handshake_is_rejected() -> None:
    key, draw = b"a key of ours, a secret", random.Random(7)
    for _ in range(500):
        hello = wire.new_hello()
        ours, theirs = socket.socketpair()
        theirs.sendall(hello + bytes(32))
        with pytest.raises(ConnectionError, match="has another key"):
            wire.greet(ours, key, wire.LinkRequest(1, bytes(16), False))
        reply = bytearray(theirs.recv(4096))
        assert wire.check_reply(key, hello, reply) is not None
        assert wire.check_reply(key, wire.new_hello(), reply) is None  # it was for another connection
        reply[draw.randrange(len(reply))] ^= 1 << draw.randrange(8)
        assert wire.check_reply(key, hello, reply) is None


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"", b""),
        (struct.pack("<QI", 5, 1 << 31), b""),
        (struct.pack("<QIQ", 5, 1, 65), bytes(64)),
        (struct.pack("<QIQ", 5, 1, 64), bytes(128)),
        (struct.pack("<QI2Q", 5, 2, 64, (1 << 64) - 64), bytes(64)),
    ],
    ids=["no numbers", "more buffers than numbers", "a short body", "a long body", "a sum beyond 64 bits"],
)
def test_an_answer_with_other_lengths_than_its_parts_is_not_unpickled(head: bytes, body: bytes) -> None:
    frame = wire.Frame(wire.ANSWER, bytearray(head + pickle.dumps(None)) if head else bytearray(), memoryview(body))
    with pytest.raises(wire.WireError, match="answer"):
        wire.read_answer(frame)


def test_two_hundred_silent_connections_do_not_block_others(guarded: tuple[Agent, Path], tmp_path: Path) -> None:
    agent, key_file = guarded
    write_numbered_shards(tmp_path / "shards", [40])
    before = len(os.listdir(f"/proc/{agent.process.pid}/fd"))  # noqa: PTH208
    strangers = [connected(agent) for _ in range(200)]
    try:
        pipeline = partial(number_pipeline, str(tmp_path / "shards"))
        expected = sp.SavableLoader(pipeline, seed=3, lanes=6)
        with sp.SavableLoader(pipeline, seed=3, lanes=6, workers=socket_workers([agent], key_file)) as loader:
            assert [next(loader) for _ in range(10)] == [next(expected) for _ in range(10)]
            assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) < before + 80  # noqa: PTH208
    finally:
        for each in strangers:
            each.close()
    assert agent.log.read_text().count("rejected") == 1  # in the first minute, with all that the tests above did


def test_worker_without_a_session_is_rejected(guarded: tuple[Agent, Path]) -> None:
    with pytest.raises(ConnectionError):
        greeted(guarded[0], wire.read_key(guarded[1]), wire.FOR_WORKER)


@pytest.mark.parametrize(
    ("mode", "key", "message"),
    [(0o644, b"x" * 32, "chmod 600"), (0o600, b"x" * 15, "15 bytes"), (0o640, b"x" * 32, "read by other users")],
)
def test_weak_key_is_rejected(tmp_path: Path, mode: int, key: bytes, message: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(key + b"\n")
    file.chmod(mode)
    with pytest.raises(ValueError, match=message):
        wire.read_key(file)
    with pytest.raises(ValueError, match=r"No such file.*Create a key"):
        wire.read_key(tmp_path / "none")


def test_a_key_file_that_is_a_pipe_is_rejected_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        wire.read_key(tmp_path / "pipe")


def test_a_key_file_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"x" * 32)
    file.chmod(0o600)
    if os.geteuid() == 0:
        assert wire.read_key(file) == b"x" * 32
        os.chown(file, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(ValueError, match=r"belongs to user \d+, who could run code as you"):
        wire.read_key(file)


@pytest.mark.parametrize(("listen", "warns"), [("0.0.0.0:0", True), ("0:0", True), ("127.0.0.1:0", False)])
def test_agent_on_all_interfaces_warns(listen: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    NodeAgent(listen, b"k" * 32, 1).close()
    assert ("listens on every network" in caplog.text) is warns


@pytest.mark.parametrize("address", ["7000", ":7000", "cpu1:", "cpu1:70000", "cpu1:http"])
def test_an_agent_binds_to_an_address_that_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        read_address(address)


def test_address_of_another_machine_is_an_error_with_a_fix() -> None:
    with pytest.raises(OSError, match=r"^192\.0\.2\.1:0: .*\. Use an address of this machine, and a free port"):
        NodeAgent("192.0.2.1:0", b"k" * 32, 1)


def test_an_interrupt_while_a_frame_arrives_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    sender, taker = wire.Link(ours, SECRET), wire.Link(theirs, OTHER_END)
    sender.send(wire.REQUEST, b"a pickle")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(wire.hmac, "compare_digest", interrupted)
        taker.receive()
    with pytest.raises(wire.WireError, match="interrupted"):
        taker.receive()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (0, 2)], ids=["twice", "swapped", "one lost"])
def test_repeated_or_reordered_frames_end_the_connection(order: tuple[int, int]) -> None:
    frames = sent(SECRET, b"0", b"1", b"2")
    found, why = received(b"".join(frames[number] for number in order))
    assert found == [b"0"][: 1 - order[0]] and "arrived instead of" in why
