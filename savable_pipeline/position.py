"""`Position`: where a loader stands in its run, and the flat state of any of the last 16 batches.

A *step* takes one slot on each rank. `states` holds each lane after its batch that the trainer was given last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from savable_pipeline.ranks import Ranks
from savable_pipeline.state import VERSION, LaneState, lane_name, pack_state

MAX_LAG = 16  # how many batches ago `state_dict(lag=)` reaches back


@dataclass(slots=True)
class Position:
    """Mutable: `SavableLoader` moves it on with every batch."""

    epoch: int
    slot: int  # the first slot of the next step
    states: dict[int, bytes]  # by lane
    more: dict[int, bool | None]  # by lane: whether it has another batch, where that is known
    rounds: int  # that are known to take place
    ranks: Ranks
    history: deque[tuple[int, int, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_LAG))
    """For each batch given: the slot that the step began at, the lane, and the lane's state before it."""

    @classmethod
    def start(cls, epoch: int, ranks: Ranks, lane_count: int) -> Position:
        """The start of an epoch."""
        lanes = {lane: LaneState(lane, epoch) for lane in ranks.lanes(lane_count)}
        return cls.at(epoch, 0, lanes, {lane: pack_state(state) for lane, state in lanes.items()}, ranks, lane_count)

    @classmethod
    def at(
        cls,
        epoch: int,
        slot: int,
        lanes: dict[int, LaneState],
        states: dict[int, bytes],
        ranks: Ranks,
        lane_count: int,
    ) -> Position:
        """Where `states`, read as `lanes`, were saved."""
        more = {lane: state.more for lane, state in lanes.items()}
        return cls(epoch, slot, states, more, -(-slot // lane_count), ranks)

    @property
    def own_slot(self) -> int:
        """This rank's slot in the next step."""
        return self.ranks.slot(self.slot)

    @property
    def step(self) -> int:
        """How many slots a step takes."""
        return self.ranks.world_size

    def flat(self, lag: int, lane_count: int, fingerprint: bytes) -> dict[str, Any]:
        """The state before the last `lag` batches. Raises ValueError if that is before what is known."""
        if not 0 <= lag <= len(self.history):
            raise ValueError(f"lag={lag}: only the last {len(self.history)} batches can be taken back")
        slot, states = self.slot, dict(self.states)
        for before, lane, state in list(reversed(self.history))[:lag]:
            slot, states[lane] = before, state
        return {
            "format": VERSION,
            "lanes": lane_count,
            "epoch": self.epoch,
            "slot": slot,
            "fingerprint": fingerprint,
            **{lane_name(lane): states[lane] for lane in sorted(states)},
        }
