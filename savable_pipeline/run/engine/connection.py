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

STARTED = 0  # number of a worker's first message: its process ID, or the `Failure` that prevents its start
END_WAIT_S = 5.0  # for actions that take milliseconds: a last check of the shards, the end of a killed process


class Ended(NamedTuple):
    """End of a worker.

    `how` is text such as "ended by signal SIGKILL". `error` is set if every other worker would end alike. `lost` means
    that the worker's machine or the link to it is gone, which the worker has not caused.
    """

    worker: Connection
    how: str
    error: WorkerError | None = None
    lost: bool = False


def is_raised() -> bool:
    """Return whether the exception being raised says that a shard changed."""
    error = sys.exception()
    return isinstance(error, ShardError) and error.reason == "changed shard"


def log_fault(fault: str) -> None:
    """Log a fault of the last check, unless the exception being raised says it."""
    if not is_raised():
        log.error("%s", fault)


class Connection(Protocol):
    """One worker, as the pool sees it. Only methods that say so wait."""

    @property
    def name(self) -> str:
        """Name for messages, such as "process 4711"."""

    @property
    def viewed(self) -> int:
        """Number of batches whose memory it lends to this process."""

    def send(self, request: Request) -> None:
        """Send a request. Do nothing if the worker has ended."""

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        """Return the messages that have arrived, each with its number.

        The number is `STARTED` or `Request.number`.

        Raises EOFError once no more can arrive.
        """

    def check_shards(self) -> None:
        """Ask the worker to check the shards of its lanes at once."""

    def has_checked(self) -> bool:
        """Return whether the worker has checked them since `check_shards`."""

    def fault(self) -> str:
        """Return the error of batches that the worker delivered, or "".

        Any thread may call this.
        """

    def working_on(self) -> WorkerStatus:
        """Return what the worker works on, or worked on when it ended."""

    def stack(self) -> str:
        """Return the worker's Python stack, or that of its crash, or "".

        This waits a second for a worker that hangs.
        """

    def kill(self) -> bool:
        """End the worker without a last check. Return False if it cannot be ended."""

    def close(self) -> None:
        """Release this process's resources of the worker, without waiting for its end.

        Safe to call twice.
        """


class Host(Protocol):
    """Starts workers, and waits for them."""

    def now(self) -> float:
        """Return the time of the clock that measures timeouts, in seconds."""
        return time.monotonic()

    def count(self, wanted: int) -> int:
        """Return how many workers the pool should have now, at least one.

        `wanted` is the number in the loader's settings.
        """
        return wanted

    def start_worker(self, pinned: PinnedShards) -> Connection:
        """Start a worker that reads these shards."""

    def wait(self, seconds: float) -> tuple[Sequence[Connection], list[Ended]]:
        """Wait for workers that have sent messages or ended, and return both lists."""

    def end_workers(self) -> None:
        """End all workers, after a last check if possible, and wait for their ends.

        Raises `WorkerError` for a worker that does not end.
        """

    def close(self) -> Any:
        """End the workers, and release the resources that start them."""
