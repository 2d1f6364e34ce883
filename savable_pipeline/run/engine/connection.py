"""`Connection` and `Host`: how the pool reaches its workers, whatever they are and wherever they run.

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

Answer: TypeAlias = "Delivery | Failure | int"

STARTED = 0  # the number of a worker's first message: its process id, or the `Failure` for which it cannot start
END_WAIT_S = 5.0  # for what takes milliseconds: a last look at the shards, the end of a killed process


class Ended(NamedTuple):
    """A worker's end. `how`: "ended by signal SIGKILL". `error`: set if every other would end likewise.

    `lost`: the machine that it ran on, or the link to it, is gone: nothing that the worker did is to blame.
    """

    worker: Connection
    how: str
    error: WorkerError | None = None
    lost: bool = False


def is_raised() -> bool:
    """Whether an error is being raised that says that a shard changed."""
    error = sys.exception()
    return isinstance(error, ShardError) and error.reason == "changed shard"


def log_fault(fault: str) -> None:
    """Log what a last look has found, unless the error being raised says it."""
    if not is_raised():
        log.error("%s", fault)


class Connection(Protocol):
    """One worker, as the pool sees it. No method waits, unless it says so."""

    @property
    def name(self) -> str:
        """What it is, for messages: "process 4711"."""

    @property
    def viewed(self) -> int:
        """The number of batches whose memory it lends to this process."""

    def send(self, request: Request) -> None:
        """Send a request; to a worker that is gone this does nothing."""

    def receive(self) -> list[tuple[int, Answer]]:
        """What has arrived, by number: see `STARTED` and `Request.number`. Raises EOFError once nothing more can."""

    def look(self) -> None:
        """Have the worker look at the shards of its lanes, whatever it is at."""

    def has_looked(self) -> bool:
        """Whether it has, since `look`."""

    def fault(self) -> str:
        """What it has reported as wrong with batches that it delivered; "" if nothing. In any thread."""

    def working_on(self) -> WorkerStatus:
        """What it works on, or worked on when it ended."""

    def stack(self) -> str:
        """Its Python stack, or that of its crash; "" if there is none. Waits a second for one that hangs."""

    def kill(self) -> bool:
        """End it without a last look; `Host.wait` says when. False if it cannot be."""

    def close(self) -> None:
        """Release what this process has of it; if it has not ended, nothing waits for that. Safe to call twice."""


class Host(Protocol):
    """Begins workers, and waits for them."""

    def now(self) -> float:
        """Seconds on the clock by which it waits."""
        return time.monotonic()

    def count(self, wanted: int) -> int:
        """How many workers the pool is to have now, at least one, where `wanted` is what the loader's settings say."""
        return wanted

    def begin(self, pinned: PinnedShards) -> Connection:
        """Begin a worker, which is to read these shards."""

    def wait(self, seconds: float) -> tuple[Sequence[Connection], list[Ended]]:
        """Wait up to so long for news: the workers from which something can be received, and those that ended."""

    def end_workers(self) -> None:
        """End all workers, after a last look if they can. Waits; raises `WorkerError` for one that does not end."""

    def close(self) -> Any:
        """End the workers, and what begins them."""
