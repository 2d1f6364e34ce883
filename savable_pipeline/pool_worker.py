"""What a pool knows of a worker, of a lane and of a request; and how it hears from a worker."""

from __future__ import annotations

import pickle
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from savable_pipeline import wire
from savable_pipeline.channel import Channel
from savable_pipeline.host import Want
from savable_pipeline.launch import Launcher
from savable_pipeline.note import Note
from savable_pipeline.segments import SegmentReader


@dataclass(slots=True, eq=False)
class Asked:
    """A request that has not been answered."""

    ticket: int
    lane: int
    want: Want


@dataclass(slots=True)
class LaneWork:
    """A lane: its state after its batch that was received last, who holds it, and what it is asked for."""

    state: bytes
    holder: Worker | None = None
    sent: int = 0  # requests that its holder has
    remake_s: float = 0.0
    avoid: list[tuple[int, int]] = field(default_factory=list)  # samples to leave out that `state` does not know of


class Worker:
    """One worker process, seen from here."""

    def __init__(self, number: int, launcher: Launcher) -> None:
        self.number = number
        self.pid = 0  # until it has started
        self.asked: deque[Asked] = deque()  # in the order in which it works
        self.since = time.monotonic()  # its last word, or that it was given something to do
        self.forget: list[int] = []  # lanes that have moved away
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, waits=False)
        self.note = Note.make()
        self.segments = SegmentReader()
        self.hung = ""  # that it has been killed for taking too long, in words
        self.stack = ""
        self.gone = False  # whether its end of the channel is closed
        self.channel.send(b"", [self.note.descriptor])
        launcher.start(number, theirs)

    def receive(self) -> list[tuple[int, Any]]:
        """The answers that have come, with their tickets. Raises EOFError if the worker is gone."""
        return [self._answer(pickle.loads(message), fds) for message, fds in self.channel.receive()]

    def _answer(self, message: tuple[int, Any, Any], fds: list[int]) -> tuple[int, Any]:
        ticket, inline, written = message
        if written is None:
            return ticket, wire.loads(*inline)
        segment, _, dropped, places = written
        if fds:
            self.segments.add(segment, fds[0])
        for number in dropped:
            self.segments.drop(number)
        *buffers, pickled = self.segments.read(segment, places)
        return ticket, wire.loads(pickled, buffers)

    def close(self) -> None:
        self.channel.close()
        self.note.close()
