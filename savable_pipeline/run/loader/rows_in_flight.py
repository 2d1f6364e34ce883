"""`RowsInFlight`: the observer of a loader with `acknowledge=True`.

It saves the rows that the trainer has not acknowledged yet, and lets the run repeat them after a load:

    next ──▶ batches to repeat, the same number on each rank ──▶ the batches of new slots
             take no slot: `Position` stays                      as in any run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import msgpack

from savable_pipeline.errors import EncodeError
from savable_pipeline.run.engine.lane_runner import RebuildRequest
from savable_pipeline.run.loader.acknowledgements import Acknowledgements, OpenFlight, receipts_of
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.position import BatchStep, Position, Repeater
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.flights import ACKNOWLEDGE, EPOCH_SHIFT, Flight, read_acks, read_flights
from savable_pipeline.run.state.lane_state import LaneState, restoring
from savable_pipeline.run.state.state_dict import lane_numbers
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import as_ref, batch_rows
from savable_pipeline.stages.stage import Stage

if TYPE_CHECKING:
    import torch

RECEIPTS, VALID = "receipts", "valid"
Flights: TypeAlias = Mapping[int, list[Flight]]  # by lane


class RowsInFlight(Repeater):
    """Repeater of a rank's unacknowledged rows, which `table` contains."""

    def __init__(self, settings: LoaderSettings, ranks: Ranks, local: LocalLanes) -> None:
        self._settings, self._ranks, self._local = settings, ranks, local
        self._pad, self._max_in_flight = settings.pad, getattr(settings.acknowledge, "max_in_flight", None)
        self.table = Acknowledgements(ranks, settings.lanes, is_recording=settings.ledger is not None)
        self._is_repeat_count_agreed = True  # whether the ranks have agreed on the number of batches to repeat
        # number and receipts of the last two batches, by number & 1: one of them may not have reached the trainer
        self._receipts: dict[int, tuple[int, torch.Tensor]] = {}

    def receipts(self, position: Position) -> torch.Tensor:
        """Return the receipts of the last batch, int64 (rows, 2)."""
        batch_count = position.history.batch_count
        number, receipts = self._receipts.get(batch_count & 1, (0, None))
        return receipts_of(0, 0) if receipts is None or number != batch_count else receipts

    def repeats(self, position: Position, vote: Callable[[int], int] | None) -> Iterator[bytes] | None:
        """Return requests for the batches to repeat, or None.

        After a load, each rank repeats equally many.
        """
        self.table.cancel_unreceived(position.history.batch_count)
        if position.iterator == "ended":
            return None
        if not self._is_repeat_count_agreed:
            if vote is not None:
                own = len(self.table.waiting)
                # Without padding, the smallest vote wins, so negative votes select the largest number.
                self.table.pad_replays(abs(vote(own if self._pad else -own)))
            self._is_repeat_count_agreed = True
        if not self.table.waiting:
            return None
        return (self._rebuild_request(position, flight) for flight in list(self.table.waiting))

    def on_batch(self, step: BatchStep) -> None:
        """Wait until the rows may be yielded, and add receipts to the batch."""
        delivery, table, first = step.delivery, self.table, None
        batch_count = step.before.history.batch_count
        rows, size = delivery.rows, delivery.rows if self._pad else 0
        if self._pad and isinstance(step.batch, dict) and VALID in step.batch:
            size = len(step.batch[VALID])  # with padding rows
        if step.repeated is not None:
            first = table.waiting[0]
            step.number, rows = first.batch, (first.to_repeat & first.open_rows).bit_count()
        if self._max_in_flight is not None:
            table.wait(rows, self._max_in_flight, self._settings.workers.timeout)
        receipts = self._repeat(step, first, size) if first else table.issue(batch_count, step.number, delivery, size)
        self._receipts[(batch_count + 1) & 1] = batch_count + 1, receipts
        if isinstance(step.batch, dict):
            if RECEIPTS in step.batch:
                raise EncodeError(f"acknowledge=True adds the key {RECEIPTS!r} to batches. Rename that key in batch().")
            step.batch = {**step.batch, RECEIPTS: receipts}

    def _repeat(self, step: BatchStep, flight: OpenFlight, size: int) -> torch.Tensor:
        """Record that a batch is repeated, and return the receipts of its rows.

        `flight` is the first of the batches that wait to be repeated, and `step` has the rebuilt one. `size` is the
        number of its rows with padding, or 0 if batches are not padded. If all its samples are excluded or of removed
        sources, all its rows are padding. A batch that was added only as padding has no samples either.
        """
        rows, size = step.delivery.remaining, size or step.delivery.rows
        if not rows:
            step.samples = BatchSamples()
            if isinstance(step.batch, dict):
                # `receipts_of(0, size)` has only -1, so "valid" is False for each row.
                # `step.batch` comes last, because the encoder may have its own key "valid".
                step.batch = {VALID: receipts_of(0, size)[:, 0] >= 0, **step.batch}
        # `step.before` is the position before this batch, so this is the number of earlier batches.
        step.repeated = self.table.issue_again(step.before.history.batch_count, rows)
        return receipts_of(flight.batch, size, step.repeated, rows)

    def _rebuild_request(self, position: Position, flight: OpenFlight) -> bytes:
        """Return the packed request to rebuild a batch in flight, or to build one of padding."""
        lanes = self._settings.lanes
        epoch, slot = divmod(flight.batch, 1 << EPOCH_SHIFT) if flight.rows else (position.epoch, position.own_slot)
        lane = LaneState(slot % lanes, epoch, slot // lanes, facts=position.facts.digest)
        ref = msgpack.encode(flight.ref) if flight.rows else b""
        return msgpack.encode(RebuildRequest(lane, ref, flight.size))

    def on_save(self, position: Position, state: MutableMapping[str, Any], lag: int) -> None:
        """Add the rows in flight to a state."""
        if lag:
            raise ValueError("lag must be 0 with acknowledge=True, because earlier rows in flight are unknown")
        state.update(self.table.state(position.history.batch_count, position.next_batch_number, state))
        state[ACKNOWLEDGE] = 1

    def on_merge(self, own: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
        """Drop rows that other ranks have acknowledged."""
        if self._ranks.world_size > 1:
            self.table.agree(read_flights(own), read_flights(merged), read_acks(own))

    def on_load(self, position: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        """Return a function that replaces the rows in flight by those of the state.

        It drops rows whose data no longer exist. Without a state, the function only drops rows of which all samples are
        excluded.
        """
        if state is None:
            return partial(self._drop_excluded, position.history.batch_count)
        flights, world_size = read_flights(state), self._ranks.world_size
        lost = rows_lost(self._local.last_stage, flights) if flights else {}
        repeat_counts = [0] * world_size  # number of batches to repeat, by rank
        for lane, of_lane in flights.items():
            must_repeat = [each.open_rows != lost[each.batch] for each in of_lane]  # not if all open rows are lost
            repeat_counts[lane % world_size] += sum(must_repeat)
        own = [flight for lane in position.lanes for flight in flights.get(lane, ())]
        has_all_lanes = len(lane_numbers(state)) == self._settings.lanes
        # With all lanes, each rank knows how many batches the others repeat. Otherwise they vote in `repeats`.
        least_count = max(repeat_counts) if has_all_lanes else 0

        def adopt() -> None:
            self._receipts = {}
            self._is_repeat_count_agreed = has_all_lanes
            self.table.load(sorted(own, key=attrgetter("batch")), least_count, lost)

        return adopt

    def _drop_excluded(self, batches: int) -> None:
        """Drop rows with only excluded samples. `batches` is the number of batches that the rank got."""
        self.table.cancel_unreceived(batches)
        self.table.drop_lost(partial(open_rows_lost, self._local.last_stage))


def rows_lost(last: Stage, flights: Flights) -> dict[int, int]:
    """Return the result of `open_rows_lost` for each batch, by batch."""
    with restoring("the state"):
        return {each.batch: open_rows_lost(last, each) for of_lane in flights.values() for each in of_lane}


def open_rows_lost(last: Stage, flight: Flight) -> int:
    """Return the open rows of a batch that can no longer be built, as bits.

    Their samples are excluded, or of a removed source.
    """
    without_excluded = last.info.remaining
    _, rows = batch_rows(as_ref(msgpack.decode(msgpack.encode(flight.ref))))
    return sum(1 << row for row, ref in enumerate(rows) if without_excluded(ref) is None) & flight.open_rows
