"""`Peer`, another process of a sharing group, and what is passed on to it.

    worker ── message, descriptor ──▶ first rank ── ("answer", …), the message, the descriptor ──▶ peer, peer, …
                                                 ◀── ("taken",) ──

    to a peer that gets batches    ("answer", key, whether to compare the batch), with an answer
    from such a peer               ("taken",)
    either way                     ("failed", text)   ("ended",)

A batch is not copied: all processes of a machine map its segment privately, with a flag for each (segments.py). The
descriptor of a segment is passed on with its first batch. A batch that no worker wrote to a segment, such as one built
in process, is written by the first rank, which then reads it like the others. Another machine gets the bytes of the
batch, by the frames of nodes/wire.py. A thread sends them while this process trains.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, TypeAlias

from msgspec.structs import replace

from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.nodes.wire import Link
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.segments import SegmentReader, Span

Note: TypeAlias = tuple[Any, ...]
# A worker's message, and descriptors, for a peer.
PassedAnswer: TypeAlias = "Callable[[Peer], tuple[bytes, list[int]]]"

END_S = 5.0  # for the last messages to be sent


class LinkChannel:
    """A TCP connection of `savable serve`, with the methods of a `Channel`.

    A thread sends, so that no call waits for the network.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.fileno, self.flush = link, link.fileno, lambda: True
        self._unsent: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, soon. No descriptor passes."""
        self._unsent.put(message)

    def receive(self) -> list[tuple[Any, list[int]]]:
        """The messages that have arrived."""
        return [(frame.body, []) for frame in self._link.receive()]

    def close(self) -> None:
        """Close the connection once all is sent, or after 5 s."""
        self._unsent.put(None)
        self._sender.join(END_S)
        self._link.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # `receive` finds out why
            while (message := self._unsent.get()) is not None:
                self._link.send(wire.PEER, body=[message])
                while not self._link.flush():
                    (poll := select.poll()).register(self._link.fileno(), select.POLLOUT)
                    poll.poll(END_S * 1000)


class Peer:
    """A process of the group.

    `rank` is its global rank, for messages. `flag` is that of the receiver in segments.
    """

    def __init__(self, rank: int, flag: int, channel: Channel | LinkChannel) -> None:
        self.rank, self.flag, self._channel = rank, flag, channel
        self.fileno, self.close, self.is_local = channel.fileno, channel.close, isinstance(channel, Channel)
        self.inbox: deque[tuple[Note, bytes, list[int]]] = deque()  # that is not taken yet
        self.mapped: set[tuple[int, int]] = set()  # segments whose descriptors it has
        self.taken, self.failed = 0, ""  # answers that it has taken, and the error that it raised
        # Whether something is unsent; whether it closed its loader; whether its socket is closed.
        self.unsent, self.ended, self.lost = False, False, False
        self._reader = AnswerReader(SegmentReader(flag, private=True))

    def send(self, note: Note, written: PassedAnswer = lambda peer: (b"", [])) -> None:
        """Send a note, with its answer, unless the peer is gone."""
        if not (self.lost or self.ended):
            message, descriptors = written(self)
            with contextlib.suppress(OSError):  # `hear` finds out why
                self._channel.send(pickle.dumps((note, message), protocol=5), descriptors)
                self.unsent = not self._channel.flush()

    def hear(self) -> None:
        """Send what is unsent, and sort what has arrived."""
        try:
            self.unsent = not self._channel.flush()
            for raw, descriptors in self._channel.receive():
                note, message = pickle.loads(raw)
                if note[0] == "answer":
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
        return note, self._reader.read(message, descriptors)[1]


class SourceReader(AnswerReader):
    """Reads the answers of one worker so that they can be passed on."""

    in_use: ClassVar[weakref.WeakSet[SourceReader]] = weakref.WeakSet()
    _numbers: ClassVar = itertools.count()

    def __init__(self) -> None:
        super().__init__(SegmentReader(private=True))
        self._number = next(self._numbers)
        self.descriptors: dict[tuple[int, int], int] = {}  # of segments
        self.in_use.add(self)
        weakref.finalize(self, _close_all, self.descriptors)

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, Any]:
        """The number and the answer of a message; a `Delivery` knows how it was written."""
        number, answer, written = self.read_written(message, descriptors)
        return number, replace(answer, written=written) if isinstance(answer, Delivery) else answer

    def read_written(self, message: bytes, descriptors: list[int]) -> tuple[int, Any, PassedAnswer]:
        """Return the same and what passes the answer on, which is a small one as it came."""
        number, answer = super().read(message, descriptors)
        return number, answer, vars(self).pop("_written", lambda peer: (message, []))

    def view(self, written: tuple[Any, ...], descriptors: list[int]) -> list[memoryview]:
        """The buffers, and last the pickle, of an answer in shared memory."""
        segment, _, dropped, spans = written
        _close_all({(self._number, each): self.descriptors.pop((self._number, each)) for each in dropped})
        if descriptors:
            self.descriptors[self._number, segment] = os.dup(descriptors[0])
        before, views = self.segments.viewed, super().view(written, descriptors)
        self._written = partial(self._pass_on, segment, spans, views, self.segments.viewed > before)
        return views

    def _pass_on(self, segment: int, spans: list[Span], views: list[memoryview], in_use: bool, peer: Peer) -> Any:
        """The message for a peer, which maps a segment once. As long as there are `views`, the segment is `in_use`.

        Unless they are copies, since too many batches were viewed.
        """
        if not (in_use and peer.is_local):
            *buffers, pickled = map(bytearray, views)
            return pickle.dumps((1, (pickled, buffers), None), protocol=5), []
        self.segments.lend(segment, peer.flag)
        key, known = (self._number, segment), peer.mapped
        dropped = known.difference(*(source.descriptors for source in self.in_use))  # that exist no more
        new = [] if key in known else [self.descriptors[key]]
        peer.mapped = (known - dropped) | {key}
        return pickle.dumps((1, None, (key, bool(new), dropped, spans))), new


def _close_all(descriptors: dict[tuple[int, int], int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
