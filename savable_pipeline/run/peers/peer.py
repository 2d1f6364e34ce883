"""`Peer`: another process with which this one shares batches, and their messages.

    worker ── message, descriptor ──▶ first rank ── ("answer", …), the message, the descriptor ──▶ peer, peer, …
                                                 ◀── ("taken",) ──

    to a peer that gets batches    ("answer", key, whether to compare the batch), with an answer
    from such a peer               ("taken",)
    in both directions             ("alive",)   ("failed", text)   ("closes",)

A batch is not copied: all processes of a machine map its segment privately, with a flag for each (segments.py). They
get the same message, which is pickled once. The descriptor of a segment is passed on with its first batch. A batch that
is in no segment, because no worker process built it, is written to one by the first rank, which then reads it like the
others. A peer on another machine gets the bytes of the batch, in frames of nodes/wire.py. A thread sends them while
this process trains.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from msgspec.structs import replace

from savable_pipeline.run.engine.connection import Host
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.engine.process_host import ProcessHost
from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.segments import SegmentReader

Note: TypeAlias = tuple[Any, ...]  # its name and values, as in the drawing

LOST, CLOSED = "ended", "closed its loader"  # how a peer has ended, for messages
END_S = 5.0  # time to send the last messages


def pickled(note: Note, message: bytes = b"") -> bytes:
    """Return a note and, for an "answer", the message with the answer, as a pickle."""
    return pickle.dumps((note, message), protocol=5)


class LinkChannel:
    """A TCP connection of `savable serve`, with the methods of a `Channel`.

    A thread sends, so that no call waits for the network.
    """

    def __init__(self, link: wire.Link) -> None:
        self._link, self.fileno, self.flush = link, link.fileno, lambda: True
        self._unsent = SimpleQueue[bytes | None]()
        self.send = lambda message, descriptors: self._unsent.put(message)  # descriptors cannot pass over TCP
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    def receive(self) -> list[tuple[Any, list[int]]]:
        """Return the messages that have arrived."""
        return [(frame.body, []) for frame in self._link.receive()]

    def close(self) -> None:
        """Close the connection once everything is sent, or after 5 s."""
        self._unsent.put(None)
        self._sender.join(END_S)
        self._link.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # `receive` finds the reason
            while (message := self._unsent.get()) is not None:
                self._link.send(wire.PEER, body=[message])
                while not self._link.flush():
                    (poll := select.poll()).register(self._link.fileno(), select.POLLOUT)
                    poll.poll(END_S * 1000)


class Peer:
    """Another process of the sharing group.

    `rank` is its global rank, for messages. `flag` is the index of the receiver's flag in segments. The receiver is the
    peer if it gets batches from this process, and else this process.
    """

    def __init__(self, rank: int, flag: int, channel: Channel | LinkChannel) -> None:
        self.rank, self.flag, self._channel = rank, flag, channel
        self.fileno, self.close, self.is_local = channel.fileno, channel.close, isinstance(channel, Channel)
        self.inbox = deque[tuple[Note, bytes, list[int]]]()  # "answer" notes to read: note, message and descriptors
        self.reader = AnswerReader(SegmentReader(flag, private=True))
        # the number of answers that the peer has taken, the error that it raised, and the time of its last message
        self.taken_count, self.error, self.last_heard_s = 0, "", time.monotonic()
        # whether something is unsent, whether its socket is closed, and `LOST` or `CLOSED` once the peer has ended
        self.unsent, self.is_closed, self.end = False, False, ""

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a pickled note, unless the peer has ended."""
        if not self.end:
            with contextlib.suppress(OSError):  # `handle_messages` finds the reason
                self._channel.send(message, descriptors)
                self.unsent = not self._channel.flush()

    def send_note(self, *note: str) -> None:
        """Send a note without an answer."""
        self.send(pickled(note))

    def handle_messages(self) -> None:
        """Send unsent messages, and record those that have arrived."""
        try:
            self.unsent = not self._channel.flush()
            for raw, descriptors in self._channel.receive():
                note, message = pickle.loads(raw)
                if note[0] == "answer":
                    self.inbox.append((note, message, descriptors))
                self.taken_count += note[0] == "taken"
                self.end = CLOSED if note[0] == "closes" else self.end
                self.error = note[1] if note[0] == "failed" else self.error
            self.last_heard_s = time.monotonic()
        except (EOFError, OSError):
            self.is_closed, self.unsent, self.end = True, False, self.end or LOST


