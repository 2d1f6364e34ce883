"""`Position` of a rank in a run, `BatchStep` to the next, and `Observer` of steps.

A position is immutable, and its methods return other positions. So a loader moves by one assignment, and a step that
fails or is interrupted before this assignment changes nothing:

    position ── advanced(delivery) ──▶ position        with another slot, state of the lane and history

An epoch ends when its last batch is yielded:

    position                                 `previous`             `iterator`
    in the middle of epoch 3                 None                   "started"
      ── last batch of epoch 3 ──▶
    start of epoch 4                         the end of epoch 3     "started"
      ── StopIteration ──▶
    start of epoch 4                         the end of epoch 3     "ended"
      ── iter(), also without a StopIteration before ──▶
    start of epoch 4                         None                   "started"

Slots that are skipped in between belong to epoch 4, as if a state from that moment was loaded.

An endless run may have epochs of n slots (`epoch_slots`). The next epoch continues the slots and the lanes. A step
belongs to the epoch of its first slot. So each epoch has n / ranks steps, and no slot is lost if a run starts at a slot
that its number of ranks does not divide.

A *step* takes one slot on each rank. Another rank's position differs only in `lanes`, `ranks` and `history`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from savable_pipeline.core.run_facts import NO_FACTS, Decisions, RunFacts
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.state.flights import EPOCH_SHIFT
from savable_pipeline.run.state.lane_state import fresh_lane, with_facts
from savable_pipeline.stages.batch_samples import BatchSamples

MAX_LAG = 16  # most batches that `state_dict(lag=)` can go back


class LanePosition(NamedTuple):
    """A lane after its last yielded batch."""

    state: bytes
    more: bool | None  # whether the lane has another batch; None until that is known


class YieldedBatch(NamedTuple):
    """A batch that this rank's trainer got.

    If slots were skipped between this batch and the next one, `skipped` has the positions of their lanes before that.
    """

    step_start: int  # first slot of its step
    lane: int
    before: LanePosition  # position of the lane before the batch
    samples: BatchSamples
    skipped: Mapping[int, LanePosition] = {}


class History(msgspec.Struct, frozen=True):
    """The last batches that were yielded in an epoch, without skipped ones.

    `batch_count` is the number of batches that this rank yielded since the loader was created or loaded. `decided_at`
    is that number at the last `reconfigure`. A `lag` never goes back beyond it.
    """

    batches: tuple[YieldedBatch, ...] = ()
    batch_count: int = 0
    decided_at: int = -MAX_LAG

    def lagged(self, lag: int = 0) -> YieldedBatch:
        """Return the batch `lag` batches before the last one.

        Raises ValueError if the history does not have it.
        """
        if 0 <= lag < len(self.batches):
            return self.batches[-1 - lag]
        found = f"{len(self.batches)} have" if self.batches else "none has"
        raise ValueError(
            f"trace(lag={lag}) needs one of the last {MAX_LAG} batches, but {found} been returned since the loader "
            "was created, loaded or started the epoch."
        )


class Position(msgspec.Struct, frozen=True):
    """Position of one rank between two steps, with the states of its lanes."""

    ranks: Ranks
    lane_count: int  # number of lanes of all ranks
    pad: bool  # whether the last batches of an epoch get padding rows
    epoch: int
    slot: int  # first slot of the next step
    lanes: dict[int, LanePosition]  # by number of the lane
    end: int  # all slots before this one are known to be in the epoch
    final: bool = False  # whether the epoch is known to end at `end`
    history: History = History()
    previous: Position | None = None  # after an epoch's last batch, the end of that epoch, until `iter()`
    iterator: Literal["started", "loaded", "ended"] = "started"  # "loaded": no iterator yet since a state was loaded
    facts: RunFacts = NO_FACTS  # facts with which its lanes continue
    changed: bool = False  # whether the epoch was started with other settings, so that it cannot be counted in advance

    @classmethod
    def start(cls, epoch: int, ranks: Ranks, lane_count: int, *, pad: bool, facts: RunFacts = NO_FACTS) -> Position:
        """Return the start of an epoch."""
        facts = facts.of_next_epoch
        lanes = {lane: LanePosition(fresh_lane(lane, epoch, facts), None) for lane in ranks.lanes(lane_count)}
        return cls(ranks, lane_count, pad, epoch, 0, lanes, end=0, facts=facts)

    @property
    def own_slot(self) -> int:
        """Return this rank's slot in the next step."""
        return self.ranks.slot(self.slot)

    @property
    def step(self) -> int:
        """Return the number of slots in a step."""
        return self.ranks.world_size

    @property
    def has_step(self) -> bool:
        """Return whether the next step is known to be in the epoch.

        With padding, only its first slot must be in the epoch.
        """
        return self.slot < self.end if self.pad else self.slot + self.step <= self.end

    @property
    def must_vote(self) -> bool:
        """Return whether ranks must vote on the epoch's end before the next step."""
        return not self.final and not self.has_step

    @property
    def is_over(self) -> bool:
        """Return whether the epoch has no more steps."""
        return self.final and not self.has_step

    @property
    def next_batch_number(self) -> int:
        """Return the number of the next step's first batch: `epoch << 40 | slot`."""
        return self.epoch << EPOCH_SHIFT | self.slot

    def advanced(self, delivery: Delivery) -> Position:
        """Return the position after a step in which this rank's trainer gets `delivery`."""
        lane, history = self.own_slot % self.lane_count, self.history
        batch = YieldedBatch(self.slot, lane, self.lanes[lane], delivery.samples)
        batches = (*history.batches[1 - MAX_LAG :], batch)
        return self._moved(lane, delivery, History(batches, history.batch_count + 1, history.decided_at))

    def skipped(self, delivery: Delivery) -> Position:
        """Return the position after a step that is skipped.

        `delivery` is the answer to its "skip" request.
        """
        lane, history = self.own_slot % self.lane_count, self.history
        if history.batches:
            skipped = {lane: self.lanes[lane], **history.batches[-1].skipped}
            last = history.batches[-1]._replace(skipped=skipped)
            history = replace(history, batches=(*history.batches[:-1], last))
        return self._moved(lane, delivery, history)

    def _moved(self, lane: int, delivery: Delivery, history: History) -> Position:
        """Return the position after the next step, in which this rank's lane is `lane`."""
        lanes = {**self.lanes, lane: LanePosition(delivery.state, delivery.more)}
        return replace(self, slot=self.slot + self.step, lanes=lanes, history=history)

    def decided(self, decisions: Decisions) -> Position:
        """Return this position with these decisions from the next step on."""
        finished = self.previous
        facts = replace(self.facts, decisions=decisions)
        lanes = {lane: LanePosition(with_facts(last.state, facts), None) for lane, last in self.lanes.items()}
        if finished is not None:
            finished = replace(finished, history=replace(finished.history, decided_at=finished.history.batch_count))
        history = replace(self.history, decided_at=self.history.batch_count) if self.history.batches else self.history
        return replace(self, lanes=lanes, previous=finished, facts=facts, end=self.slot, final=False, history=history)

    def next_epoch(self, epoch: int) -> Position:
        """Return the start of the next epoch, with this position as `previous`."""
        start = Position.start(epoch, self.ranks, self.lane_count, pad=self.pad, facts=self.facts)
        history = History(batch_count=self.history.batch_count)
        return replace(start, previous=replace(self, previous=None), history=history)

    def before(self, lag: int) -> Position:
        """Return the position `lag` batches ago.

        Without any batch since the run was created, was loaded or started its epoch, `lag` has no effect.
        Raises ValueError if the history does not go back so far.
        """
        position = self.previous if lag and self.previous is not None and self.iterator != "ended" else self
        batches = position.history.batches
        since_decision = position.history.batch_count - position.history.decided_at
        if not 0 <= lag <= min(len(batches) or MAX_LAG, since_decision):
            raise ValueError(
                f"lag={lag}: at most {min(len(batches), since_decision)} batches can be taken back (limit {MAX_LAG}). "
                "Save after as many batches as are fetched ahead."
            )
        slot, lanes = position.slot, dict(position.lanes)
        for batch in list(reversed(batches))[:lag]:
            lanes |= batch.skipped
            slot = batch.step_start
            lanes[batch.lane] = batch.before
        return replace(position, slot=slot, lanes=lanes, facts=position.facts if slot else position.facts.of_next_epoch)


