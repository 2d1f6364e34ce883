"""`Channel`: messages with file descriptors between processes, over a socket pair.

    message   length u32 │ number of descriptors u32 │ bytes

The trainer's end never blocks. It queues messages for a suspended process until that process reads again. A worker's
end blocks. A forked child closes its copies of all ends at once. Otherwise an end would stay open in the child after
the process that it belongs to has closed it or died.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("<II")
_READ_BYTES, _MOST_DESCRIPTORS = 1 << 17, 16  # most that one `receive` reads


class Channel:
    """One end of a channel.

    If it is `blocking`, `send` blocks until everything is sent. Otherwise it queues the rest for `flush`.
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        end.setblocking(blocking)
        self._socket = end
        self._blocking = blocking
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()  # bytes, and our duplicates of the descriptors
        self._received = bytearray()  # the start of a message that has not arrived completely
        self._descriptors: deque[int] = deque()  # received descriptors of messages that are not complete
        close_in_children(self)

    def fileno(self) -> int:
        """Return the socket's descriptor for `poll`, or -1 once closed."""
        return self._socket.fileno()

    def watch(self, poll: select.poll) -> None:
        """Register with `poll` for messages and, if some are unsent, for room to send."""
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def has_message(self) -> bool:
        """Return whether `receive` would return or raise at once, without blocking."""
        (poll := select.poll()).register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message with duplicates of some descriptors.

        Raises OSError if the other end is closed.
        """
        raw = memoryview(_HEADER.pack(len(message), len(descriptors)) + message)
        copies = [os.dup(descriptor) for descriptor in descriptors]
        self._unsent.append((raw, copies))
        self.flush()

    def flush(self) -> bool:
        """Send queued messages, and return whether all are sent.

        Raises OSError if the other end is closed.
        """
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
        """Return the messages that have arrived, each with its descriptors.

        The caller must close the descriptors. This blocks for the first bytes only if this end is `blocking`. Raises
        EOFError if the other end is closed and all its messages have been received.
        """
        try:
            raw, descriptors, _, _ = socket.recv_fds(
                self._socket, _READ_BYTES, _MOST_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except BlockingIOError:
            return []
        except ConnectionError:
            raw, descriptors = b"", []
        if not raw:
            raise EOFError("the other end is closed")
        self._received += raw
        self._descriptors += descriptors
        return self._complete_messages()

    def _complete_messages(self) -> list[tuple[bytes, list[int]]]:
        """Remove complete messages from the received bytes, and return each with its descriptors."""
        messages, start = [], 0
        while len(self._received) - start >= _HEADER.size:
            length, count = _HEADER.unpack_from(self._received, start)
            end = start + _HEADER.size + length
            if len(self._received) < end:
                break
            message = bytes(memoryview(self._received)[start + _HEADER.size : end])
            messages.append((message, [self._descriptors.popleft() for _ in range(count)]))
            start = end
        if start:
            del self._received[:start]
        return messages

    def close(self) -> None:
        """Close this end, and every descriptor that was not sent or not received."""
        self._socket.close()
        for _, descriptors in self._unsent:
            _close(descriptors)
        self._unsent.clear()
        _close(self._descriptors)


_open_ends: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(end: Any) -> None:
    """Register an end, such as a channel or socket, to be closed in each forked child.

    Otherwise the child's copy would stay open after this process closes the end.
    """
    _open_ends.add(end)


def _close_all() -> None:
    for end in list(_open_ends):
        end.close()


os.register_at_fork(after_in_child=_close_all)


def _close(descriptors: list[int] | deque[int]) -> None:
    """Close all descriptors, and remove each from the list before.

    So a Ctrl-C in between never lets one be closed a second time.
    """
    while descriptors:
        os.close(descriptors.pop())
