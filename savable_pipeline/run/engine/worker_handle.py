"""The records that a pool keeps of a worker, a lane and a request; and how it receives a worker's answers."""

from __future__ import annotations

import pickle
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.run.engine.launchers import Launcher
from savable_pipeline.run.engine.messages import RequestKind
from savable_pipeline.run.transport import batch_pickle as wire
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.segments import SegmentReader
from savable_pipeline.run.transport.status_page import StatusPage


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that has not been answered."""

    ticket: int
    lane: int
    want: RequestKind


@dataclass(slots=True)
class LaneAssignment:
    """A lane: the state that came with its last batch, and the worker that holds it."""

    state: bytes
    holder: WorkerHandle | None = None
    sent: int = 0  # requests in the holder's queue
    rebuild_s: float = 0.0
    avoid: list[tuple[int, int]] = field(default_factory=list)  # samples to leave out that are not in `state` yet


class WorkerHandle:
    """One worker process, seen from the trainer."""

    def __init__(self, number: int, launcher: Launcher, pinned: PinnedShards) -> None:
        self.number = number
        self.pid = 0  # until its first message
        self.requests: deque[PendingRequest] = deque()  # sent to it and not answered yet
        self.since = time.monotonic()  # the time of its last answer, or of a request to it when it was idle
        self.forget: list[int] = []  # lanes that have moved to another worker
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, waits=False)
        self.status = StatusPage.make()
        self.segments = SegmentReader()
        self.hung = ""  # if it was killed because of the timeout: a text that says so
        self.stack = ""
        self.gone = False  # whether its end of the channel is closed
        self.channel.send(pickle.dumps(pinned), [self.status.descriptor])
        launcher.start(number, theirs)

    def receive(self) -> list[tuple[int, Any]]:
        """The tickets and answers that have arrived. Raises EOFError if the worker's end is closed."""
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
        """Close the trainer's end of the channel and its view of the status page."""
        self.channel.close()
        self.status.close()
