"""Transport between processes of one machine, with batches in shared memory.

a message   number of the request │ pickle and buffers of a small answer │ location of a large answer
                                                                           (transport/segments.py)
"""

from __future__ import annotations

import os
import pickle
import traceback
from typing import Any

from savable_pipeline.run.engine.connection import WorkerAnswer
from savable_pipeline.run.engine.messages import Failure
from savable_pipeline.run.transport import batch_pickle as wire
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
        """Return the message to send, and descriptors that the caller closes."""
        try:
            body, fd = self._written(answer)
        except Exception:
            body, fd = self._written(Failure(None, traceback.format_exc()))
        return pickle.dumps((number, *body), protocol=5), [] if fd is None else [fd]

    def _written(self, answer: WorkerAnswer) -> tuple[tuple[Any, Any], int | None]:
        """Return the answer itself, or its location in shared memory and the descriptor of a new segment."""
        pieces, buffers = wire.dumps(answer)
        if sum(map(len, pieces)) + sum(map(len, buffers)) <= _INLINE or not hasattr(os, "memfd_create"):
            return ((b"".join(pieces), [bytearray(buffer) for buffer in buffers]), None), None
        segment, fd, dropped, spans = self.segments.write(buffers, pieces)
        return (None, (segment, fd is not None, dropped, spans)), fd


class AnswerReader:
    """The trainer's end of the transport.

    Each further process that gets the same messages has its own `segments`.
    """

    def __init__(self, segments: SegmentReader | None = None) -> None:
        self.segments = segments or SegmentReader()

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, WorkerAnswer]:
        """Return the number and the answer of a message."""
        number, inline, written = pickle.loads(message)
        if written is None:
            return number, wire.loads(*inline)
        *buffers, pickled = self.view(written, descriptors)
        return number, wire.loads(pickled, buffers)

    def view(self, written: tuple[Any, ...], descriptors: list[int]) -> list[memoryview]:
        """Return the buffers of an answer in shared memory, the pickle last."""
        segment, _, dropped, spans = written
        if descriptors:
            self.segments.add(segment, descriptors[0])
        for gone in dropped:
            self.segments.drop(gone)
        return self.segments.read(segment, spans)
