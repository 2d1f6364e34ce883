"""`InProcess`: the `Backend` in the trainer's own process, for `num_workers=0`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.run.engine.connection import log_fault
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.stages.pipeline import seeded_kinds

Ticket: TypeAlias = tuple[int, bytes, RequestKind, RunFacts]  # a request, answered only when `answer` is called with it


class InProcess:
    """Builds the batches that workers would.

    The trainer's global generators stay untouched.
    """

    capacity = 0

    def __init__(self, runner: LaneRunner) -> None:
        self._runner = runner
        self._seeded: set[str] | None = None  # the global generators that the encoders seed
        self._is_used = False  # since the last `stop`
        self.fault = ""

    def open(self) -> None:
        """Do nothing."""

    start = open

    def ask(self, lane: int, state: bytes, want: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Ticket:
        """Return the request itself."""
        self._is_used = True
        return lane, state, want, facts

    def answer(self, ticket: Ticket) -> Delivery:
        """Build the batch of a request. Raises what the lane's stages raise."""
        lane, state, want, self._runner.facts = ticket
        live = self._runner.at_position(lane, state)
        if live is not None and self._seeded is None:
            self._seeded = seeded_kinds(live)
        # Building a lane may draw from any global generator; a lane that runs draws only from the seeded ones.
        with as_in_a_worker(set(KINDS) if live is None else self._seeded or set()):
            return self._runner.deliver(lane, state, want)

    def agree(self, vote: Callable[[], int]) -> int:
        """Vote: this process builds the batches."""
        return vote()

    def forget_requests(self) -> None:
        """Drop the lanes."""
        self._runner.forget()

    def verify_delivered(self) -> None:
        """Compare the shards with those that delivered batches were read from."""
        if self.fault:
            raise ShardError(self.fault, reason="changed shard")
        if self._is_used:
            self._runner.verify_delivered()

    look = verify_delivered

    def stop(self) -> None:
        """Drop the lanes, after a last look at the shards."""
        is_used, self._is_used = self._is_used, False
        try:
            if is_used:
                self._runner.verify_delivered()
        except SavableError as error:
            self.fault = str(error)
        finally:
            self._runner.forget()
        if is_used and self.fault:  # outside of the handler, where the error under way is another one
            log_fault(self.fault)

    close = stop

    def numbers(self) -> dict[str, int]:
        """Return zeros: there are no workers."""
        return dict.fromkeys(("ready_batches", "viewed_batches", "restarts", "num_workers", "moved_lanes"), 0)