@dataclass
class BatchStep:
    """A batch before it is yielded, and the positions before and after it."""

    before: Position
    after: Position
    delivery: Delivery
    batch: Any  # the batch that the trainer gets; observers may replace it
    started: float  # when the trainer requested it, by `time.perf_counter`
    number: int  # `epoch << 40 | slot` of the batch, as in receipts
    repeated: int | None = None  # rows to repeat as bits, 0 for a batch of padding; None for the batch of a new slot

    @cached_property
    def samples(self) -> BatchSamples:
        """Return the samples of the batch."""
        return self.delivery.samples

    @property
    def epoch_and_slot(self) -> tuple[int, int]:
        """Return the epoch and the slot of the batch."""
        return divmod(self.number, 1 << EPOCH_SHIFT)


class Observer:
    """Part of a run that is called at each step, to record or change its batch.

    If `on_batch` raises, the batch is not yielded, and the next step gets the same batch.
    """

    def on_batch(self, step: BatchStep) -> None:
        """Record or replace a batch before it is yielded."""

    def on_skip(self, position: Position) -> None:
        """Record that the epoch ends here, or that slots from here on are skipped.

        `on_batch` is not called for skipped slots. Raises `SavableError` if an epoch had too few samples.
        """

    def on_save(self, position: Position, state: MutableMapping[str, Any], lag: int) -> None:
        """Add this observer's entries to `state`.

        `position` is `lag` batches before the current one.
        """

    def on_load(self, position: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        """Check the entries of a loaded state, and return a function that adopts them.

        The result is None if there is nothing to adopt. `state` is None if the run returns to an earlier position or is
        reconfigured. Then no observer may raise. Raises `CheckpointMismatchError` if entries are missing.
        """

    def close(self) -> None:
        """Close files. A later batch opens them again."""


class Repeater(Observer):
    """Observer that can let the run repeat batches. A run has at most one."""

    def repeats(self, position: Position, vote: Callable[[int], int] | None) -> Iterator[bytes] | None:
        """Return packed `RebuildRequest`s of batches to repeat now, or None.

        They are repeated before the next slot. `vote` takes this rank's vote and returns the smallest or largest of all
        ranks. It is None if the ranks cannot communicate.
        """
        raise NotImplementedError

    def on_merge(self, own: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
        """Handle the `merged` state of all ranks.

        `own` is the state that this rank has contributed. Only this state has the other ranks' acknowledgements.
        `on_save` is called before they are known.
        """
