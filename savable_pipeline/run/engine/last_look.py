"""Checks shards after their batches were given: a worker looks at them when it is idle, at the end of a finite pass,
when it is asked to, and before it ends.

    trainer closes its end of the channel ──▶ worker: looks, reports on its status page, ends

So a batch that was made of an overwritten shard within the last second of a run is still reported.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from savable_pipeline.errors import ShardError
from savable_pipeline.run.engine.lane_runner import LaneRunner

log = logging.getLogger(__name__)

T = TypeVar("T")
_IDLE_S = 1.0


def log_fault(fault: str) -> None:
    """Log what a last look has found, unless the error being raised says it."""
    if not is_raised():
        log.error("%s", fault)


def is_raised() -> bool:
    """Whether an error is being raised that says that a shard changed."""
    error = sys.exception()
    return isinstance(error, ShardError) and error.reason == "changed shard"


class LastLook:
    """In a worker: looks at the shards of its lanes in any thread, one at a time, and reports what is wrong."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self.runner: LaneRunner | None = None  # until the worker has one
        self._report = report
        self._lock = threading.Lock()

    def look(self) -> None:
        """Report if delivered batches are of shards that changed."""
        with self._lock:
            try:
                if self.runner is not None:
                    self.runner.verify_delivered()
            except Exception as error:
                self._report(str(error))

    def next_of(self, requests: queue.SimpleQueue[T]) -> T:
        """The next request; if none arrives for a second, look meanwhile."""
        try:
            return requests.get(timeout=_IDLE_S)
        except queue.Empty:
            self.look()
            return requests.get()

    def end(self) -> NoReturn:
        """Look, and end the process."""
        try:
            self.look()
        finally:
            os._exit(0)
