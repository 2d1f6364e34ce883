"""Transport of answers on one machine, with large batches in shared memory.

small answer   number of the request │ pickle of the answer, with its buffers
large answer   number of the request │ location of both in shared memory (transport/segments.py)
"""

from __future__ import annotations

import os
import pickle
import traceback
from typing import Any

from savable_pipeline.run.engine.connection import WorkerAnswer
from savable_pipeline.run.engine.messages import Failure
from savable_pipeline.run.transport import batch_pickle
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.segments import SegmentReader, SegmentWriter

_INLINE = 1 << 16  # largest answer, in bytes, that is sent through the socket itself


class AnswerSender:
    """The worker's end of the transport.

    Small answers go through the channel, large ones through shared memory.
    """

    def __init__(self, channel: Channel | Any = None) -> None:
        self._channel = channel
        self.segments = SegmentWriter()

    def send(self, number: int, answer: WorkerAnswer) -> None:
        """Send an answer, or a `Failure` if it cannot be pickled.

        Raises OSError if the trainer's end is closed.
        """
        message, descriptors = self.message(number, answer)
        self._channel.send(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def message(self, number: int, answer: Any) -> tuple[bytes, list[int]]:
        """Return the message to send, and the descriptors to send with it.

        The caller then closes the descriptors.
        """
        try:
            body, fd = self._body(answer)
        except Exception:
            body, fd = self._body(Failure(None, traceback.format_exc()))
        return pickle.dumps((number, *body), protocol=5), [] if fd is None else [fd]

    def _body(self, answer: WorkerAnswer) -> tuple[tuple[Any, Any], int | None]:
        """Return (a small answer or None, location of a large answer or None), and a descriptor or None.

        The location has the segment's number, whether it is new, the numbers of dropped segments, and the spans. The
        descriptor is that of a new segment, which the receiver does not have yet.
        """
        pieces, buffers = batch_pickle.dumps(answer)
        if sum(map(len, pieces)) + sum(map(len, buffers)) <= _INLINE or not hasattr(os, "memfd_create"):
            return ((b"".join(pieces), [bytearray(buffer) for buffer in buffers]), None), None
        written = self.segments.write(buffers, pieces)
        location = (written.segment, written.fd is not None, written.dropped, written.spans)
        return (None, location), written.fd


class AnswerReader:
    """The trainer's end of the transport.

    Ranks that share batches pass `segments` of their own, because they read the same messages.
    """

    def __init__(self, segments: SegmentReader | None = None) -> None:
        self.segments = segments or SegmentReader()

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, WorkerAnswer]:
        """Return the number and the answer of a message."""
        number, small_answer, location = pickle.loads(message)
        if location is None:
            return number, batch_pickle.loads(*small_answer)
        *buffers, pickled = self.view(location, descriptors)
        return number, batch_pickle.loads(pickled, buffers)

    def view(self, location: tuple[Any, ...], descriptors: list[int]) -> list[memoryview]:
        """Return the buffers of a large answer, the pickle last.

        `descriptors` has that of a new segment.
        """
        segment, _, dropped, spans = location
        if descriptors:
            self.segments.add(segment, descriptors[0])
        for number in dropped:
            self.segments.drop(number)
        return self.segments.read(segment, spans)
