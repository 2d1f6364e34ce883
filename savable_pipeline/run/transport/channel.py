"""`Channel`: messages with file descriptors between two processes, over a socket pair.

    a message   length u32 │ number of descriptors u32 │ bytes

The trainer's end never blocks: it keeps messages for a stopped process until that process reads again. A worker's end
blocks. A forked child closes its copies of all ends at once, so that an end is closed when its owner closes it or dies.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_HEAD = struct.Struct("<II")
_CHUNK = 1 << 17
_MOST_DESCRIPTORS = 16  # per read


class InOrder(Generic[T]):
    """Messages numbered 1, 2, … in their order, however they arrive; one that came before is dropped."""

    def __init__(self) -> None:
        self.next = 1  # the number of the message whose turn it is
        self._early: dict[int, T] = {}

    def due(self, number: int, message: T) -> list[T]:
        """The messages whose turn has come with this one."""
        if number >= self.next:
            self._early[number] = message
        found = []
        while self.next in self._early:
            found.append(self._early.pop(self.next))
            self.next += 1
        return found


class Channel:
    """One end of a channel. With `waits`, `send` blocks until all is sent; without, the rest is kept for `flush`."""

    def __init__(self, end: socket.socket, *, waits: bool) -> None:
        end.setblocking(waits)
        self._socket = end
        self._waits = waits
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()  # with duplicated descriptors, closed when sent
        self._read = bytearray()
        self._descriptors: deque[int] = deque()
        closed_in_children(self)

    def fileno(self) -> int:
        """The socket's descriptor, for `poll`; -1 once closed."""
        return self._socket.fileno()

    def watch(self, poll: select.poll) -> None:
        """Register with `poll` for messages to receive and, if some are unsent, for room to send them."""
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def has_come(self) -> bool:
        """Whether `receive` would return at once."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message with duplicates of some descriptors. Raises OSError if the other end is closed."""
        raw = memoryview(_HEAD.pack(len(message), len(descriptors)) + message)
        copies = [os.dup(descriptor) for descriptor in descriptors]
        self._unsent.append((raw, copies))
        self.flush()

    def flush(self) -> bool:
        """Send the rest of earlier messages; return whether all is sent. Raises OSError if the other end is closed."""
        while self._unsent:
            raw, descriptors = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [raw], descriptors) if descriptors else self._socket.send(raw)
            except BlockingIOError:
                return False
            _close(descriptors)
            self._unsent[0] = raw[sent:], []
            if sent == len(raw):
                self._unsent.popleft()
        return True

    def receive(self) -> list[tuple[bytes, list[int]]]:
        """The messages that have arrived, each with its descriptors, which the caller must close.

        Blocks for the first bytes only if this end `waits`. Raises EOFError if the other end is closed and all its
        messages have been received.
        """
        try:
            raw, descriptors, _, _ = socket.recv_fds(
                self._socket, _CHUNK, _MOST_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except BlockingIOError:
            return []
        except ConnectionError:
            raw, descriptors = b"", []
        if not raw:
            raise EOFError("the other end is closed")
        self._read += raw
        self._descriptors += descriptors
        return self._whole_messages()

    def _whole_messages(self) -> list[tuple[bytes, list[int]]]:
        messages, start = [], 0
        while len(self._read) - start >= _HEAD.size:
            length, count = _HEAD.unpack_from(self._read, start)
            end = start + _HEAD.size + length
            if len(self._read) < end:
                break
            message = bytes(memoryview(self._read)[start + _HEAD.size : end])
            messages.append((message, [self._descriptors.popleft() for _ in range(count)]))
            start = end
        if start:
            del self._read[:start]
        return messages

    def close(self) -> None:
        """Close this end, and every descriptor that was not sent or not received by the caller."""
        self._socket.close()
        for _, descriptors in self._unsent:
            _close(descriptors)
        self._unsent.clear()
        _close(self._descriptors)


_open: weakref.WeakSet[Any] = weakref.WeakSet()


def closed_in_children(end: Any) -> None:
    """Have a forked child close its copy of this end at once: else it would stay open when its owner closes it."""
    _open.add(end)


def _close_all() -> None:
    for end in list(_open):
        end.close()


os.register_at_fork(after_in_child=_close_all)


def _close(descriptors: list[int] | deque[int]) -> None:
    """Close all descriptors, and remove each from the list first: after a Ctrl-C none must be closed a second time."""
    while descriptors:
        os.close(descriptors.pop())
