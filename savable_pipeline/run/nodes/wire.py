"""`Link`: an authenticated TCP connection between a trainer and an agent.

It carries frames in order, each once:

    frame     header ┃ head ┃ body
    header    magic │ kind │ bytes of the head │ sequence number │ bytes of the body
              │ SHA-256 of the head │ AES-GMAC of the body │ HMAC-SHA256 of all this

Each direction of each connection has keys of its own. The header is verified before memory is allocated for the rest,
so an attacker cannot choose the size. Head and body are verified before they are unpickled. The nonce of the GMAC is
the sequence number. On a trusted network, bodies have no GMAC.

The body is the memory of a batch's tensors. It is sent from where the worker wrote it, and received into memory that is
reused once the trainer has dropped the batch.

A frame with a wrong sequence number ends the connection. A new connection, with other keys, replaces it.

The answer of a worker is sent on as the worker wrote it, and only the trainer unpickles it (`WrittenAnswer`):

    head   number of the request │ bytes of each buffer, u64 … │ pickle        body   buffer │ padding to 64 │ buffer …

The handshake proves that both ends have the key, which is never sent:

    agent   ── magic │ 32 random bytes ──▶ trainer
    agent   ◀── 32 random bytes │ purpose │ session │ trusted network? │ proof of the transcript ── trainer
    agent   ── proof of the transcript ──▶ trainer

The transcript is all bytes sent so far. It has random bytes of both sides, so a recorded handshake cannot be replayed.
The proofs are HMAC-SHA256. Both sides derive the keys of each direction from the full transcript, by HMAC-SHA512.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import mmap
import os
import pickle
import select
import socket
import stat
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.run.engine.connection import STARTED, WorkerAnswer
from savable_pipeline.run.engine.shared_batches import AnswerReader
from savable_pipeline.run.transport import batch_pickle
from savable_pipeline.run.transport.batch_pickle import Buffer
from savable_pipeline.run.transport.channel import close_in_children
from savable_pipeline.run.transport.segments import ALIGN

WIRE_MAGIC = b"SvP2"  # changes with the layout of frames and of the handshake
HEADER = struct.Struct("<4sBxxxIQQ32s16s")
CODE_BYTES = 16  # size of an authentication code
_GMAC_BYTES = 1 << 30  # most bytes in one call, because OpenSSL counts in 32 bits
MOST_HEAD, MOST_BODY = 1 << 30, 1 << 36  # bytes; a longer frame is rejected
_SMALL = 1 << 16  # bytes; a body up to this size does not reuse memory
_FREE_BLOCKS = 8  # most free blocks of memory to store for reuse
_MOST_VIEWS = 512  # most buffers that one system call sends
_MOST_FRAMES = 16  # most frames that one call of `receive` returns
_WAKE_BYTES = 1 << 20  # bytes of a large body that must arrive before the process is woken

# Frames about a job: from the trainer to the session, and the answers.
JOB, AGREED, REFUSED = 1, 2, 3
# Frames about a worker: from the trainer to the session, and from the session to the trainer.
START_WORKER, REQUEST, CHECK, STACK, KILL, END = 10, 11, 12, 13, 14, 15
ANSWER, SHARD_ERROR, CHECKED, STATUS, ENDED = 20, 21, 22, 23, 24
# A ping of the trainer, and the session's answer to it.
PING, PONG = 30, 31
# Between two ranks that share batches: a note, before the answer that it announces.
PEER = 40


class WireError(ConnectionError):
    """Error for a frame that is not the next one that the other side has sent."""


class Secret(NamedTuple):
    """Keys that the two ends of a connection share: 64 bytes for each direction.

    The first half authenticates headers, the second half bodies, unless the network is `trusted`.
    """

    send_key: bytes
    receive_key: bytes
    trusted: bool = False


class Frame(NamedTuple):
    """Frame that has arrived."""

    kind: int
    head: bytearray
    body: memoryview


class ReusedMemory:
    """Memory for the bodies of frames, reused once nothing views it any more.

    Its pages are private, so what a forked child views does not change.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_FREE_BLOCKS)

    def allocate(self, size: int, viewed: list[int]) -> memoryview:
        """Return `size` writable bytes.

        `viewed[0]` is the connection's number of blocks in use. It includes this one as long as something views it.
        """
        if size <= _SMALL:
            return memoryview(bytearray(size))
        block = next((each for each in self._free if size <= len(each) <= 2 * size + _SMALL), None)
        if block is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
            block = mmap.mmap(-1, -(-size // _SMALL) * _SMALL, flags=flags)
        else:
            self._free.remove(block)
        full_transcript = np.frombuffer(block, np.uint8)
        viewed[0] += 1

        def free(block: mmap.mmap = block) -> None:
            viewed[0] -= 1
            self._free.append(block)

        weakref.finalize(full_transcript, free).atexit = False
        return memoryview(full_transcript)[:size]  # type: ignore[arg-type]


class Link:
    """One end of a connection. Only `exchange` blocks.

    Raises `WireError`, or another OSError, if the connection fails.
    """

    def __init__(self, connection: socket.socket, secret: Secret, memory: ReusedMemory | None = None) -> None:
        enable_keepalive(connection)
        connection.setblocking(False)
        self._socket = connection
        self._secret = secret
        self._memory = memory or ReusedMemory()
        self.viewed = [0]  # number of blocks of memory that this process views
        self.has_heard = True  # whether anything arrived since the last ping
        self.unanswered_pings = 0  # unanswered pings in a row
        self._sent = self._received = 0  # numbers of frames
        self._unsent: deque[memoryview] = deque()
        self._arrived_frames: list[Frame] = []  # complete frames that `receive` has not returned yet
        self._failure: Exception | None = None  # why nothing more can arrive
        self._parser = self._parse()
        self._unfilled = memoryview(b"")  # the memory that the parser wants to be filled next
        self._wake_bytes = 1  # bytes that must arrive before the system's `poll` returns
        close_in_children(self)

    def fileno(self) -> int:
        """Return the socket's descriptor, or -1 once closed."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """Events for `poll`: data to receive and, if frames are unsent, room to send."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, kind: int, head: Buffer = b"", body: Sequence[Buffer] = ()) -> None:
        """Send a frame, or queue what does not fit into the socket for `flush`."""
        views = [memoryview(each).cast("B") for each in body if len(each)]
        key, number = self._secret.send_key, self._sent
        codes = hashlib.sha256(head).digest(), self._body_code(key, number, views)
        header = HEADER.pack(WIRE_MAGIC, kind, len(head), number, sum(map(len, views)), *codes)
        self._sent += 1
        self._unsent.append(memoryview(header + header_code(key, header)))
        if len(head):
            self._unsent.append(memoryview(head).cast("B"))
        self._unsent.extend(views)
        self.flush()

    def flush(self) -> bool:
        """Send queued frames, and return whether all are sent."""
        while self._unsent:
            views = [self._unsent[i] for i in range(min(len(self._unsent), _MOST_VIEWS))]
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
        """Return the frames that have arrived. Raises EOFError once nothing more can."""
        try:
            while self._failure is None and len(self._arrived_frames) < _MOST_FRAMES:
                while not self._unfilled:
                    self._unfilled = next(self._parser)
                count = self._socket.recv_into(self._unfilled)
                if not count:
                    raise EOFError("the other side closed the connection")
                self.has_heard = True
                self._unfilled = self._unfilled[count:]
        except BlockingIOError:
            self._wake_at(min(len(self._unfilled), _WAKE_BYTES))
        except StopIteration:
            self._failure = WireError("the program was interrupted during a message")
        except (EOFError, OSError) as error:
            self._failure = error
        if self._failure is not None and not self._arrived_frames:
            raise self._failure
        frames, self._arrived_frames = self._arrived_frames, []
        return frames

    def poll(self, handle: Callable[[Frame], object]) -> str:
        """Send queued frames, and call `handle` with each that has arrived.

        Returns why the connection is lost, or "".
        """
        try:
            self.flush()
            for frame in self.receive():
                handle(frame)
        except (OSError, EOFError) as error:
            return error_text(error)
        return ""

    def _wake_at(self, size: int) -> None:
        """Let the system's `poll` return only once at least `size` bytes have arrived.

        Otherwise it would return for each of the many small pieces of a large body.
        """
        if size != self._wake_bytes and hasattr(socket, "SO_RCVLOWAT"):
            self._wake_bytes = size
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _parse(self) -> Iterator[memoryview]:
        """Yield the memory to fill with the header, the head and the body of each frame, and append complete frames."""
        header, key = memoryview(bytearray(HEADER.size + CODE_BYTES)), self._secret.receive_key
        while True:
            yield header
            magic, kind, head_bytes, number, body_bytes, head_hash, body_code = HEADER.unpack_from(header)
            expected_code = header_code(key, header[: HEADER.size])
            if magic != WIRE_MAGIC or not hmac.compare_digest(expected_code, header[HEADER.size :]):
                raise WireError(f"message {self._received} was not sent by the other side")
            if number != self._received:
                raise WireError(f"message {number} arrived instead of {self._received}")
            if head_bytes > MOST_HEAD or body_bytes > MOST_BODY:
                raise WireError(f"a message of {head_bytes} + {body_bytes} bytes is too long")
            head = bytearray(head_bytes)
            yield memoryview(head)
            if not hmac.compare_digest(hashlib.sha256(head).digest(), head_hash):
                raise WireError(f"the header of message {number} was changed in transit")
            body = self._memory.allocate(body_bytes, self.viewed)
            yield body
            if not hmac.compare_digest(self._body_code(key, number, [body]), body_code):
                raise WireError(f"the body of message {number} was changed in transit")
            self._received += 1
            self._arrived_frames.append(Frame(kind, head, body))
            del body, head  # a view from here would keep the frame's memory in use

    def _body_code(self, key: bytes, number: int, body: Sequence[memoryview]) -> bytes:
        """Return the AES-GMAC of a body; zeros for an empty body or a trusted network."""
        if self._secret.trusted or not any(map(len, body)):
            return bytes(CODE_BYTES)
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        gmac = Cipher(algorithms.AES(key[32:]), modes.GCM(number.to_bytes(12, "little"))).encryptor()
        for view in body:
            for start in range(0, len(view), _GMAC_BYTES):
                gmac.authenticate_additional_data(view[start : start + _GMAC_BYTES])
        gmac.finalize()
        return gmac.tag

    def exchange(self, kind: int, head: Buffer, seconds: float) -> Frame:
        """Send a frame and wait for the answer.

        Raises OSError or EOFError if none comes in `seconds`.
        """
        self.send(kind, head)
        deadline = time.monotonic() + seconds
        while not (frames := self.receive()):
            (poll := select.poll()).register(self._socket, self.events)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer in {seconds:g} s")
            self.flush()
        return frames[0]

    def close(self) -> None:
        """Close the socket."""
        self._unsent.clear()
        self._socket.close()


def error_text(error: Exception) -> str:
    """Return the text of an error, or the name of its class if it has none."""
    return str(error) or type(error).__name__


def can_authenticate_bodies() -> bool:
    """Return whether the package `cryptography` is installed."""
    return importlib.util.find_spec("cryptography") is not None


def header_code(key: bytes, header: Buffer) -> bytes:
    """Return the authentication code of a header."""
    return hmac.digest(key[:32], header, "sha256")[:CODE_BYTES]


def enable_keepalive(connection: socket.socket) -> None:
    """Send small messages at once, and let the system probe a silent machine.

    The other system answers the probes, even if its process is suspended or busy. So only a lost machine or network
    ends the connection.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_NUMBERS = struct.Struct("<QI")  # number of the request, and of the buffers
_PADDING = bytes(ALIGN)


class WrittenAnswer(NamedTuple):
    """Answer as a worker wrote it.

    The buffers view the worker's shared memory, which is free again when they are no longer used.
    """

    pickled: Buffer
    buffers: Sequence[Buffer]

    def head(self, number: int) -> bytes:
        """Return the head of the frame for request `number`."""
        sizes = struct.pack(f"<{len(self.buffers)}Q", *map(len, self.buffers))
        return b"".join((_NUMBERS.pack(number, len(self.buffers)), sizes, self.pickled))

    def body(self) -> list[Buffer]:
        """Return the body of the frame, in pieces."""
        return [piece for buffer in self.buffers for piece in (buffer, _PADDING[: -len(buffer) % ALIGN])]


class WrittenAnswerReader(AnswerReader):
    """Reads answers as a worker wrote them, and unpickles only its first message."""

    def read(self, message: bytes, descriptors: list[int]) -> tuple[int, Any]:
        """Return the number of the request, and its `WrittenAnswer`."""
        number, small_answer, location = pickle.loads(message)
        if location is not None:
            *buffers, pickled = self.view(location, descriptors)
            return number, WrittenAnswer(pickled, buffers)
        return number, batch_pickle.loads(*small_answer) if number == STARTED else WrittenAnswer(*small_answer)


def read_answer(frame: Frame) -> tuple[int, WorkerAnswer]:
    """Return the number of the request and the answer in a frame.

    Raises `WireError` if the lengths in the head do not fit the frame.
    """
    head = memoryview(frame.head)
    try:
        number, count = _NUMBERS.unpack_from(head)
        sizes = struct.unpack_from(f"<{count}Q", head, _NUMBERS.size)
    except struct.error as error:
        raise WireError(f"an answer has a header of only {len(head)} bytes") from error
    starts = list(accumulate((size + -size % ALIGN for size in sizes), initial=0))
    if starts[-1] != len(frame.body):
        raise WireError(f"answer {number} has buffers of {starts[-1]} bytes in a body of {len(frame.body)}")
    buffers = [frame.body[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return number, batch_pickle.loads(head[_NUMBERS.size + 8 * count :], buffers)


FOR_SESSION, FOR_WORKER, FOR_PEER = 1, 2, 3
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_REQUEST = struct.Struct(f"<{_RANDOM_BYTES}sB16s?")
HELLO_BYTES = len(WIRE_MAGIC) + _RANDOM_BYTES
REPLY_BYTES = _REQUEST.size + _PROOF_BYTES
_MIN_KEY_BYTES = 16


class LinkRequest(NamedTuple):
    """Request of a trainer for a connection."""

    purpose: int  # `FOR_SESSION`, `FOR_WORKER` or `FOR_PEER`
    session: bytes  # 16 random bytes, the same for all connections of a session; for a peer, its index
    trusted: bool  # whether nobody else can change the traffic, so that bodies need no authentication code


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Read the key in a file, without white space around it.

    Raises ValueError if others could read or replace it, or if it is too short.
    """
    file = Path(path)
    try:
        with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
            status = os.fstat(opened.fileno())
            key = opened.read(1 << 16).strip() if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ValueError(
            f"{file}: {error.strerror}. Create a key: (umask 077; head -c 32 /dev/urandom | base64 > {file})"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file} is a pipe or a device. Write the key into a file.")
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"{file} belongs to user {status.st_uid}, who could run code as you. Run chown {os.geteuid()} {file}, or "
            "create another key."
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{file} can be read by other users, who could run code as you. Run chmod 600 {file}.")
    if len(key) < _MIN_KEY_BYTES:
        raise ValueError(
            f"{file} has {len(key)} bytes, fewer than {_MIN_KEY_BYTES}. Create a key: (umask 077; head -c 32 "
            f"/dev/urandom | base64 > {file})"
        )
    return key


def new_hello() -> bytes:
    """Return the agent's first message."""
    return WIRE_MAGIC + os.urandom(_RANDOM_BYTES)


def check_reply(key: bytes, hello: bytes, reply: bytes) -> tuple[bytes, LinkRequest, Secret] | None:
    """Return the agent's proof, the trainer's request, and the connection's secret.

    `hello` is the agent's first message, and `reply` the answer to it. The result is None if `reply` does not prove
    that the trainer has the key.
    """
    transcript = hello + reply[: _REQUEST.size]
    if not hmac.compare_digest(_proof(key, b"trainer", transcript), reply[_REQUEST.size :]):
        return None
    _, *fields = _REQUEST.unpack_from(reply)
    full_transcript, request = hello + reply, LinkRequest(*fields)
    to_trainer, to_agent = _keys(key, b"to trainer", full_transcript), _keys(key, b"to agent", full_transcript)
    secret = Secret(to_trainer, to_agent, request.trusted)
    return _proof(key, b"agent", full_transcript), request, secret


def greet(connection: socket.socket, key: bytes, request: LinkRequest) -> Secret:
    """Do the trainer's part of the handshake, and return the connection's secret.

    Each read waits up to the timeout of the socket. Raises ConnectionError if the other side has another key.
    """
    hello = read_exactly(connection, HELLO_BYTES)
    if hello[: len(WIRE_MAGIC)] != WIRE_MAGIC:
        raise ConnectionError("no agent of this version answers. Check the port and the version.")
    transcript = hello + _REQUEST.pack(os.urandom(_RANDOM_BYTES), *request)
    full_transcript = transcript + _proof(key, b"trainer", transcript)
    connection.sendall(full_transcript[len(hello) :])
    if not hmac.compare_digest(_proof(key, b"agent", full_transcript), read_exactly(connection, _PROOF_BYTES)):
        raise ConnectionError("the agent has another key. Use the same key_file= on both sides.")
    return Secret(_keys(key, b"to agent", full_transcript), _keys(key, b"to trainer", full_transcript), request.trusted)


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    """Return the proof that an end in this role, "trainer" or "agent", has the key."""
    return hmac.digest(key, role + b"\0" + transcript, "sha256")


def _keys(key: bytes, direction: bytes, transcript: bytes) -> bytes:
    """Return the 64 bytes of keys for one direction of a connection, see `Secret`."""
    return hmac.digest(key, direction + b"\0" + transcript, "sha512")


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes. Each read waits up to the socket's timeout."""
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionError("it closed the connection. Use the same --key-file and version on both sides.")
        received += more
    return received
