"""Where a finite epoch ends, the same on every rank.

    round     0               1
    slot      0   1   2   3   4   5   6   7
    lane      0   1   2   3   0   1   2   3
    batch     ■   ■   ■   ■   ■   ■               tail="stop": ends at slot 4      tail="pad": at slot 6

A round takes one batch of every lane, a step one slot on each rank. With `tail="stop"` the epoch ends before the first
round for which some lane has no batch, with `tail="pad"` after the last slot with a sample, rounded up to a step.

If the lengths of lanes cannot be counted in advance, the ranks vote in the last step of each round. Each rank knows
whether its lanes have another batch, and proposes an end that is at most one round ahead. The smallest ("stop") or
largest ("pad") proposal wins. If it is no later than the known end, the epoch ends there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property

from msgspec.structs import replace

from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.loader.local_lanes import LocalLanes, chunk_sizes
from savable_pipeline.run.loader.position import History, LanePosition, Observer, Position
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.chunked_stage import count_of

log = logging.getLogger(__name__)


class EpochEnds:
    """Determines where the epochs of a run end, by counts or by votes of all ranks."""

    def __init__(
        self, settings: LoaderSettings, local: LocalLanes, prefetcher: Prefetcher, observers: list[Observer]
    ) -> None:
        self._settings, self._local, self._prefetcher, self._observers = settings, local, prefetcher, observers
        self._ends: dict[int, int | None] = {}  # results of `counted`, for the last epoch that it was called for

    @cached_property
    def is_finite(self) -> bool:
        """Return whether the pipeline is finite.

        Raises ValueError if it is and `epoch_slots` is set too.
        """
        finite = not self._local.last_stage.info.endless
        if finite and self._settings.epoch_slots is not None:
            raise ValueError("epoch_slots needs an endless pipeline. Remove epochs= from its readers, or epoch_slots=.")
        return finite

    def counted(self, epoch: int) -> int | None:
        """Return the slot at which an epoch ends, or None if it cannot be counted."""
        if epoch not in self._ends:
            stage = self._local.last_stage
            counts = [count_of(stage, lane, epoch) for lane in range(self._settings.lanes)]
            known = [count for count in counts if count is not None]
            is_countable = len(known) == len(counts) and not stage.info.endless
            self._ends = {epoch: counted_end(known, pad=self._settings.pad) if is_countable else None}
        return self._ends[epoch]

    def forget(self) -> None:
        """Forget the counted ends, because a state was loaded."""
        self._ends.clear()

    def length(self, epoch: int, world_size: int) -> int | None:
        """Return the number of batches of each rank in an epoch, or None if unknown."""
        if self._settings.epoch_slots is not None and not self.is_finite:
            return self._settings.epoch_slots // world_size
        end = self.counted(epoch)
        return None if end is None else self._steps(end, world_size)

    def yielded(self, position: Position, epoch: int) -> int | None:
        """Return how many batches of an epoch this rank has yielded before a position.

        The result is None if the epoch's length is unknown, or the epoch was started with other settings.
        """
        length, slots = self.length(epoch, position.step), self._settings.epoch_slots
        if length is None or position.changed:
            return None
        if slots is not None and not self.is_finite:
            return length - remaining_slots(position, slots) // position.step
        return length - self._steps((self.counted(epoch) or 0) - position.slot, position.step)

    def epoch_of(self, position: Position) -> int:
        """Return the epoch of the last yielded batch.

        After StopIteration, or once the next iterator has started, return the next epoch.
        """
        slots = self._settings.epoch_slots
        finished = None if position.iterator == "ended" else position.previous
        if slots is None or self._settings.restarts_on_iter:
            return position.epoch if finished is None else finished.epoch
        return position.slot // slots - (1 if finished else 0)

    def after(self, position: Position, kind: RequestKind, delivery: Delivery) -> Position:
        """Return the position after a step.

        With the kind "skip", its batch was skipped, otherwise yielded. The position is in the next epoch if the step
        was the last of an epoch of `epoch_slots`.
        """
        after = position.skipped(delivery) if kind == "skip" else position.advanced(delivery)
        if not position.slot:
            sizes = chunk_sizes(self._local.last_stage, position.epoch)
            after = replace(after, facts=replace(after.facts, chunk_sizes=sizes))
        slots = self._settings.epoch_slots
        if slots is None or after.slot // slots == position.slot // slots:
            return after
        if self._settings.restarts_on_iter:
            return after.next_epoch(0)
        history = History(batch_count=after.history.batch_count)
        return replace(after, history=history, previous=replace(after, previous=None))

    def _steps(self, slots: int, step: int) -> int:
        """Return the number of steps in this many slots, of which each takes `step`."""
        return -(-slots // step) if self._settings.pad else slots // step

    def towards_step(self, position: Position, vote: Callable[[int], int]) -> Position:
        """Find out one more thing about whether the epoch has a next step.

        Returns the position with the new knowledge. The caller repeats this until `has_step`.
        """
        if position.is_over:  # a state was loaded here, or fewer slots than a step remain
            return replace(self.next_epoch(position), previous=None)
        if not position.changed and (end := self._known_end(position, vote)) is not None:
            return replace(position, end=end, final=True)
        unknown = [lane for lane, lane_position in position.lanes.items() if lane_position.more is None]
        if unknown and not position.final:  # ask lanes before any of their batches is requested
            peeks = self._prefetcher.query_has_next(position, unknown)
            known = {lane: LanePosition(peek.state, peek.more) for lane, peek in peeks.items()}
            return replace(position, lanes=position.lanes | known)
        return self.agreed(position, vote(proposed_end(position, self._prefetcher)))

    def agreed(self, position: Position, end: int) -> Position:
        """Return the position with the `end` that all ranks agreed on.

        If `end` is no later than the known end, the epoch ends at the known end.
        """
        return replace(position, end=end) if end > position.end else replace(position, final=True)

    def _known_end(self, position: Position, vote: Callable[[int], int]) -> int | None:
        """Return the slot at which this epoch ends, or None if that is unknown before its first batch."""
        end = self.counted(position.epoch)
        if end is None and self._settings.restarts_on_iter and position.step > 1:
            # ranks may leave their loops at different batches, so they must not vote in the middle of an epoch
            self._ends[0] = end = vote(self._count_epoch(position))
        return end

    def _count_epoch(self, position: Position) -> int:
        """Return the slot at which epoch 0 ends for the lanes of this rank.

        To count their batches, it skips them all.
        """
        start = Position.start(0, position.ranks, position.lane_count, pad=position.pad)
        counts = self._prefetcher.count(start)
        if position.pad:
            return counted_end([counts.get(lane, 0) for lane in range(position.lane_count)], pad=True)
        return min(counts.values()) * position.lane_count

    def next_epoch(self, finished: Position) -> Position:
        """Return the start of the epoch after the `finished` one.

        Raises `SavableError` if the finished epoch had too few samples.
        """
        for observer in self._observers:
            observer.on_skip(finished)
        counts = self._prefetcher.uncounted.items() if finished.end == 0 else ()
        skipped = {name: int(n) for name, n in counts if "/skipped/" in name and "/source/" not in name}
        warn_unused(finished, self._local.last_stage.info.population, skipped)
        return finished.next_epoch(0 if self._settings.restarts_on_iter else finished.epoch + 1)


def proposed_end(position: Position, prefetcher: Prefetcher) -> int:
    """Return this rank's vote: the slot at which the epoch ends for its lanes.

    Only call it if `position.must_vote`.
    """
    if position.pad:
        lanes = [lane for lane, lane_position in position.lanes.items() if lane_position.more]
        return max((_next_slot(position, lane) + 1 for lane in lanes), default=0)
    return min(_available_rounds(position, lane, prefetcher) for lane in position.lanes) * position.lane_count


def _available_rounds(position: Position, lane: int, prefetcher: Prefetcher) -> int:
    """Return for how many rounds of the epoch a lane is known to have batches."""
    slot, has_batch = _next_slot(position, lane), position.lanes[lane].more
    if slot < position.end:  # this batch is in the epoch, as the first one of the next step: is there another after it?
        slot, has_batch = slot + position.lane_count, prefetcher.peek(position).more
    return slot // position.lane_count + bool(has_batch)


def _next_slot(position: Position, lane: int) -> int:
    """Return the slot of a lane's next batch."""
    return position.slot + (lane - position.slot) % position.lane_count


