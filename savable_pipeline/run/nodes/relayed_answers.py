"""How the answer of a worker on a node travels: as the worker wrote it, without being unpickled on its way.

head   number of the request │ bytes of each buffer, u64 … │ pickle        body   buffer │ padding to 64 │ buffer …
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from savable_pipeline.run.engine.connection import STARTED, Answer
from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.nodes.wire import Frame
from savable_pipeline.run.transport import batch_pickle as wire
from savable_pipeline.run.transport.batch_pickle import Buffer
from savable_pipeline.run.transport.segments import ALIGN

_NUMBERS = struct.Struct("<QI")
_PADDING = bytes(ALIGN)


class WrittenAnswer(NamedTuple):
    """An answer as a worker wrote it; the buffers view its shared memory, which is free again when they are gone."""

    pickled: Buffer
    buffers: Sequence[Buffer]

    def head(self, number: int) -> bytes:
        """The head of its frame."""
        sizes = struct.pack(f"<{len(self.buffers)}Q", *map(len, self.buffers))
        return b"".join((_NUMBERS.pack(number, len(self.buffers)), sizes, self.pickled))

    def body(self) -> list[Buffer]:
        """The body of its frame."""
        return [piece for buffer in self.buffers for piece in (buffer, _PADDING[: -len(buffer) % ALIGN])]


class WrittenAnswerReader(AnswerReader):
    """Reads answers of a worker as they are written; only its first message is unpickled."""

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, Any]:
        """The number of a message, and its `WrittenAnswer`."""
        number, inline, written = pickle.loads(message)
        if written is not None:
            *buffers, pickled = self.view(written, descriptors)
            return number, WrittenAnswer(pickled, buffers)
        return number, wire.loads(*inline) if number == STARTED else WrittenAnswer(*inline)


def read_answer(frame: Frame) -> tuple[int, Answer]:
    """The number and the answer of a frame."""
    head = memoryview(frame.head)
    number, count = _NUMBERS.unpack_from(head)
    sizes = struct.unpack_from(f"<{count}Q", head, _NUMBERS.size)
    buffers, at = [], 0
    for size in sizes:
        buffers.append(frame.body[at : at + size])
        at += size + -size % ALIGN
    return number, wire.loads(head[_NUMBERS.size + 8 * count :], buffers)
