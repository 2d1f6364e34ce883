"""`Backend` builds batches: `InProcess`, in a `Pool` of workers, or at a peer.

    open ─▶ start ─▶ request, request, answer, request, … ─▶ stop ─▶ start ─▶ … ─▶ close
              ▲             forget_requests                                          │
              └──────────────────────────────────────────────────────────────────────┘

A run has one backend. Requests for a lane are answered in their order. The first one restores the lane, and later ones
continue after it. No backend changes a batch or a state. `tests/support/fake_backend.py` has one without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker, kinds
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.run.engine.connection import log_fault
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.stages.pipeline import encoders_of


class Backend(Protocol):
    """Builds the batches of a rank's lanes.

    One thread at a time calls it, except for `verify_delivered`.
    """

    fault: str
    """The error that the last check of `stop` found in delivered batches. "" (default): none."""

    @property
    def capacity(self) -> int:
        """Return how many requests keep it busy, or 0 if `answer` builds the batch."""

    def open(self) -> None:
        """Open the host of the workers, before this process has threads or uses a GPU."""

    def start(self) -> None:
        """Start the workers unless they run, and the host if it is closed."""

    def request(self, lane: int, state: bytes, want: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Any:
        """Request the next batch of a lane at the position `state`; return a ticket.

        Only the first request for a lane since `forget_requests` or `start` uses `state` and `facts`.
        """

    def answer(self, ticket: Any) -> Delivery:
        """Wait for the answer to a request.

        Raises what the lane's stages raise, or `WorkerError`.
        """

    def agree(self, vote: Callable[[], int]) -> int:
        """Return the result of `vote`, called on the rank that builds the batches."""
        return vote()

    def forget_requests(self) -> None:
        """Drop all requests. Lanes restart at the states of new requests."""

    def verify_delivered(self) -> None:
        """Raise `ShardError` if a shard of delivered batches is known to have changed.

        This does not wait for workers.
        """

    def check_shards(self) -> None:
        """Let all workers check their shards, then call `verify_delivered`.

        This waits some seconds at most.
        """

    def stop(self) -> None:
        """Drop all requests, and end the workers after a last check of their shards."""

    def close(self) -> None:
        """Stop, and close the host of the workers. Safe to call twice."""

    def numbers(self) -> dict[str, int]:
        """Return counters by name.

        They are `ready_batches`, `viewed_batches`, `restarts`, `num_workers` and `moved_lanes`.
        """


Ticket: TypeAlias = tuple[int, bytes, RequestKind, RunFacts]  # a request, answered only when `answer` is called with it


class InProcess(Backend):
    """Builds the batches that workers would.

    The trainer's global generators stay untouched.
    """

    capacity = 0

    def __init__(self, runner: LaneRunner) -> None:
        self._runner = runner
        self._seeded: set[str] | None = None  # global generators that the encoders seed
        self._is_used = False  # whether it built a batch since the last `stop`
        self.fault = ""

    def open(self) -> None:
        """Do nothing."""

    start = open

    def request(self, lane: int, state: bytes, want: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Ticket:
        """Return the request itself as its ticket."""
        self._is_used = True
        return lane, state, want, facts

    def answer(self, ticket: Ticket) -> Delivery:
        """Build the batch of a request. Raises what the lane's stages raise."""
        lane, state, want, self._runner.facts = ticket
        live = self._runner.at_position(lane, state)
        if live is not None and self._seeded is None:
            self._seeded = {kind for encoder in encoders_of(live) for kind in kinds(encoder.global_rng)}
        # Building a lane may draw from any global generator. A running lane draws only from the seeded ones.
        with as_in_a_worker(set(KINDS) if live is None else self._seeded or set()):
            return self._runner.deliver(lane, state, want)

    def forget_requests(self) -> None:
        """Drop the lanes."""
        self._runner.forget()

    def verify_delivered(self) -> None:
        """Compare the shards with those that delivered batches were read from."""
        if self.fault:
            raise ShardError(self.fault, reason="changed shard")
        if self._is_used:
            self._runner.verify_delivered()

    check_shards = verify_delivered

    def stop(self) -> None:
        """Drop the lanes, after a last check of the shards."""
        is_used, self._is_used = self._is_used, False
        try:
            if is_used:
                self._runner.verify_delivered()
        except SavableError as error:
            self.fault = str(error)
        finally:
            self._runner.forget()
        if is_used and self.fault:  # raised outside of the handler, where the current exception is another one
            log_fault(self.fault)

    close = stop

    def numbers(self) -> dict[str, int]:
        """Return zeros, because there are no workers."""
        return dict.fromkeys(("ready_batches", "viewed_batches", "restarts", "num_workers", "moved_lanes"), 0)
