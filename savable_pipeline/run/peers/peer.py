"""`Peer`, another process of a sharing group, and what is passed on to it.

    worker ── message, descriptor ──▶ first rank ── ("answer", …), the message, the descriptor ──▶ peer, peer, …
                                                 ◀── ("taken",) ──

    to a peer that gets batches    ("answer", key, whether to compare the batch), with an answer   ("same",)
    from such a peer               ("taken",)   ("digest", of the batch)
    either way                     ("failed", text)   ("ended",)

A batch is not copied: all processes of a machine map its segment privately, with a flag for each (segments.py). A batch
that no worker wrote to a segment, such as one built in process, is written by the first rank, which then reads it like
the others. Another machine gets the bytes of the batch, by the frames of nodes/wire.py.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

from msgspec.structs import replace

from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.nodes.wire import Link
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.segments import ALIGN, SegmentReader, Span

PASSING = ALIGN - 1  # the flag of an answer that is being passed on

Note: TypeAlias = tuple[Any, ...]
# A worker's message, and descriptors, for peers that have these flags; with None, for one of another machine.
WrittenDelivery: TypeAlias = Callable[[Sequence[int] | None], tuple[bytes, list[int]]]


class LinkChannel:
    """A TCP connection of `savable serve`, with the methods of a `Channel`."""

    def __init__(self, link: Link) -> None:
        self._link, self.flush, self.close = link, link.flush, link.close

    def watch(self, poll: select.poll) -> None:
        """Register with `poll` for messages to receive, and for room to send."""
        poll.register(self._link.fileno(), self._link.events)

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message. No descriptor passes."""
        self._link.send(wire.PEER, body=[message])

    def receive(self) -> list[tuple[Any, list[int]]]:
        """The messages that have arrived."""
        return [(frame.body, []) for frame in self._link.receive()]


class Peer:
    """A process of the group.

    `rank` is its global rank, for messages. `flag` is that of the receiver in segments.
    """

    def __init__(self, rank: int, flag: int, channel: Channel | LinkChannel) -> None:
        self.rank, self.flag, self._channel = rank, flag, channel
        self.is_local, self.watch, self.close = isinstance(channel, Channel), channel.watch, channel.close
        self.inbox: deque[tuple[Note, bytes, list[int]]] = deque()  # that is not taken yet
        self.taken = 0  # answers that it has taken
        self.unsent = False  # whether something is
        self.ended = False  # it closed its loader
        self.lost = False  # its socket is closed
        self.failed = ""  # the error that it raised
        self._reader = AnswerReader(SegmentReader(flag, private=True))

    def send(self, note: Note, passed: tuple[bytes, list[int]] = (b"", [])) -> None:
        """Send a note, with its answer, unless the peer is gone."""
        if not (self.lost or self.ended):
            with contextlib.suppress(OSError):  # `hear` finds out why
                self._channel.send(pickle.dumps((note, passed[0]), protocol=5), passed[1])
                self.unsent = not self._channel.flush()

    def hear(self) -> None:
        """Send what is unsent, and sort what has arrived."""
        try:
            self.unsent = not self._channel.flush()
            for raw, descriptors in self._channel.receive():
                note, message = pickle.loads(raw)
                if note[0] in ("answer", "same", "digest"):
                    self.inbox.append((note, message, descriptors))
                self.taken += note[0] == "taken"
                self.ended |= note[0] == "ended"
                self.failed = note[1] if note[0] == "failed" else self.failed
        except (EOFError, OSError):
            self.lost, self.unsent = True, False

    def is_behind(self, answers: int) -> bool:
        """Whether it will take answers, but has not taken so many."""
        return self.taken < answers and not (self.ended or self.lost)

    def take(self) -> tuple[Note, Any]:
        """The first note, with its answer."""
        note, message, descriptors = self.inbox.popleft()
        return note, self._reader.read(message, descriptors)[1] if message else None


class _PassedSegments(SegmentReader):
    """Segments that stay in use while an answer is passed on.

    This process may have copied the batch, so its own flag may be free.
    """

    def read(self, number: int, spans: list[Span]) -> list[memoryview]:
        self.lend(number, [PASSING])
        return super().read(number, spans)


class SourceReader(AnswerReader):
    """Reads the answers of one worker so that they can be passed on."""

    in_use: ClassVar[weakref.WeakSet[SourceReader]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__(_PassedSegments(private=True))
        self._descriptors: dict[int, int] = {}  # of segments, by number
        self.in_use.add(self)
        weakref.finalize(self, _close_all, self._descriptors)

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, Any]:
        """The number and the answer of a message; a `Delivery` knows how it was written."""
        number, answer, written = self.read_written(message, descriptors)
        return number, replace(answer, written=written) if isinstance(answer, Delivery) else answer

    def read_written(self, message: bytes, descriptors: list[int]) -> tuple[int, Any, WrittenDelivery]:
        """Return the same and what passes the answer on.

        As long as that exists, the segment is in use.
        """
        _, inline, written = pickle.loads(message)
        segment, _, dropped, spans = written or (0, False, (), [])
        _close_all({each: self._descriptors.pop(each) for each in dropped})
        if descriptors:
            self._descriptors[segment] = os.dup(descriptors[0])
        number, answer = super().read(message, descriptors)
        passing = partial(self._pass_on, inline, segment, spans)
        weakref.finalize(passing, self.segments.release, PASSING, segment)
        return number, answer, passing

    def _pass_on(self, inline: Any, segment: int, spans: list[Span], flags: Sequence[int] | None) -> Any:
        if spans and flags is not None:
            self.segments.lend(segment, flags)
            return pickle.dumps((1, None, (0, True, [], spans))), [self._descriptors[segment]]  # mapped for this batch
        if spans:
            *buffers, pickled = [bytearray(os.pread(self._descriptors[segment], size, at)) for at, size in spans]
            inline = pickled, buffers
        return pickle.dumps((1, inline, None), protocol=5), []


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
