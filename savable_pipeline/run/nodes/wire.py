"""`Link`: one authenticated TCP connection between a trainer and an agent; it carries frames, in one order, each once.

    a frame   header ┃ head ┃ body
    a header  magic │ kind │ bytes of the head │ sequence number │ bytes of the body
              │ SHA-256 of the head │ AES-GMAC of the body │ HMAC-SHA256 of all this

Each direction of each connection has keys of its own. The header is checked before memory is taken for the rest, so
that nobody else decides how much. Head and body are checked before they are unpickled. The nonce of the GMAC is the
sequence number. The body is the memory of a batch's tensors: it is sent from where the worker wrote it, and received
into memory that is used again when the trainer has let go of the batch. On a trusted network, bodies have no GMAC. A
frame that is not the next one of this connection ends the connection. Another one replaces it, with other keys.

The answer of a worker travels as the worker wrote it, without being unpickled on its way (`WrittenAnswer`):

    head   number of the request │ bytes of each buffer, u64 … │ pickle        body   buffer │ padding to 64 │ buffer …
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import mmap
import pickle
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.run.engine.connection import STARTED, Answer
from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.transport import batch_pickle
from savable_pipeline.run.transport.batch_pickle import Buffer
from savable_pipeline.run.transport.channel import closed_in_children
from savable_pipeline.run.transport.segments import ALIGN

MAGIC = b"SvP2"  # another number for another layout of frames, or of the messages before them
HEADER = struct.Struct("<4sBxxxIQQ32s16s")
CODE_BYTES = 16
_GMAC_BYTES = 1 << 30  # in one call: OpenSSL counts in 32 bits
MOST_HEAD, MOST_BODY = 1 << 30, 1 << 36  # bytes of a frame; more is no frame of ours
_SMALL = 1 << 16  # bodies of up to so many bytes do not use memory again
_FREE_BLOCKS = 8  # at most
_VIEWS = 512  # in one call of the system
_FRAMES = 16  # taken at a time
_WAKE_BYTES = 1 << 20  # of a large body: fewer turns between the two ends

# From the trainer to the session: of a job.        From the session to the trainer.
JOB, AGREED, REFUSED = 1, 2, 3
# Of a worker.
BEGIN, REQUEST, LOOK, STACK, KILL, END = 10, 11, 12, 13, 14, 15
ANSWER, FAULT, LOOKED, STATUS, ENDED = 20, 21, 22, 23, 24
# Of either, as a sign of life: the session answers each.
PING, PONG = 30, 31
# Between two ranks that share batches: a note, before the answer that it announces.
PEER = 40


class WireError(ConnectionError):
    """A frame is not the next one of its connection."""


class Secret(NamedTuple):
    """What the two ends of a connection have proved to share: 64 bytes for each direction.

    The first half authenticates headers, the second half bodies, unless the network is `trusted`.
    """

    sends: bytes
    receives: bytes
    trusted: bool = False


class Frame(NamedTuple):
    """A frame that has arrived."""

    kind: int
    head: bytearray
    body: memoryview


class ReusedMemory:
    """Memory for the bodies of frames: a block is used again when nothing views it any more.

    Its pages are private, so that a forked child keeps what it views.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()
        self._views: dict[int, weakref.ref[Any]] = {}

    def take(self, size: int, viewed: list[int]) -> memoryview:
        """`size` writable bytes; the number of a connection's `viewed` blocks is one more until nothing views them."""
        if size <= _SMALL:
            return memoryview(bytearray(size))
        block = next((each for each in self._free if size <= len(each) <= 2 * size + _SMALL), None)
        if block is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
            block = mmap.mmap(-1, -(-size // _SMALL) * _SMALL, flags=flags)
        else:
            self._free.remove(block)
        whole = np.frombuffer(block, np.uint8)
        viewed[0] += 1
        key = id(whole)

        def gone(_: object, block: mmap.mmap = block) -> None:
            del self._views[key]
            viewed[0] -= 1
            self._free.append(block)
            if len(self._free) > _FREE_BLOCKS:
                self._free.popleft()

        self._views[key] = weakref.ref(whole, gone)
        return memoryview(whole)[:size]  # type: ignore[arg-type]


class Link:
    """One end of a connection. It never waits, but for `exchange`.

    Raises `WireError`, or another OSError, when the connection cannot go on.
    """

    def __init__(self, end: socket.socket, secret: Secret, memory: ReusedMemory | None = None) -> None:
        be_live(end)
        end.setblocking(False)
        self._socket = end
        self._secret = secret
        self._memory = memory or ReusedMemory()
        self.viewed = [0]  # blocks of memory that are viewed in this process
        self.heard = True  # since `silent` was looked at last
        self.silent = 0  # signs of life in a row for which it was asked, and that have not come
        self._sent = self._received = 0  # frames
        self._unsent: deque[memoryview] = deque()
        self._arrived: list[Frame] = []
        self._fault: Exception | None = None  # after which nothing more can arrive
        self._parser = self._parsed()
        self._target = memoryview(b"")  # where what comes next belongs
        self._wakes_at = 1
        closed_in_children(self)

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What `poll` waits for: something to receive and, if something is unsent, room to send it."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, kind: int, head: Buffer = b"", body: Sequence[Buffer] = ()) -> None:
        """Send a frame, or keep what does not fit into the socket for `flush`."""
        views = [memoryview(each).cast("B") for each in body if len(each)]
        key, number = self._secret.sends, self._sent
        codes = hashlib.sha256(head).digest(), self._body_code(key, number, views)
        header = HEADER.pack(MAGIC, kind, len(head), number, sum(map(len, views)), *codes)
        self._sent += 1
        self._unsent.append(memoryview(header + header_code(key, header)))
        if len(head):
            self._unsent.append(memoryview(head).cast("B"))
        self._unsent.extend(views)
        self.flush()

    def flush(self) -> bool:
        """Send what is unsent; whether nothing is left."""
        while self._unsent:
            views = [self._unsent[i] for i in range(min(len(self._unsent), _VIEWS))]
            try:
                sent = self._socket.sendmsg(views)
            except BlockingIOError:
                return False
            for view in views:
                if sent < len(view):
                    self._unsent[0] = view[sent:]
                    break
                sent -= len(view)
                self._unsent.popleft()
        return True

    def receive(self) -> list[Frame]:
        """The frames that have arrived. Raises EOFError once nothing more can."""
        try:
            while self._fault is None and len(self._arrived) < _FRAMES:
                while not self._target:
                    self._target = next(self._parser)
                count = self._socket.recv_into(self._target)
                if not count:
                    raise EOFError("the other side closed the connection")
                self.heard = True
                self._target = self._target[count:]
        except BlockingIOError:
            self._wake_at(min(len(self._target), _WAKE_BYTES))
        except StopIteration:
            self._fault = WireError("the program was interrupted during a message")
        except (EOFError, OSError) as error:
            self._fault = error
        if self._fault is not None and not self._arrived:
            raise self._fault
        found, self._arrived = self._arrived, []
        return found

    def hear(self, take: Callable[[Frame], object]) -> str:
        """Send what is unsent, and take the frames that have arrived. Returns why the connection is lost; "" if not."""
        try:
            self.flush()
            for frame in self.receive():
                take(frame)
        except (OSError, EOFError) as error:
            return said(error)
        return ""

    def _wake_at(self, size: int) -> None:
        """Have `poll` wake this process only for so many bytes: a large body arrives in many small pieces."""
        if size != self._wakes_at and hasattr(socket, "SO_RCVLOWAT"):
            self._wakes_at = size
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _parsed(self) -> Iterator[memoryview]:
        """Ask for the memory of header, head and body in turn, and put each whole frame among those that arrived."""
        header, key = memoryview(bytearray(HEADER.size + CODE_BYTES)), self._secret.receives
        while True:
            yield header
            magic, kind, head_bytes, number, body_bytes, head_hash, code = HEADER.unpack_from(header)
            wanted = header_code(key, header[: HEADER.size])
            if magic != MAGIC or not hmac.compare_digest(wanted, header[HEADER.size :]):
                raise WireError(f"message {self._received} was not sent by the other side")
            if number != self._received:
                raise WireError(f"message {number} arrived instead of {self._received}")
            if head_bytes > MOST_HEAD or body_bytes > MOST_BODY:
                raise WireError(f"a message of {head_bytes} + {body_bytes} bytes is too long")
            head = bytearray(head_bytes)
            yield memoryview(head)
            if not hmac.compare_digest(hashlib.sha256(head).digest(), head_hash):
                raise WireError(f"the header of message {number} was changed in transit")
            body = self._memory.take(body_bytes, self.viewed)
            yield body
            if not hmac.compare_digest(self._body_code(key, number, [body]), code):
                raise WireError(f"the body of message {number} was changed in transit")
            self._received += 1
            self._arrived.append(Frame(kind, head, body))
            del body, head  # nothing of a frame is viewed from here

    def _body_code(self, key: bytes, number: int, body: Sequence[memoryview]) -> bytes:
        """The AES-GMAC of a body; zeros where there is none, or on a trusted network."""
        if self._secret.trusted or not any(map(len, body)):
            return bytes(CODE_BYTES)
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        gmac = Cipher(algorithms.AES(key[32:]), modes.GCM(number.to_bytes(12, "little"))).encryptor()
        for view in body:
            for at in range(0, len(view), _GMAC_BYTES):
                gmac.authenticate_additional_data(view[at : at + _GMAC_BYTES])
        gmac.finalize()
        return gmac.tag

    def exchange(self, kind: int, head: Buffer, seconds: float) -> Frame:
        """Send a frame and wait so long for the answer. Raises OSError or EOFError if none comes."""
        self.send(kind, head)
        deadline = time.monotonic() + seconds
        while not (found := self.receive()):
            poll = select.poll()
            poll.register(self._socket, self.events)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer in {seconds:g} s")
            self.flush()
        return found[0]

    def close(self) -> None:
        """Close the socket."""
        self._unsent.clear()
        self._socket.close()


def said(error: Exception) -> str:
    """What an error says, or its kind."""
    return str(error) or type(error).__name__


def can_authenticate_bodies() -> bool:
    """Whether the package that does is installed."""
    return importlib.util.find_spec("cryptography") is not None


def header_code(key: bytes, header: Buffer) -> bytes:
    """The code after a header."""
    return hmac.digest(key[:32], header, "sha256")[:CODE_BYTES]


def be_live(end: socket.socket) -> None:
    """Send small messages at once; and have the system ask a silent machine for a sign of life.

    The system answers for a process that is stopped or busy: only a machine that is gone, or a cut, ends it.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
        return number, batch_pickle.loads(*inline) if number == STARTED else WrittenAnswer(*inline)


def read_answer(frame: Frame) -> tuple[int, Answer]:
    """The number and the answer of a frame. Raises `WireError` if the lengths in it are not those of its parts."""
    head = memoryview(frame.head)
    try:
        number, count = _NUMBERS.unpack_from(head)
        sizes = struct.unpack_from(f"<{count}Q", head, _NUMBERS.size)
    except struct.error as error:
        raise WireError(f"an answer has a header of only {len(head)} bytes") from error
    starts = list(accumulate((size + -size % ALIGN for size in sizes), initial=0))
    if starts[-1] != len(frame.body):
        raise WireError(f"answer {number} has buffers of {starts[-1]} bytes in a body of {len(frame.body)}")
    buffers = [frame.body[at : at + size] for at, size in zip(starts, sizes, strict=False)]
    return number, batch_pickle.loads(head[_NUMBERS.size + 8 * count :], buffers)
