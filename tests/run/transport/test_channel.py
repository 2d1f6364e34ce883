"""Messages over a socket pair: whole, in order, with their descriptors, and never a wait on the trainer's end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savable_pipeline.run.transport.channel import Channel


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=False), Channel(theirs, blocking=True)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 2)), max_size=8), st.booleans())
def test_messages_of_any_size_arrive_whole_and_in_order_with_their_descriptors(
    sizes: list[tuple[int, int]], from_trainer: bool
) -> None:
    before = open_files()
    ours, theirs = pair()
    sender, receiver = (ours, theirs) if from_trainer else (theirs, ours)
    files = [os.open(f"/proc/{os.getpid()}/stat", os.O_RDONLY) for _ in range(2)]
    received: list[tuple[bytes, list[int]]] = []
    sent = []
    for number, (size, count) in enumerate(sizes):
        message = bytes([number]) * (size if from_trainer else min(size, 10_000))  # a worker's end would wait for us
        sender.send(message, files[:count])
        sent.append((message, count))
        while not sender.flush():
            received += receiver.receive()
    while len(received) < len(sent):
        received += receiver.receive()
    assert [(message, len(descriptors)) for message, descriptors in received] == sent
    for _, descriptors in received:
        for descriptor in descriptors:
            assert Path(f"/proc/self/fd/{descriptor}").readlink().name == "stat"
            os.close(descriptor)
    for descriptor in files:
        os.close(descriptor)
    ours.close()
    theirs.close()
    assert open_files() <= before  # fewer where the garbage of another test was collected


def test_sending_from_the_trainer_does_not_block() -> None:
    ours, theirs = pair()
    assert ours.receive() == []
    for number in range(40):  # a megabyte that no one reads
        ours.send(bytes([number]) * 25_000)
    assert not ours.flush()
    received: list[tuple[bytes, list[int]]] = []
    while len(received) < 40:
        received += theirs.receive()
        ours.flush()
    assert received == [(bytes([number]) * 25_000, []) for number in range(40)]
    ours.close()
    theirs.close()


def test_messages_sent_before_the_end_are_received_and_then_eof() -> None:
    ours, theirs = pair()
    theirs.send(b"last")
    theirs.close()
    assert ours.receive() == [(b"last", [])]
    with pytest.raises(EOFError, match="other end is closed"):
        ours.receive()
    with pytest.raises(OSError):
        ours.send(b"to no one")
    ours.close()


def test_unreceived_descriptors_are_closed() -> None:
    before = open_files()
    ours, theirs = pair()
    with Path("/proc/self/stat").open() as file:
        ours.send(b"x" * 1_000_000, [file.fileno()])  # sent in part
        ours.send(b"y", [file.fileno()])  # not sent
        theirs.receive()  # a descriptor has come, its message not yet
    ours.close()
    theirs.close()
    assert open_files() <= before  # fewer where the garbage of another test was collected


def test_forked_process_has_no_end_of_the_channel() -> None:
    """Or the death of the other side would go unnoticed as long as that process lives."""
    ours, theirs = pair()
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"!")
        os.read(wait[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    os.write(wait[1], b"!")
    os.waitpid(child, 0)
    ours.close()
    for descriptor in (*ready, *wait):
        os.close(descriptor)