def remaining_slots(position: Position, epoch_slots: int) -> int:
    """Return the number of remaining slots of an epoch, rounded up to whole steps."""
    remaining = epoch_slots - position.slot % epoch_slots
    return -(-remaining // position.step) * position.step


def counted_end(counts: list[int], *, pad: bool) -> int:
    """Return the slot at which an epoch ends, by the batches of each lane.

    `counts` has the number of batches of each lane.
    """
    lanes = len(counts)
    if pad:
        return max(((count - 1) * lanes + lane + 1 for lane, count in enumerate(counts) if count), default=0)
    return min(counts) * lanes


def warn_unused(position: Position, population: int, skipped: Mapping[str, int]) -> None:
    """Warn about slots and batches of an ended epoch that no rank gets.

    `population`: the number of samples. `skipped`: the number of skipped samples by reason. Raises `SavableError` for
    an epoch without any batch.
    """
    epoch, lanes = position.epoch, position.lane_count
    rounds = position.end // lanes
    exhausted = [lane for lane, lane_position in position.lanes.items() if lane_position.more is False]
    if position.end == 0:
        reasons = ", ".join(f"{name}: {count}" for name, count in sorted(skipped.items()))
        why = (
            f"{sum(skipped.values())} of {population} samples were skipped ({reasons})"
            if reasons
            else f"the data has {population} samples"
        )
        lane = f"lane {exhausted[0]}" if exhausted else "a lane"
        raise SavableError(
            f"epoch {epoch} has no batch, because {lane} has too few samples for one. Use fewer than {lanes} lanes, or "
            f"a smaller batch size.\n  {why}"
        )
    if position.ranks.rank != 0:
        return
    unused_slots = position.end - position.slot
    if unused_slots > 0:
        log.warning(
            "the last %d slots of epoch %d are dropped, because %d ranks resumed at a slot that they do not divide",
            *(unused_slots, epoch, position.step),
        )
    unused_lanes = sum(bool(lane_position.more) for lane_position in position.lanes.values())
    if unused_lanes:
        log.warning(
            "epoch %d ends after %d rounds, because lane %s is exhausted. %d lanes of this rank have more samples, "
            'which are dropped. Pass tail="pad" to keep them, or use fewer lanes.',
            *(epoch, rounds, exhausted[0] if exhausted else "(of another rank)", unused_lanes),
        )
