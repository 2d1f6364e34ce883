"""Where a finite epoch ends, the same on every rank.

    round     0               1
    slot      0   1   2   3   4   5   6   7
    lane      0   1   2   3   0   1   2   3
    batch     ■   ■   ■   ■   ■   ■               tail="stop": ends at slot 4      tail="pad": at slot 6

A round takes one batch of every lane, a step one slot on each rank. With `tail="stop"` the epoch ends before the first
round that some lane has no batch for; with `tail="pad"` after the last slot that holds a sample, rounded up to a step.

Where the lengths of lanes cannot be counted beforehand, each rank proposes an end from what its lanes know of their
next batches, and the smallest ("stop") or largest ("pad") proposal holds: as far as one round, and then they vote
again, in the last step of the round before.
"""

from __future__ import annotations

import logging

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.prefetcher import Prefetcher

log = logging.getLogger(__name__)


def proposed_end(position: Position, prefetcher: Prefetcher) -> int:
    """This rank's vote: the end of the epoch as far as its own lanes know. `position` must vote."""
    if position.pad:
        return max((position.next_slot(lane) + 1 for lane, at in position.lanes.items() if at.more), default=0)
    return min(_rounds(position, lane, prefetcher) for lane in position.lanes) * position.lane_count


def _rounds(position: Position, lane: int, prefetcher: Prefetcher) -> int:
    """How many rounds of the epoch a lane knows that it fills."""
    slot, more = position.next_slot(lane), position.lanes[lane].more
    if slot < position.end:  # of the round before: the next step begins there and reaches beyond it
        slot, more = slot + position.lane_count, prefetcher.peek(position).more
    return slot // position.lane_count + bool(more)


def counted_end(counts: list[int], *, pad: bool) -> int:
    """The end of an epoch whose lanes have these numbers of batches."""
    lanes = len(counts)
    if pad:
        return max(((count - 1) * lanes + lane + 1 for lane, count in enumerate(counts) if count), default=0)
    return min(counts) * lanes


def warn_unused(position: Position, population: int) -> None:
    """Warn about the slots and batches that no rank receives of the epoch that ends at `position`.

    `population` is the number of samples. Raises `SavableError` if the epoch had no batch at all.
    """
    epoch, lanes = position.epoch, position.lane_count
    rounds = position.end // lanes
    dry = [lane for lane, at in position.lanes.items() if at.more is False]
    if position.end == 0:
        raise SavableError(
            f"epoch {epoch} has no batch: it ends before the first round that some lane cannot fill, and "
            f"{f'lane {dry[0]}' if dry else 'some lane'} has no batch; this is too little data ({population} samples) "
            f"for {lanes} lanes and this batch size: give fewer lanes="
        )
    if position.ranks.rank != 0:
        return
    slots_left = position.end - position.slot
    if slots_left > 0:
        log.warning(
            "the last %d slots of epoch %d are given to no rank: %d ranks that began at a slot they do not divide "
            "would need more for a step",
            slots_left,
            epoch,
            position.step,
        )
    lanes_left = sum(bool(at.more) for at in position.lanes.values())
    if lanes_left:
        log.warning(
            "epoch %d ends after %d rounds, before the first that lane %s cannot fill; %d lanes of this rank have "
            "more, which is left out; fewer lanes leave less",
            epoch,
            rounds,
            dry[0] if dry else "(of another rank)",
            lanes_left,
        )
