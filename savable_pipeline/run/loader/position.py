"""`Position`: where a rank is in a run. It is immutable: each method returns the position that follows.

So a loader moves by one assignment, and a step that fails or is interrupted before it gives nothing:

    position ── advanced(delivery) ──▶ position        slot, the lane's state and the history, all or none of them

An epoch ends when its last batch is given:

    in an epoch ── last batch ──▶ start of the next ── StopIteration ──▶ the same, raised iter() ──▶ in an epoch
                                  (`previous`: the old one's end)        └───── iter(), without it ─────┘

Slots that are skipped there are of the next epoch, as they are where a state from there was loaded; `previous` stays
until StopIteration has been raised.

An endless run may be cut into epochs of n slots (`epoch_slots`): the numbers of its slots and its lanes continue. A
step belongs to the epoch of its first slot: each has n / ranks steps, and no slot is lost if a run began at one that
its ranks do not divide.

A *step* takes one slot on each rank. Another rank's position differs in `lanes`, `ranks` and `history` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from savable_pipeline.core.run_facts import NO_FACTS, ChunkSizes, Decisions, RunFacts
from savable_pipeline.core.state_numbers import ORDER, STATE
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.state.flights import ACKNOWLEDGE, EPOCH_SHIFT
from savable_pipeline.run.state.lane_state import LaneState, fresh_lane, pack_state, with_facts
from savable_pipeline.run.state.state_dict import FACTS, lane_name
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import ItemRef

MAX_LAG = 16  # batches that `state_dict(lag=)` can take back


class LanePosition(NamedTuple):
    """A lane after the last of its batches that the trainer received; `more` is None until it is known."""

    state: bytes
    more: bool | None  # whether the lane has another batch


class Given(NamedTuple):
    """A batch that this rank's trainer received: the first slot of its step, its lane, that lane before it.

    `skipped`: the lanes whose batches were passed over after it, before the next was given, as they were before.
    """

    step: int
    lane: int
    before: LanePosition
    samples: ItemRef | BatchSamples
    skipped: Mapping[int, LanePosition] = {}


class Position(msgspec.Struct, frozen=True):
    """The position of one rank; `lanes` holds this rank's lanes by number.

    After an epoch's last batch it is the start of the next epoch, with the old one's position as `previous`: until an
    iterator begins the next epoch, which it can once StopIteration has been raised (`stop_raised`), or before.

    `history` holds the last batches that were given, without those that were skipped.
    """

    ranks: Ranks
    lane_count: int  # of all ranks
    pad: bool
    epoch: int
    slot: int  # the first slot of the next step
    lanes: dict[int, LanePosition]
    end: int  # the first slot not known to be in the epoch
    final: bool = False  # whether the epoch ends there
    history: tuple[Given, ...] = ()
    previous: Position | None = None
    stop_raised: bool = False
    batches: int = 0  # given to this rank since the loader was made or loaded
    loaded: bool = False  # no iterator has begun since a state was loaded
    facts: RunFacts = NO_FACTS  # with which its lanes go on
    changed: bool = False  # the epoch was begun with other settings: its length cannot be counted beforehand
    decided_at: int = -MAX_LAG  # how many batches had been given then; `lag` does not reach before

    @classmethod
    def start(cls, epoch: int, ranks: Ranks, lane_count: int, *, pad: bool, facts: RunFacts = NO_FACTS) -> Position:
        """The start of an epoch."""
        facts = facts.of_next_epoch
        lanes = {lane: LanePosition(fresh_lane(lane, epoch, facts), None) for lane in ranks.lanes(lane_count)}
        return cls(ranks, lane_count, pad, epoch, 0, lanes, end=0, facts=facts)

    @classmethod
    def saved(
        cls,
        state: Mapping[str, Any],
        read: Mapping[int, LaneState],
        facts: RunFacts,
        ranks: Ranks,
        lane_count: int,
        *,
        pad: bool,
    ) -> Position:
        """The position in a flat state dict; `read` holds this rank's lanes from it."""
        lanes = {lane: LanePosition(state[lane_name(lane)], found.more) for lane, found in read.items()}
        slot = state["slot"]
        return cls(ranks, lane_count, pad, state["epoch"], slot, lanes, end=slot, loaded=True, facts=facts)

    @property
    def own_slot(self) -> int:
        """This rank's slot in the next step."""
        return self.ranks.slot(self.slot)

    @property
    def step(self) -> int:
        """The number of slots in a step."""
        return self.ranks.world_size

    @property
    def has_step(self) -> bool:
        """Whether the next step is known to be in the epoch: with filled-up batches, its first slot."""
        return self.slot < self.end if self.pad else self.slot + self.step <= self.end

    @property
    def must_vote(self) -> bool:
        """Whether the ranks must agree, before the next step, on how far the epoch goes."""
        return not self.final and not self.has_step

    @property
    def is_over(self) -> bool:
        """Whether the epoch has no more steps."""
        return self.final and not self.has_step

    @property
    def unknown_lanes(self) -> list[int]:
        """The lanes of a finite run that have not been asked yet whether they have another batch."""
        if self.final:
            return []
        return [lane for lane, at in self.lanes.items() if at.more is None]

    @property
    def last_given(self) -> Given | None:
        """The batch given last; None if none has been since the loader was made or loaded, or began the epoch."""
        return next(reversed((self.previous or self).history), None)

    def given(self, lag: int = 0) -> Given:
        """The batch given `lag` batches before the last one. Raises ValueError for one that is not known."""
        history = (self.previous or self).history
        if 0 <= lag < len(history):
            return history[-1 - lag]
        found = f"{len(history)} have" if history else "none has"
        raise ValueError(
            f"trace(lag={lag}) needs one of the last {MAX_LAG} batches, but {found} been returned since the loader "
            "was created, loaded or started the epoch."
        )

    def next_slot(self, lane: int) -> int:
        """The slot of a lane's next batch."""
        return self.slot + (lane - self.slot) % self.lane_count

    def advanced(self, delivery: Delivery) -> Position:
        """After the next step, in which this rank's trainer receives `delivery`."""
        lane = self.own_slot % self.lane_count
        received = Given(self.slot, lane, self.lanes[lane], delivery.samples)
        return self._moved(delivery, (*self.history[1 - MAX_LAG :], received), batches=self.batches + 1)

    def passed_over(self, delivery: Delivery) -> Position:
        """After the next step, skipped: no rank gets its batch."""
        lane, history = self.own_slot % self.lane_count, self.history
        if history:
            skipped = {lane: self.lanes[lane], **history[-1].skipped}
            history = (*history[:-1], history[-1]._replace(skipped=skipped))
        return self._moved(delivery, history, batches=self.batches)

    def _moved(self, delivery: Delivery, history: tuple[Given, ...], batches: int) -> Position:
        lane, at = self.own_slot % self.lane_count, LanePosition(delivery.state, delivery.more)
        lanes = {**self.lanes, lane: at}
        return replace(self, slot=self.slot + self.step, lanes=lanes, history=history, batches=batches)

    def given_again(self) -> Position:
        """After a batch of an earlier slot: it takes none."""
        return replace(self, batches=self.batches + 1)

    def learned(self, peeks: Mapping[int, Delivery]) -> Position:
        """With the answers `peeks` of some lanes: whether they have another batch."""
        return replace(self, lanes=self.lanes | {lane: LanePosition(at.state, at.more) for lane, at in peeks.items()})

    def with_changes(self) -> Position:
        """In an epoch begun with other settings: no lane is known to have another batch."""
        lanes = {lane: LanePosition(at.state, None) for lane, at in self.lanes.items()}
        return replace(self, lanes=lanes, changed=True)

    def decided(self, decisions: Decisions) -> Position:
        """Here, with these decisions from the next step on, as if it was saved and loaded with other settings."""
        facts = replace(self.facts, decisions=decisions)
        lanes = {lane: LanePosition(with_facts(at.state, facts), None) for lane, at in self.lanes.items()}
        over = None if self.previous is None else replace(self.previous, decided_at=self.previous.batches)
        at = replace(self, lanes=lanes, previous=over, facts=facts, end=self.slot, final=False)
        return replace(at, decided_at=self.batches) if self.history else at

    @property
    def next_batch(self) -> int:
        """The first slot of the next step as receipts name it, with its epoch."""
        return self.epoch << EPOCH_SHIFT | self.slot

    def begun_with(self, sizes: ChunkSizes) -> Position:
        """In an epoch whose lanes' shares are cut so."""
        return replace(self, facts=replace(self.facts, chunk_sizes=sizes))

    def agreed(self, end: int) -> Position:
        """With the `end` that the ranks have agreed on: the epoch ends here unless it is beyond the known one."""
        return replace(self, end=end) if end > self.end else replace(self, final=True)

    def ending_at(self, end: int) -> Position:
        """In an epoch whose end is known beforehand."""
        return replace(self, end=end, final=True)

    def next_epoch(self, epoch: int) -> Position:
        """At the start of the epoch that follows, which the next iterator begins."""
        start = Position.start(epoch, self.ranks, self.lane_count, pad=self.pad, facts=self.facts)
        return replace(start, previous=replace(self, previous=None), batches=self.batches)

    def rolled_over(self) -> Position:
        """At the start of the next epoch of an endless run, which the next iterator begins."""
        return replace(self, history=(), decided_at=-MAX_LAG, previous=replace(self, previous=None))

    def epoch_of(self, epoch_slots: int) -> int:
        """The number of the epoch, of this many slots, that the next step belongs to."""
        return self.slot // epoch_slots

    def left_of_epoch(self, epoch_slots: int) -> int:
        """The number of slots in the remaining steps of the epoch."""
        left = epoch_slots - self.slot % epoch_slots
        return -(-left // self.step) * self.step

    def ended(self) -> Position:
        """After StopIteration: an iterator that has ended stays so."""
        return replace(self, previous=self.previous or self, stop_raised=True)

    def begun(self) -> Position:
        """With an iterator that continues here."""
        return replace(self, previous=None, stop_raised=False, loaded=False)

    def before(self, lag: int) -> Position:
        """The position `lag` batches ago.

        If no batch has been given since it was made or loaded, or its epoch was begun, it is the start, whatever `lag`.
        Raises ValueError if it is before the history.
        """
        at = self.previous if lag and self.previous is not None and not self.stop_raised else self
        since = at.batches - at.decided_at
        if not 0 <= lag <= min(len(at.history) or MAX_LAG, since):
            raise ValueError(
                f"lag={lag}: at most {min(len(at.history), since)} batches can be taken back (limit {MAX_LAG}). "
                "Save after as many batches as are fetched ahead."
            )
        slot, lanes = at.slot, dict(at.lanes)
        for given in list(reversed(at.history))[:lag]:
            lanes |= given.skipped
            slot, lanes[given.lane] = given.step, given.before
        return replace(at, slot=slot, lanes=lanes, facts=at.facts if slot else at.facts.of_next_epoch)

    def flat(self, fingerprint: bytes) -> dict[str, Any]:
        """The state dict of the position."""
        return {
            "order": ORDER,
            "state": STATE,
            "lanes": self.lane_count,
            "epoch": self.epoch,
            "slot": self.slot,
            "fingerprint": fingerprint,
            FACTS: pack_state(self.facts),
            ACKNOWLEDGE: 0,
            **{lane_name(lane): self.lanes[lane].state for lane in sorted(self.lanes)},
        }
