"""`RowsInFlight`: the rows that a run gave and its trainer has not acknowledged, in the state until then.

next ──▶ batches to come again, the same number on each rank after a load ──▶ the batches of new slots
         take no slot: `Position` stays                                       as in any run
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import msgpack

from savable_pipeline.errors import EncodeError
from savable_pipeline.run.engine.lane_runner import Remake
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.loader.acknowledgements import Acknowledgements, Outstanding
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.receipts import receipts_of
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.trace import Trace, traced_rows
from savable_pipeline.run.state.flights import ACKNOWLEDGE, EPOCH_SHIFT, SLOTS, Flight
from savable_pipeline.run.state.lane_state import LaneState, restoring
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import as_ref, batch_rows
from savable_pipeline.stages.stage import Stage

if TYPE_CHECKING:
    import torch

RECEIPTS, VALID = "receipts", "valid"
Flights: TypeAlias = Mapping[int, list[Flight]]  # by lane


class RowsInFlight:
    """Those of a rank: `table` says which. `is_agreed`: whether the ranks know how many batches come again."""

    def __init__(self, settings: LoaderSettings, ranks: Ranks, local: LocalLanes) -> None:
        self._settings, self._ranks, self._local = settings, ranks, local
        self.table = Acknowledgements(ranks, settings.lanes, noting=settings.ledger is not None)
        self.is_agreed = True
        self._forget_given()

    def _forget_given(self) -> None:
        self._receipts: dict[int, tuple[int, torch.Tensor]] = {}  # of the last two batches, with their number
        self._last_again: tuple[int, int, BatchSamples] | None = None  # of the last one given again

    def receipts(self, position: Position) -> torch.Tensor:
        """Those of the batch given last: int64 (rows, 2)."""
        given = position.batches
        number, found = self._receipts.get(given & 1, (0, None))
        return receipts_of(0, 0) if found is None or number != given else found

    def wait(self, rows: int) -> None:
        """Wait until this many rows may be given, where the settings bound them. Raises `SavableError`."""
        if self._settings.max_in_flight is not None:
            self.table.wait(rows, self._settings.max_in_flight, self._settings.workers.timeout)

    def give(self, at: Position, delivery: Delivery, batch: Any) -> Any:
        """The batch of the next slot with its receipts: it is given now."""
        made_of = delivery.made_of
        assert made_of is not None
        size = _size(batch, made_of.rows) if self._settings.pad else 0
        receipts = self.table.give(at.batches, at.epoch << EPOCH_SHIFT | at.own_slot, made_of, size)
        return self._with_receipts(at, batch, receipts)

    def remakes(self, at: Position) -> Iterable[bytes]:
        """What workers need to make those that come again, in their order."""
        return (self._remake(at, flight) for flight in list(self.table.waiting))

    def _remake(self, at: Position, flight: Outstanding) -> bytes:
        """What a worker needs to make a batch again; for a filler, of the lane that comes next."""
        lanes = self._settings.lanes
        epoch, slot = divmod(flight.batch, SLOTS + 1) if flight.rows else (at.epoch, at.own_slot)
        lane = LaneState(slot % lanes, epoch, slot // lanes, facts=at.facts.digest)
        return Remake(lane, msgpack.encode(flight.ref) if flight.rows else b"", flight.size).packed

    def give_again(self, at: Position, delivery: Delivery, batch: Any) -> tuple[Any, int]:
        """The first of the waiting batches with its receipts, and its rows that come: it is given now.

        The rows of one without any are not valid.
        """
        flight, made_of = self.table.waiting[0], delivery.made_of
        assert made_of is not None
        kept = made_of.kept
        size = _size(batch, made_of.rows) if self._settings.pad else made_of.rows
        if not kept and isinstance(batch, dict):
            batch = {VALID: _none_of(size), **batch}  # unless it has such a key, of the encoder
        rows = self.table.give_again(at.batches, kept)
        self._last_again = at.batches + 1, flight.batch, BatchSamples.of(delivery.samples if kept else ())
        return self._with_receipts(at, batch, receipts_of(flight.batch, size, rows, kept)), rows

    def _with_receipts(self, at: Position, batch: Any, found: torch.Tensor) -> Any:
        """The batch with its receipts, which become those of the batch given last."""
        given = at.batches + 1
        self._receipts[given & 1] = given, found
        if not isinstance(batch, dict):
            return batch
        if RECEIPTS in batch:
            raise EncodeError(f"acknowledge=True adds the key {RECEIPTS!r} to batches. Rename that key in batch().")
        return {**batch, RECEIPTS: found}

    # Saving, restoring and looking back.

    def entries(self, at: Position, state: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a flat state dict of this position, which has its lanes."""
        return {ACKNOWLEDGE: 1, **self.table.state(at.batches, at.next_batch, state)}

    def load(self, at: Position, flights: Flights, lost: Mapping[int, int], *, whole: bool) -> None:
        """Begin with what was in flight in a state, without the rows that are `lost`. `whole`: it has all lanes."""
        counts = [0] * self._ranks.world_size
        for lane, of_lane in flights.items():
            counts[lane % self._ranks.world_size] += sum(each.open != lost[each.batch] for each in of_lane)
        own = [flight for lane in at.lanes for flight in flights.get(lane, ())]
        self._forget_given()
        self.is_agreed = whole
        self.table.load(sorted(own, key=_batch_of), max(counts) if whole else 0, lost)

    def traced(self, at: Position) -> Trace | None:
        """The trace of the batch given last if it was one that came again."""
        if self._last_again is None or self._last_again[0] != at.batches:
            return None
        _, number, samples = self._last_again
        slot = number & SLOTS
        return Trace(slot, slot % self._settings.lanes, traced_rows(self._local.last_stage, samples))


def rows_lost(last: Stage, flights: Flights) -> dict[int, int]:
    """By batch, its open rows of which nothing is left."""
    with restoring("the state"):
        return {each.batch: open_rows_lost(last, each) for of_lane in flights.values() for each in of_lane}


def open_rows_lost(last: Stage, flight: Flight) -> int:
    """The open rows of a batch in flight of which nothing is left: it is excluded, or its source is gone."""
    left_of = last.info.left_of
    _, rows = batch_rows(as_ref(msgpack.decode(msgpack.encode(flight.ref))))
    return sum(1 << row for row, ref in enumerate(rows) if left_of(ref) is None) & flight.open


def _size(batch: Any, rows: int) -> int:
    """The rows of a batch that was filled up."""
    return len(batch[VALID]) if isinstance(batch, dict) and VALID in batch else rows


def _none_of(size: int) -> torch.Tensor:
    import torch

    return torch.zeros(size, dtype=torch.bool)


def _batch_of(flight: Flight) -> int:
    return flight.batch
