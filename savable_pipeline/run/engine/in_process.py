"""`InProcess`: makes batches in the trainer's own process, with the methods of `Pool` (for `num_workers=0`)."""

from __future__ import annotations

from typing import TypeAlias

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.connection import log_fault
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.stages.pipeline import seeded_kinds

Ticket: TypeAlias = tuple[int, bytes, RequestKind, RunFacts]  # a request, answered only when `answer` is called with it


class InProcess:
    """Makes the same batches as workers would, and leaves the trainer's global generators untouched."""

    ready = viewed = restarts = moves = count = 0

    def __init__(self, runner: LaneRunner) -> None:
        self._runner = runner
        self._seeded: set[str] | None = None  # the global generators that the encoders seed
        self.fault = ""  # of delivered batches, found when it was closed

    def ask(self, lane: int, state: bytes, want: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Ticket:
        """Request the next batch of a lane whose position is `state`, in a run with these facts."""
        return lane, state, want, facts

    def answer(self, ticket: Ticket) -> Delivery:
        """Make the batch of a request. Raises what the lane's stages raise."""
        lane, state, want, self._runner.facts = ticket
        live = self._runner.at_position(lane, state)
        if live is not None and self._seeded is None:
            self._seeded = seeded_kinds(live)
        # Building a lane may draw from any global generator; a lane that runs draws only from the seeded ones.
        with as_in_a_worker(set(KINDS) if live is None else self._seeded or set()):
            return self._runner.deliver(lane, state, want)

    def restart(self) -> None:
        """Drop the lanes: new requests begin at the states that come with them."""
        self._runner.forget()

    def verify_delivered(self) -> None:
        """Look at the shards. Raises `ShardError` if one has changed that delivered batches may be made of."""
        self._runner.verify_delivered()

    look = verify_delivered
    """See `Pool.look`."""

    def close(self) -> None:
        """Drop the lanes, after a last look at the shards."""
        try:
            self.verify_delivered()
        except SavableError as error:
            self.fault = str(error)
        finally:
            self.restart()
        if self.fault:  # here the error under way is another one
            log_fault(self.fault)
