"""`Connection` to a worker of any kind, and `Host`, which starts workers.

    Pool ── Request 1, 2, … ──▶ Connection ──▶ a worker, which runs lanes
         ◀── (1, Delivery or Failure), … ──      the bytes of its batches travel by the transport

A connection is one worker from its start to its end. Its replacement has a connection of its own, so no message of an
old worker is taken for one of the new worker. Messages are numbered and arrive in order, so a lost one is noticed. On
this machine workers are processes (process_host.py) or threads (thread_host.py).
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

WorkerAnswer: TypeAlias = "Delivery | Failure | int"  # the int is the process ID in a worker's first message

STARTED = 0  # number of a worker's first message: its process ID, or the `Failure` that prevents its start
END_WAIT_S = 5.0  # for actions that take milliseconds: a last check of the shards, the end of a killed process


class WorkerEnd(NamedTuple):
    """Event that a worker ended.

    `how` is text such as "ended by signal SIGKILL". `error` is set if every other worker would end in the same way.
    `lost` means that its machine or the link to that is gone, which the worker did not cause.
    """

    worker: Connection
    how: str
    error: WorkerError | None = None
    lost: bool = False


def is_raising_changed_shard() -> bool:
    """Return whether the exception being handled says that a shard changed."""
    error = sys.exception()
    return isinstance(error, ShardError) and error.reason == "changed shard"


def log_shard_error(message: str) -> None:
    """Log a message about a changed shard.

    If the exception being handled says the same, do nothing.
    """
    if not is_raising_changed_shard():
        log.error("%s", message)


class Connection(Protocol):
    """One worker, as the pool sees it. Only methods that say so wait."""

    @property
    def name(self) -> str:
        """Name for messages, such as "process 4711"."""

    @property
    def viewed_batches(self) -> int:
        """Number of batches whose memory this process still views."""

    def send(self, request: Request) -> None:
        """Send a request. Do nothing if the worker has ended."""

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        """Return the messages that have arrived, each with its number.

        The number is `STARTED` or `Request.number`.

        Raises EOFError once no more can arrive.
        """

    def check_shards(self) -> None:
        """Ask the worker to look for changed shards at once."""

    def has_checked(self) -> bool:
        """Return whether the worker has done so since the last `check_shards`."""

    def shard_error(self) -> str:
        """Return the message about a changed shard, or "".

        The shard changed after the worker read a batch from it. Any thread may call this.
        """

    def working_on(self) -> WorkerStatus:
        """Return the worker's stage, sample and request, now or when it ended."""

    def stack(self) -> str:
        """Return the Python stack of a running worker, or of its crash; "" if unknown.

        This waits up to a second for the worker to write it.
        """

    def kill(self) -> bool:
        """End the worker without a last check of its shards.

        Return False if it cannot be ended.
        """

    def close(self) -> None:
        """Release what this process uses for the connection.

        This does not wait for the worker's end. Safe to call twice.
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

    def wait(self, seconds: float) -> tuple[Sequence[Connection], list[WorkerEnd]]:
        """Wait until a worker sends a message or ends.

        Return those with messages, and the ends.
        """

    def end_workers(self) -> None:
        """End all workers, after a last check if possible, and wait for their ends.

        Raises `WorkerError` for a worker that does not end.
        """

    def close(self) -> Any:
        """End the workers, and release the resources that start them."""
