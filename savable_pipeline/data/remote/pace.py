"""`Pace`: how many bytes a downloading process asks for at once, by how fast they come.

    at once       what comes in 2 s, half a MiB at least   a slow link carries little but what is needed next
    in a request  1 to 8 MiB, or a quarter of that         what is more urgent waits for a second, not for minutes

    2.5 MB/s: 5 MB at once, in requests of 1 MiB     50 MB/s: 100 MB at once, in requests of 8 MiB

Processes that share a link measure their own share of it. Bytes are bounded, not requests: small ones are made as many
at a time as there are threads, however long each takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

PIECE = 8 << 20  # bytes asked of a server in one request, at most
_REQUEST = 1 << 20  # bytes of a request that is long enough to make little of its latency
_AT_ONCE_S = 2.0
_LEAST_AT_ONCE = 1 << 19
_CHUNK = 1 << 18  # bytes passed on at a time: few enough to stay in the processor's cache
_WINDOW_S = 0.2  # over which speed is measured, at least
_FIRST_SPEED = float(1 << 20)  # until it is measured


class Pace:
    """Measures bytes a second while some are awaited, and tells what to ask for; safe in threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._speed = _FIRST_SPEED
        self._asking = 0  # requests under way
        self._since = 0.0  # when there was a request under way again, or the window began
        self._seconds, self._bytes = 0.0, 0  # of the window: with requests under way before that, and what has come

    @property
    def at_once(self) -> int:
        """The bytes that should be under way together."""
        return max(_LEAST_AT_ONCE, int(self._speed * _AT_ONCE_S))

    @property
    def request(self) -> int:
        """The bytes to ask for in one request."""
        at_once = self.at_once
        return min(PIECE, max(at_once // 8, min(at_once // 4, _REQUEST)))

    @property
    def chunk(self) -> int:
        """The bytes to pass on at a time: what is lost of a request that fails."""
        return min(_CHUNK, self.request // 16)

    @contextlib.contextmanager
    def asking(self) -> Iterator[Callable[[int], None]]:
        """While a request is under way; gives the function to tell of bytes that have come."""
        with self._lock:
            if not self._asking:
                self._since = self._clock()
            self._asking += 1
        try:
            yield self._came
        finally:
            with self._lock:
                self._asking -= 1
                if not self._asking:
                    self._seconds += self._clock() - self._since

    def _came(self, size: int) -> None:
        with self._lock:
            self._bytes += size
            now = self._clock()
            seconds = self._seconds + now - self._since
            if seconds >= _WINDOW_S:
                self._speed = (self._speed + self._bytes / seconds) / 2
                self._since, self._seconds, self._bytes = now, 0.0, 0
