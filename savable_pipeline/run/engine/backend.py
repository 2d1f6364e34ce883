"""`Backend`: builds batches in this process (`InProcess`) or in workers (`Pool`).

    open ─▶ start ─▶ ask, ask, answer, ask, … ─▶ stop ─▶ start ─▶ … ─▶ close
            ▲             forget_requests                              │
            └──────────────────────────────────────────────────────────┘

A run has one backend. Requests for a lane are answered in their order: the first one restores the lane, later ones
continue after it. No backend changes a batch or a state. `tests/support/fake_backend.py` has one without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.run.engine.messages import Delivery, RequestKind


class Backend(Protocol):
    """Builds the batches of a rank's lanes.

    One thread at a time calls it, except for `verify_delivered`.
    """

    fault: str
    """The error that the last look of `stop` found in delivered batches. "" (default): none."""

    @property
    def capacity(self) -> int:
        """The number of requests that keep it busy; 0 if `answer` builds the batch."""

    def open(self) -> None:
        """Open what starts workers: early, before this process has threads or uses a GPU."""

    def start(self) -> None:
        """Start the workers unless they run. Opens what starts them if it is closed."""

    def ask(self, lane: int, state: bytes, want: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Any:
        """Request the next batch of a lane at the position `state`; return a ticket.

        Only the first request for a lane since `forget_requests` or `start` uses `state` and `facts`.
        """

    def answer(self, ticket: Any) -> Delivery:
        """Wait for the answer to a request.

        Raises what the lane's stages raise, or `WorkerError`.
        """

    def agree(self, vote: Callable[[], int]) -> int:
        """Return what `vote` returns, called on the rank that builds the batches."""

    def forget_requests(self) -> None:
        """Drop all requests. Lanes restart at the states of new requests."""

    def verify_delivered(self) -> None:
        """Raise `ShardError` if a shard of delivered batches is known to have changed.

        Waits for no worker.
        """

    def look(self) -> None:
        """Let all workers check their shards, then call `verify_delivered`.

        Waits some seconds at most.
        """

    def stop(self) -> None:
        """Drop all requests and end the workers after a last look at their shards."""

    def close(self) -> None:
        """Stop, and end what starts the workers. Safe to call twice."""

    def numbers(self) -> dict[str, int]:
        """Return counters by name.

        They are `ready_batches`, `viewed_batches`, `restarts`, `num_workers` and `moved_lanes`.
        """
