"""`Connection` to a worker of any kind, and `Host`, which starts workers.

    Pool ── Request 1, 2, … ──▶ Connection ──▶ a worker, which runs lanes
         ◀── (1, Delivery or Failure), … ──      the bytes of its batches travel by the transport

A connection is one worker from its start to its end. What replaces the worker is another connection, so a message that
an old worker still sends is never taken for one of the new worker. Messages arrive in order, and their numbers show one
that is lost. On this machine workers are processes (process_host.py) or threads (thread_host.py).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.errors import ShardError, WorkerError
from savable_pipeline.run.engine.messages import Delivery, Failure, Request, WorkerStatus

log = logging.getLogger(__name__)

WorkerAnswer: TypeAlias = "Delivery | Failure | int"

STARTED = 0  # the number of a worker's first message: its process id, or the `Failure` for which it cannot start
END_WAIT_S = 5.0  # for what takes milliseconds: a last look at the shards, the end of a killed process


class Ended(NamedTuple):
    """End of a worker.

    `how`: "ended by signal SIGKILL". `error`: set if every other worker would end alike. `lost`: the machine of the
    worker, or the link to it, is gone, which the worker has not caused.
    """

    worker: Connection
    how: str
    error: WorkerError | None = None
    lost: bool = False


def is_raised() -> bool:
    """Return whether the error that is being raised says that a shard changed."""
    error = sys.exception()
    return isinstance(error, ShardError) and error.reason == "changed shard"


def log_fault(fault: str) -> None:
    """Log what a last look has found, unless the error that is being raised says it."""
    if not is_raised():
        log.error("%s", fault)


class Connection(Protocol):
    """One worker, as the pool sees it. Only a method that says so waits."""

    @property
    def name(self) -> str:
        """Name for messages, such as "process 4711"."""

    @property
    def viewed(self) -> int:
        """Number of batches whose memory it lends to this process."""

    def send(self, request: Request) -> None:
        """Send a request. For a worker that has ended this does nothing."""

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        """Return what has arrived, each with its number: `STARTED` or `Request.number`.

        Raises EOFError once nothing more can arrive.
        """

    def look(self) -> None:
        """Have the worker check the shards of its lanes at once."""

    def has_looked(self) -> bool:
        """Return whether the worker has checked them since `look`."""

    def fault(self) -> str:
        """Return what is wrong with batches that the worker delivered, or "".

        Any thread may call this.
        """

    def working_on(self) -> WorkerStatus:
        """Return what the worker works on, or worked on when it ended."""

    def stack(self) -> str:
        """Return the worker's Python stack, or that of its crash, or "".

        Waits a second for a worker that hangs.
        """

    def kill(self) -> bool:
        """End the worker without a last look. False if it cannot be ended."""

    def close(self) -> None:
        """Release what this process has of the worker, without waiting for its end.

        Safe to call twice.
        """


class Host(Protocol):
    """Starts workers, and waits for them."""

    def now(self) -> float:
        """Return the seconds of the clock by which it waits."""
        return time.monotonic()

    def count(self, wanted: int) -> int:
        """Return how many workers the pool is to have now, at least one.

        `wanted` is the number in the loader's settings.
        """
        return wanted

    def begin(self, pinned: PinnedShards) -> Connection:
        """Start a worker, which is to read these shards."""

    def wait(self, seconds: float) -> tuple[Sequence[Connection], list[Ended]]:
        """Wait up to so long for workers that have sent something or ended.

        Returns both.
        """

    def end_workers(self) -> None:
        """End all workers, after a last look if they can, and wait for their ends.

        Raises `WorkerError` for one that does not end.
        """

    def close(self) -> Any:
        """End the workers, and what starts them."""
