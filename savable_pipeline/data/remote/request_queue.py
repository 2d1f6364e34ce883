"""`RequestQueue`: requests that wait for a thread, the most urgent first, and begin only while the link has room."""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass
from typing import Any

from savable_pipeline.data.remote.downloader import Urgency
from savable_pipeline.data.remote.pace import Pace


@dataclass(slots=True, order=True)
class QueuedRequest:
    """What to do, by urgency and then by arrival. `size`: the bytes it is for, as far as that is known."""

    urgency: int
    number: int
    ticket: int
    kind: str
    arguments: tuple[Any, ...]
    size: int


class RequestQueue:
    """Gives requests to threads. What somebody waits for begins at once; the rest keeps to the pace, and leaves some
    threads free for that.
    """

    def __init__(self, pace: Pace, threads: int) -> None:
        self._pace = pace
        self._most = threads
        self._waiting: list[QueuedRequest] = []
        self._begun: dict[int, int] = {}  # the bytes of each request that a thread has, by its number
        self._changed = threading.Condition()

    def put(self, request: QueuedRequest) -> None:
        """Adds a request."""
        with self._changed:
            heapq.heappush(self._waiting, request)
            self._changed.notify()

    def get(self) -> QueuedRequest:
        """The next request, once it may begin; `done` must follow."""
        with self._changed:
            while not self._may_begin():
                self._changed.wait()
            request = heapq.heappop(self._waiting)
            self._begun[request.number] = self._share(request)
            self._changed.notify()  # another may begin too
            return request

    def done(self, request: QueuedRequest) -> None:
        """A request, or a part of it that was begun, has ended."""
        with self._changed:
            del self._begun[request.number]
            self._changed.notify()

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        first = self._waiting[0]
        if first.urgency == Urgency.NOW or not self._begun:
            return True
        under_way = sum(self._begun.values()) + self._share(first)
        return len(self._begun) < self._most and under_way <= self._pace.at_once

    def _share(self, request: QueuedRequest) -> int:
        """The bytes of one part of a request."""
        return min(request.size, self._pace.request)
