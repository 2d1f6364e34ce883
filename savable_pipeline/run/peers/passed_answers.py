"""Answers of workers that are passed on to peers as the worker wrote them, without a copy of the batch.

    worker ── message, descriptor ──▶ first rank ── the same message, the same descriptor ──▶ peer, peer, …
              segments that all of them map privately, with a flag for each (transport/segments.py)

A batch that no worker wrote to shared memory, such as one built in process, is written by the first rank itself, which
then reads it like the others.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from msgspec.structs import replace

from savable_pipeline.run.engine.connection import Answer
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.engine.shared_batches import AnswerReader, AnswerSender
from savable_pipeline.run.transport.segments import MOST_READERS, SegmentReader, Span
from savable_pipeline.stages.batch_samples import BatchSamples

PASSING = MOST_READERS - 1  # the flag of a message that is being passed on


class PassedMessage(NamedTuple):
    """A worker's message to a peer: the number of its source, and descriptors of segments that are new to peers."""

    source: int
    message: bytes
    descriptors: list[int]


class WorkerMessage:
    """How a worker wrote an answer: in the message itself, or in a segment, which is in use as long as this exists."""

    def __init__(self, reader: SourceReader, inline: Any, written: Any) -> None:
        self._reader, self._inline, self._written = reader, inline, written
        if written is not None:
            weakref.finalize(self, reader.segments.release, PASSING, written[0])

    def passed(self, flags: Sequence[int]) -> PassedMessage:
        """The message for the peers that have these flags."""
        return self._reader.passed(self._inline, self._written, flags)


class SourceReader(AnswerReader):
    """Reads the answers of one worker in the first rank, so that they can be passed on."""

    _sources = count()

    def __init__(self) -> None:
        super().__init__(_PassedSegments(private=True))
        self.source = next(self._sources)
        self._new: dict[int, int] = {}  # descriptors of the segments that peers do not have, by number
        self._dropped: list[int] = []  # segments that they may still have
        weakref.finalize(self, _close_all, self._new)

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, Answer]:
        """The number and the answer of a message; a `Delivery` knows how it was written."""
        number, answer, passed = self.read_passed(message, descriptors)
        return number, replace(answer, written=passed) if isinstance(answer, Delivery) else answer

    def read_passed(self, message: bytes, descriptors: list[int]) -> tuple[int, Any, WorkerMessage]:
        """The number and the answer of a message, and how it was written."""
        _, inline, written = pickle.loads(message)
        if written is not None:
            segment, _, dropped, _ = written
            if descriptors:
                self._new[segment] = os.dup(descriptors[0])
            for gone in dropped:
                if gone in self._new:
                    os.close(self._new.pop(gone))
                else:
                    self._dropped.append(gone)
        number, answer = super().read(message, descriptors)
        return number, answer, WorkerMessage(self, inline, written)

    def passed(self, inline: Any, written: Any, flags: Sequence[int]) -> PassedMessage:
        """A message for peers. The caller closes its descriptors once they are sent."""
        if written is None:
            return PassedMessage(self.source, pickle.dumps((1, inline, None), protocol=5), [])
        segment, _, _, spans = written
        self.segments.lend(segment, flags)
        descriptors = [self._new.pop(segment)] if segment in self._new else []
        dropped, self._dropped = tuple(self._dropped), []
        body = (1, None, (segment, bool(descriptors), dropped, spans))
        return PassedMessage(self.source, pickle.dumps(body, protocol=5), descriptors)


class _PassedSegments(SegmentReader):
    """Segments that stay in use while a message is passed on, even if this process has copied the batch."""

    def read(self, number: int, spans: list[Span]) -> list[memoryview]:
        self.lend(number, [PASSING])
        return super().read(number, spans)


class OwnSource:
    """Writes what no worker wrote, as a worker would."""

    def __init__(self) -> None:
        self.reader = SourceReader()
        self._sender = AnswerSender(self)
        self._sent: tuple[bytes, list[int]] = b"", []

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Take the message of the sender, in place of a channel."""
        self._sent = message, [os.dup(each) for each in descriptors]

    def written(self, found: Any) -> tuple[Any, WorkerMessage]:
        """The same answer or value, as peers get it, and how it was written."""
        if isinstance(found, Delivery):
            made_of = found.made_of and found.made_of.sent
            found = replace(found, samples=BatchSamples.of(found.samples), made_of=made_of, written=None)
        self._sender.segments.begin()
        self._sender.send(1, found)
        _, read, passed = self.reader.read_passed(*self._sent)
        return read, passed


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
