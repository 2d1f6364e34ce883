"""`InProcess`: makes batches in the trainer's own process, in the place of a pool of workers."""

from __future__ import annotations

from typing import NamedTuple

from savable_pipeline.global_rng import KINDS, as_in_a_worker
from savable_pipeline.host import Delivery, LaneHost, Want, seeded_kinds


class Ticket(NamedTuple):
    """What was asked for; it is made when it is asked after."""

    lane: int
    state: bytes
    want: Want


class InProcess:
    """Makes what it is asked for as the workers would, and leaves the trainer's global generators as they are."""

    pids: tuple[int, ...] = ()
    ready = viewed = restarts = moves = 0

    def __init__(self, host: LaneHost) -> None:
        self._host = host
        self._seeded: set[str] | None = None  # the global generators that the encoders seed

    def ask(self, lane: int, state: bytes, want: Want = "batch") -> Ticket:
        """Ask for the next batch of a lane that stands at `state`."""
        return Ticket(lane, state, want)

    def answer(self, ticket: Ticket) -> Delivery:
        """Make it. Raises what the lane's stages raise."""
        lane, state, want = ticket
        live = self._host.holds(lane, state)
        if live is not None and self._seeded is None:
            self._seeded = seeded_kinds(live)
        with as_in_a_worker(set(KINDS) if live is None else self._seeded or set()):  # building may draw from any
            return self._host.deliver(lane, state, want)

    def close(self) -> None:
        """Drop the lanes."""
        self._host.forget()
