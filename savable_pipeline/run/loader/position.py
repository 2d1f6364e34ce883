"""`Position` of a rank in a run, `BatchStep` between two, and their `Observer`.

A position is immutable, and each method returns the position that follows. So a loader moves by one assignment, and a
step that fails or is interrupted before it yields nothing:

    position ── advanced(delivery) ──▶ position        slot, the lane's state and the history, all or none of them

An epoch ends when its last batch is yielded:

    in an epoch ── last batch ──▶ start of the next ── StopIteration ──▶ the same, "ended" ── iter() ──▶ in an epoch
                                  (`previous`: the old one's end)        └───── iter(), without it ─────┘

Slots that are skipped in between belong to the next epoch, as if a state from that moment was loaded. `previous`
remains until StopIteration is raised.

An endless run may have epochs of n slots (`epoch_slots`). The numbers of its slots and its lanes continue. A step
belongs to the epoch of its first slot: each epoch has n / ranks steps, and no slot is lost if a run starts at one that
its ranks do not divide.

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
from savable_pipeline.run.state.flights import EPOCH_SHIFT, SLOTS
from savable_pipeline.run.state.lane_state import fresh_lane, with_facts
from savable_pipeline.stages.batch_samples import BatchSamples

MAX_LAG = 16  # most batches that `state_dict(lag=)` can go back


class LanePosition(NamedTuple):
    """A lane after its last yielded batch."""

    state: bytes
    more: bool | None  # whether the lane has another batch; None until that is known


class YieldedBatch(NamedTuple):
    """A batch that this rank's trainer got.

    `skipped` has the position before the skip of each lane whose batches were skipped after this batch and before the
    next one.
    """

    step: int  # first slot of its step
    lane: int
    before: LanePosition  # position of the lane before the batch
    samples: BatchSamples
    skipped: Mapping[int, LanePosition] = {}


class History(msgspec.Struct, frozen=True):
    """The last batches that were yielded in an epoch, without skipped ones.

    `total` is the number of batches that this rank yielded since the loader was created or loaded. `decided_at` is
    `total` at the last `reconfigure`, beyond which no `lag` goes back.
    """

    batches: tuple[YieldedBatch, ...] = ()
    total: int = 0
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
    """The position of one rank, with its lanes by number.

    After an epoch's last batch it is the start of the next epoch, with the old one's end as `previous` until an
    iterator starts the next epoch.
    """

    ranks: Ranks
    lane_count: int  # number of lanes of all ranks
    pad: bool
    epoch: int
    slot: int  # first slot of the next step
    lanes: dict[int, LanePosition]
    end: int  # first slot not known to be in the epoch
    final: bool = False  # whether the epoch is known to end at `end`
    history: History = History()
    previous: Position | None = None
    iterator: Literal["started", "loaded", "ended"] = "started"  # "loaded": no iterator yet since a state was loaded
    facts: RunFacts = NO_FACTS  # facts with which its lanes continue
    changed: bool = False  # the epoch was started with other settings, so its length cannot be counted in advance

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
    def next_batch(self) -> int:
        """Return the first slot of the next step as receipts name it, with its epoch."""
        return self.epoch << EPOCH_SHIFT | self.slot

    def advanced(self, delivery: Delivery) -> Position:
        """Return the position after a step in which this rank's trainer gets `delivery`."""
        lane, history = self.own_slot % self.lane_count, self.history
        batch = YieldedBatch(self.slot, lane, self.lanes[lane], delivery.samples)
        batches = (*history.batches[1 - MAX_LAG :], batch)
        return self._moved(lane, delivery, History(batches, history.total + 1, history.decided_at))

    def skipped(self, delivery: Delivery) -> Position:
        """Return the position after the next step, if no rank gets its batch."""
        lane, history = self.own_slot % self.lane_count, self.history
        if history.batches:
            skipped = {lane: self.lanes[lane], **history.batches[-1].skipped}
            last = history.batches[-1]._replace(skipped=skipped)
            history = replace(history, batches=(*history.batches[:-1], last))
        return self._moved(lane, delivery, history)

    def _moved(self, lane: int, delivery: Delivery, history: History) -> Position:
        lanes = {**self.lanes, lane: LanePosition(delivery.state, delivery.more)}
        return replace(self, slot=self.slot + self.step, lanes=lanes, history=history)

    def decided(self, decisions: Decisions) -> Position:
        """Return this position with these decisions from the next step on."""
        facts, finished = replace(self.facts, decisions=decisions), self.previous
        lanes = {lane: LanePosition(with_facts(at.state, facts), None) for lane, at in self.lanes.items()}
        if finished is not None:
            finished = replace(finished, history=replace(finished.history, decided_at=finished.history.total))
        history = replace(self.history, decided_at=self.history.total) if self.history.batches else self.history
        return replace(self, lanes=lanes, previous=finished, facts=facts, end=self.slot, final=False, history=history)

    def next_epoch(self, epoch: int) -> Position:
        """Return the start of the following epoch, which the next iterator starts."""
        start = Position.start(epoch, self.ranks, self.lane_count, pad=self.pad, facts=self.facts)
        return replace(start, previous=replace(self, previous=None), history=History(total=self.history.total))

    def before(self, lag: int) -> Position:
        """Return the position `lag` batches ago.

        If no batch has been yielded since the run was created, loaded or started its epoch, return this position.
        Raises ValueError if the history does not go back so far.
        """
        at = self.previous if lag and self.previous is not None and self.iterator != "ended" else self
        batches, since = at.history.batches, at.history.total - at.history.decided_at
        if not 0 <= lag <= min(len(batches) or MAX_LAG, since):
            raise ValueError(
                f"lag={lag}: at most {min(len(batches), since)} batches can be taken back (limit {MAX_LAG}). "
                "Save after as many batches as are fetched ahead."
            )
        slot, lanes = at.slot, dict(at.lanes)
        for batch in list(reversed(batches))[:lag]:
            lanes |= batch.skipped
            slot, lanes[batch.lane] = batch.step, batch.before
        return replace(at, slot=slot, lanes=lanes, facts=at.facts if slot else at.facts.of_next_epoch)


