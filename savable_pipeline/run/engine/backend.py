"""`Backend` builds batches: `InProcess`, in a `Pool` of workers, or at a peer.

    open ─▶ start ─▶ request, request, answer, request, … ─▶ stop ─▶ start ─▶ … ─▶ close
              ▲             forget_requests                                          │
              └──────────────────────────────────────────────────────────────────────┘

A run has one backend. Requests for a lane, a logical worker, are answered in order. The first request restores the
lane, and later ones continue after it. Batches and states do not depend on the kind of backend.
`tests/support/fake_backend.py` has one without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker, seeded_generators
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.run.engine.connection import log_shard_error
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.stages.pipeline import encoders_of


class Backend(Protocol):
    """Builds the batches of a rank's lanes.

    One thread at a time calls it, except for `verify_delivered`.
    """

    shard_error: str
    """Message about a changed shard that the last check in `stop` found; "" if there is none."""

    @property
    def capacity(self) -> int:
        """Return how many requests keep the workers busy.

        It is 0 if `answer` itself builds the batch.
        """

    def open(self) -> None:
        """Open the host of the workers, before this process has threads or uses a GPU."""

    def start(self) -> None:
        """Start the workers unless they run, and the host if it is closed."""

    def request(self, lane: int, state: bytes, kind: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Any:
        """Request the next batch of a lane, and return a ticket for `answer`.

        The first request for a lane since `forget_requests` or `start` restores it from `state` with `facts`. Later
        ones ignore both.
        """

    def answer(self, ticket: Any) -> Delivery:
        """Wait for the answer to a request.

        Raises what the lane's stages raise, or `WorkerError`.
        """

    def agree(self, vote: Callable[[], int]) -> int:
        """Return the result of `vote`.

        Ranks that share batches all get that of the rank that builds them.
        """
        return vote()

    def forget_requests(self) -> None:
        """Drop all requests. Lanes restart at the states of new requests."""

    def verify_delivered(self) -> None:
        """Raise `ShardError` if a shard of delivered batches is known to have changed.

        This does not wait for workers.
        """

    def check_shards(self) -> None:
        """Let all workers look for changed shards, then call `verify_delivered`.

        This waits some seconds at most.
        """

    def stop(self) -> None:
        """Drop all requests, and end the workers.

        The workers first look for changed shards once more.
        """

    def close(self) -> None:
        """Stop, and close the host of the workers. Safe to call twice."""

    def numbers(self) -> dict[str, int]:
        """Return counters by name.

        They are `ready_batches`, `viewed_batches`, `restarts`, `num_workers` and `moved_lanes`.
        """


Ticket: TypeAlias = tuple[int, bytes, RequestKind, RunFacts]  # a request of `InProcess`, which `answer` executes


class InProcess(Backend):
    """Builds batches in the trainer's process, without workers.

    The batches are the same, and the trainer's global generators stay untouched.
    """

    capacity = 0

    def __init__(self, runner: LaneRunner) -> None:
        self._runner = runner
        self._seeded: set[str] | None = None  # the global generators that encoders seed; None before the first batch
        self._is_used = False  # whether a batch was requested since the last `stop`
        self.shard_error = ""

    def open(self) -> None:
        """Do nothing."""

    start = open

    def request(self, lane: int, state: bytes, kind: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Ticket:
        """Return the request itself as its ticket."""
        self._is_used = True
        return lane, state, kind, facts

    def answer(self, ticket: Ticket) -> Delivery:
        """Build the batch of a request. Raises what the lane's stages raise."""
        lane, state, kind, self._runner.facts = ticket
        last_stage = self._runner.stage_at(lane, state)
        if last_stage is not None and self._seeded is None:
            self._seeded = {each for one in encoders_of(last_stage) for each in seeded_generators(one.global_rng)}
        # Building a lane may draw from any global generator. A running lane draws only from the seeded ones.
        with as_in_a_worker(set(KINDS) if last_stage is None else self._seeded or set()):
            return self._runner.deliver(lane, state, kind)

    def forget_requests(self) -> None:
        """Drop the lanes."""
        self._runner.forget()

    def verify_delivered(self) -> None:
        """Raise `ShardError` if a shard changed after a delivered batch was read from it."""
        if self.shard_error:
            raise ShardError(self.shard_error, reason="changed shard")
        if self._is_used:
            self._runner.verify_delivered()

    check_shards = verify_delivered

    def stop(self) -> None:
        """Drop the lanes, after a last look for changed shards."""
        is_used, self._is_used = self._is_used, False
        try:
            if is_used:
                self._runner.verify_delivered()
        except SavableError as error:
            self.shard_error = str(error)
        finally:
            self._runner.forget()
        # called outside of the handler, because `log_shard_error` looks at the exception being handled
        if is_used and self.shard_error:
            log_shard_error(self.shard_error)

    close = stop

    def numbers(self) -> dict[str, int]:
        """Return zeros, because there are no workers."""
        return dict.fromkeys(("ready_batches", "viewed_batches", "restarts", "num_workers", "moved_lanes"), 0)
