"""`Peer`: another process of a sharing group, over a Unix socket on one machine and over TCP between two.

    to a peer that gets batches    ("answer", key, sources that are gone), with an answer   ("compare",)   ("same",)
                                   ("busy",)
    from such a peer               ("values", values)   ("taken",)
    either way                     ("failed", kind, text)   ("ended",)

On one machine an answer is a worker's message, with the descriptors of segments that are new (passed_answers.py). To
another machine it is a frame of nodes/wire.py, sent from the segment.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.nodes.wire import Frame, Link, WrittenAnswerReader, read_answer
from savable_pipeline.run.peers.passed_answers import PassedMessage
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.segments import SegmentReader

Note: TypeAlias = tuple[Any, ...]
Arrived: TypeAlias = tuple[Note, Callable[[], Any]]  # a note, and what reads its answer


class ChannelEnd:
    """A Unix socket. The receiving process has this `flag` in the segments."""

    def __init__(self, channel: Channel, flag: int) -> None:
        self._channel, self._flag = channel, flag
        self._readers: dict[int, AnswerReader] = {}  # by source
        self.watch, self.flush, self.close = channel.watch, channel.flush, channel.close

    def send(self, note: Note, passed: PassedMessage | None = None) -> None:
        """Send a note, and the answer that belongs to it."""
        source, message, descriptors = passed or (None, b"", [])
        self._channel.send(pickle.dumps((note, source, message), protocol=5), descriptors)

    def receive(self) -> list[Arrived]:
        """What has arrived. Answers must be read in their order."""
        found = [(pickle.loads(raw), descriptors) for raw, descriptors in self._channel.receive()]
        return [(note, partial(self._read, source, raw, fds)) for (note, source, raw), fds in found]

    def _read(self, source: int | None, message: bytes, descriptors: list[int]) -> Any:
        if source is None:
            return None
        if source not in self._readers:
            self._readers[source] = AnswerReader(SegmentReader(self._flag, private=True))
        return self._readers[source].read(message, descriptors)[1]

    def forget(self, source: int) -> None:
        """Unmap the segments of a worker that is gone."""
        self._readers.pop(source, None)

    @property
    def viewed(self) -> int:
        """The batches from it that are viewed in this process."""
        return sum(reader.segments.viewed for reader in self._readers.values())


class LinkEnd:
    """A TCP connection. In the segments of this machine, the receiving process has this `flag`."""

    def __init__(self, link: Link, flag: int) -> None:
        self._link, self._flag = link, flag
        self._readers: dict[int, WrittenAnswerReader] = {}  # by source
        self._arrived: list[Arrived] = []
        self._note: Note | None = None  # whose answer comes with the next frame
        self.flush, self.close = link.flush, link.close

    def watch(self, poll: select.poll) -> None:
        """Register with `poll` for what arrives, and for room to send."""
        poll.register(self._link.fileno(), self._link.events)

    def send(self, note: Note, passed: PassedMessage | None = None) -> None:
        """Send a note, and the answer that belongs to it, from the segment in which it is."""
        self._link.send(wire.PEER, pickle.dumps((note, passed is not None)))
        if passed is not None:
            if passed.source not in self._readers:
                self._readers[passed.source] = WrittenAnswerReader(SegmentReader(self._flag))
            copies = [os.dup(each) for each in passed.descriptors]
            number, answer = self._readers[passed.source].read(passed.message, copies)
            self._link.send(wire.ANSWER, answer.head(number), answer.body())

    def receive(self) -> list[Arrived]:
        """What has arrived."""
        for frame in self._link.receive():
            self._take(frame)
        found, self._arrived = self._arrived, []
        return found

    def _take(self, frame: Frame) -> None:
        if frame.kind == wire.PEER:
            note, has_answer = pickle.loads(frame.head)
            if has_answer:
                self._note = note
            else:
                self._arrived.append((note, _nothing))
        elif frame.kind == wire.ANSWER and self._note is not None:
            _, answer = read_answer(frame)
            self._arrived.append((self._note, lambda: answer))

    def forget(self, source: int) -> None:
        """Unmap the segments of a worker that is gone."""
        self._readers.pop(source, None)

    @property
    def viewed(self) -> int:
        """The batches from it that are viewed in this process."""
        return self._link.viewed[0]


def _nothing() -> None:
    return None


class Peer:
    """A process of the group, at the other end of a connection. `rank` is its global rank, for messages."""

    def __init__(self, rank: int, flag: int, end: ChannelEnd | LinkEnd) -> None:
        self.rank, self.flag, self.end = rank, flag, end
        self.inbox: deque[Arrived] = deque()
        self.taken = 0  # answers that it has taken
        self.busy = 0.0  # when it last reported that it builds
        self.ended = False  # it closed its loader
        self.lost = False  # its socket is closed

    def send(self, note: Note, passed: PassedMessage | None = None) -> None:
        """Send a note. One to a peer that is gone is dropped."""
        if not (self.lost or self.ended):
            with contextlib.suppress(OSError):  # `receive` finds out why
                self.end.send(note, passed)

    def receive(self) -> list[Arrived]:
        """Send what is unsent, and return what has arrived."""
        try:
            self.end.flush()
            return self.end.receive()
        except (EOFError, OSError):
            self.lost = True
            return []