@dataclass
class BatchStep:
    """A batch on its way to the trainer, and the positions before and after it."""

    at: Position
    after: Position
    delivery: Delivery
    batch: Any  # the batch that the trainer gets; observers may replace it
    started: float  # when the trainer requested it, by `time.perf_counter`
    number: int  # slot and epoch of the batch in one number, as in receipts
    repeated: int | None = None  # repeated rows as bits (0: padding); None for the batch of a new slot

    @cached_property
    def samples(self) -> BatchSamples:
        """Return the samples of the batch."""
        return self.delivery.samples

    @property
    def epoch_and_slot(self) -> tuple[int, int]:
        """Return the epoch and the slot of the batch."""
        return self.number >> EPOCH_SHIFT, self.number & SLOTS


class Observer:
    """Sees the steps of a run. The run does not know the kinds of observers.

    If `on_batch` raises, the batch is not yielded, and the next step gets the same batch.
    """

    def on_batch(self, step: BatchStep) -> None:
        """Record or replace a batch before it is yielded."""

    def on_skip(self, at: Position) -> None:
        """Record that slots from here on are not yielded.

        This is called for a skip and at the end of an epoch.

        These slots have no batch, so `on_batch` does not see them. Raises `SavableError` if an epoch had too few
        samples.
        """

    def on_save(self, at: Position, state: MutableMapping[str, Any], lag: int) -> None:
        """Add entries of this observer to the state of a position `lag` batches ago."""

    def on_load(self, at: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        """Check this observer's entries of a loaded state.

        Return a function that adopts them.

        The state is None if the run returns to an earlier position or is reconfigured, which no observer may reject.
        Raises `CheckpointMismatchError` if entries are missing.
        """

    def close(self) -> None:
        """Close files. A later batch opens them again."""


class Repeater(Observer):
    """Observer that has batches repeated. A run has at most one."""

    def repeats(self, at: Position, vote: Callable[[int], int] | None) -> Iterator[bytes] | None:
        """Return requests for batches to yield before the next slot, or None.

        They are packed `RebuildRequest`s. `vote` returns the smallest or largest vote of all ranks. It is None if the
        ranks cannot communicate.
        """
        raise NotImplementedError

    def on_merge(self, own: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
        """Handle the state of all ranks, of which `own` is this rank's.

        This is not a case of `on_save`, because other ranks' acknowledgements are known only after all have saved.
        """