class PassedSegments:
    """Segments of all workers of a loader, numbered for the peers of this machine.

    `send_alive` sends the peers an alive message, and returns for how many seconds this process may then wait for
    workers.
    """

    def __init__(self, send_alive: Callable[[], float]) -> None:
        self._send_alive, self.readers, self.numbers = send_alive, weakref.WeakSet[SourceReader](), itertools.count()
        self.descriptors = dict[int, int]()  # by number of the segment
        self.mapped = set[int]()  # numbers of the segments that the peers have mapped

    def open_host(self, open_host: Callable[[], Host]) -> Host:
        """Open a host, and change it so that its workers' answers can be passed on."""
        wait = (host := open_host()).wait
        host.wait = lambda seconds: wait(min(seconds, self._send_alive()))  # type: ignore[method-assign]
        if isinstance(host, ProcessHost):
            host.reader = partial(SourceReader, self)
        return host

    def close(self, numbers: dict[int, int]) -> None:
        """Close the descriptors of segments that no longer exist, and clear `numbers`.

        `numbers` has the numbers of these segments here, by their numbers in the worker.
        """
        while numbers:
            _, number = numbers.popitem()
            os.close(self.descriptors.pop(number))


class SourceReader(AnswerReader):
    """Reads the answers of one worker so that they can be passed on."""

    def __init__(self, sources: PassedSegments) -> None:
        super().__init__(SegmentReader(private=True))
        # by the number of a segment in the worker, its number in `sources`
        self._sources, self._numbers = sources, dict[int, int]()
        sources.readers.add(self)
        weakref.finalize(self, sources.close, self._numbers)

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, Any]:
        """Return the number and the answer of a message.

        A `Delivery` gets a function `pass_on(note, flags)`. It returns a message for the readers with these flags, and
        descriptors to send with it. The message has a large answer by its location in a segment, a small one as bytes.
        """
        number, answer = super().read(message, descriptors)
        pass_on = vars(self).pop("_pass_on", lambda note, flags: (pickled(note, message), []))
        return number, replace(answer, pass_on=pass_on) if isinstance(answer, Delivery) else answer

    def view(self, location: tuple[Any, ...], descriptors: list[int]) -> list[memoryview]:
        """Return the buffers of an answer in shared memory, the pickle last."""
        segment, _, dropped, spans = location
        self._sources.close({each: self._numbers.pop(each) for each in dropped})
        if descriptors:
            self._numbers[segment] = next(self._sources.numbers)
            self._sources.descriptors[self._numbers[segment]] = os.dup(descriptors[0])
        before, views = self.segments.viewed_batches, super().view(location, descriptors)
        is_copied, number = self.segments.viewed_batches == before, self._numbers[segment]

        def pass_on(note: Note, flags: list[int]) -> tuple[bytes, list[int]]:
            """Return the message and descriptors for readers with these flags.

            `flags` is [] for readers on other machines. The segment stays in use, because this function holds `views`.
            If these are copies, because too many batches were viewed, the message has the bytes instead.
            """
            if is_copied or not flags:
                *buffers, batch = map(bytearray, views)
                return pickled(note, pickle.dumps((1, (batch, buffers), None), protocol=5)), []
            for flag in flags:
                self.segments.lend(segment, flag)
            mapped, known = self._sources.mapped, self._sources.descriptors
            new = [] if number in mapped else [known[number]]
            dropped = mapped - known.keys()
            self._sources.mapped = mapped - dropped | {number}
            return pickled(note, pickle.dumps((1, None, (number, bool(new), dropped, spans)), protocol=5)), new

        self._pass_on = pass_on
        return views
