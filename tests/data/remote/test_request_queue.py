"""What somebody waits for begins at once and first; what is fetched ahead begins while the link has room."""

from __future__ import annotations

import threading
import time

from savable_pipeline.data.remote.download_process import QueuedRequest, RequestQueue
from savable_pipeline.data.remote.object_store import Pace
from savable_pipeline.data.remote.session import Urgency

AT_ONCE = Pace().at_once


def request(number: int, urgency: Urgency = Urgency.LATER, size: int = 10 * AT_ONCE) -> QueuedRequest:
    return QueuedRequest(urgency, number, 0, "rows", (), size)


class Threads:
    """Take requests from a queue, each a single one."""

    def __init__(self, queue: RequestQueue) -> None:
        self.got: list[QueuedRequest] = []
        for _ in range(16):
            threading.Thread(target=lambda: self.got.append(queue.get()), daemon=True).start()

    def numbers(self, count: int) -> list[int]:
        """The numbers of the requests that have begun, once there are `count` of them, and a little later."""
        deadline = time.monotonic() + 60
        while len(self.got) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return [one.number for one in self.got]


def test_the_most_urgent_comes_first_then_the_oldest() -> None:
    queue = RequestQueue(Pace(), 16)
    for number, urgency in enumerate([Urgency.LATER, Urgency.SOON, Urgency.NOW, Urgency.SOON, Urgency.NOW]):
        queue.put(request(number, urgency, size=1))
    assert [queue.get().number for _ in range(5)] == [2, 4, 1, 3, 0]


def test_only_what_somebody_waits_for_goes_beyond_the_pace() -> None:
    queue = RequestQueue(Pace(), 16)
    for number in range(12):
        queue.put(request(number))
    threads = Threads(queue)
    assert threads.numbers(4) == [0, 1, 2, 3]  # each a quarter of what is asked for at once
    queue.put(request(20, Urgency.SOON))
    queue.put(request(21, Urgency.NOW))
    assert threads.numbers(5)[4:] == [21]
    queue.done(threads.got[4])
    queue.done(threads.got[0])
    assert threads.numbers(6)[5:] == [20]


def test_small_requests_are_made_by_all_threads_but_those_kept_for_what_is_urgent() -> None:
    queue = RequestQueue(Pace(), 5)
    for number in range(9):
        queue.put(request(number, size=6000))
    assert len(Threads(queue).numbers(5)) == 5
