"""`AcknowledgedRun`: a run whose batches come with receipts, and come again until their rows are acknowledged.

next ──▶ batches to come again, the same number on each rank after a load ──▶ the batches of new slots
         take no slot: `Position` stays                                       as in any run
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from msgspec import msgpack
from msgspec.structs import replace

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.weights import Weight
from savable_pipeline.errors import EncodeError
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.engine.remaking import Remake
from savable_pipeline.run.loader.acknowledgements import Acknowledgements, Outstanding
from savable_pipeline.run.loader.decided import Excluded
from savable_pipeline.run.loader.deciding import DecidingRun
from savable_pipeline.run.loader.epoch_end import Voting
from savable_pipeline.run.loader.pin_memory import pinned
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.receipts import receipts_of
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.trace import Trace, traced_rows
from savable_pipeline.run.state.flights import (
    ACKNOWLEDGE,
    EPOCH_SHIFT,
    SLOTS,
    Flight,
    read_acks,
    read_flights,
    without_flights,
)
from savable_pipeline.run.state.lane_state import LaneState
from savable_pipeline.run.state.restoring import restoring
from savable_pipeline.run.state.state_dict import check_flat, lane_numbers, merge_states
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import as_ref, batch_rows

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

RECEIPTS, VALID = "receipts", "valid"


class AcknowledgedRun(DecidingRun):
    """A run of a loader with `acknowledge=True`; `table` holds what is in flight."""

    def __init__(
        self,
        settings: LoaderSettings,
        agree: Callable[[int], int] | None = None,
        pinned: PinnedShards | None = None,
    ) -> None:
        super().__init__(settings, agree, pinned)
        self.table = Acknowledgements(self.ranks, settings.lanes, noting=settings.ledger is not None)
        self.stats.others = self.table.numbers
        self._is_agreed = True  # how many batches come again after a load, among all ranks
        self._writing = Lock()  # to the ledger
        self._forget_given()

    def _forget_given(self) -> None:
        self._receipts: dict[int, tuple[int, torch.Tensor]] = {}  # of the last two batches, with their number
        self._last_again: tuple[int, int, BatchSamples] | None = None  # of the last one given again

    @property
    def receipts(self) -> torch.Tensor:
        """Those of the batch given last: int64 (rows, 2)."""
        given = self.position.batches
        number, found = self._receipts.get(given & 1, (0, None))
        return receipts_of(0, 0) if found is None or number != given else found

    # Going on.

    def __next__(self) -> Any:
        self.table.settle(self.position.batches)
        if self.table.waiting or not self._is_agreed:
            self._is_agreed |= self._asks_ranks and not self.ranks.can_talk
            if (self.table.waiting or not self._is_agreed) and not self.position.told:
                return self._led(self.taking())
        return super().__next__()

    def taking(self) -> Voting[Any]:
        """Take the next batch: of those that come again, or of the next slot."""
        self.table.settle(self.position.batches)
        if not self._is_agreed:
            own = len(self.table.waiting)
            self.table.fill_up(abs((yield own if self.settings.pad else -own)))
            self._is_agreed = True
        if not self.table.waiting or self.position.told:
            return (yield from super().taking())
        started = time.perf_counter()
        if not self._process.checked:
            self._check_ranks()
        self.local.verify_excluded()
        delivery = self.prefetcher.again(self.position, map(self._remake, list(self.table.waiting)))
        batch = self._prepare_again(delivery, started)
        self.position = self.position.given_again()  # last, as in any run
        return batch

    def _remake(self, flight: Outstanding) -> bytes:
        """What a worker needs to make a batch again; for a filler, of the lane that comes next."""
        at, lanes = self.position, self.settings.lanes
        epoch, slot = divmod(flight.batch, SLOTS + 1) if flight.rows else (at.epoch, at.own_slot)
        lane = LaneState(slot % lanes, epoch, slot // lanes, facts=at.facts.digest)
        return Remake(lane, msgpack.encode(flight.ref) if flight.rows else b"", flight.size).packed

    def _lost(self, flight: Flight) -> int:
        """The open rows of a batch in flight of which nothing is left: it is excluded, or its source is gone."""
        left_of = self.local.last_stage.info.left_of
        _, rows = batch_rows(as_ref(msgpack.decode(msgpack.encode(flight.ref))))
        return sum(1 << row for row, ref in enumerate(rows) if left_of(ref) is None) & flight.open

    def decide(
        self,
        weights: Mapping[str, Weight] | None = None,
        exclude: Iterable[Excluded] | None = None,
        max_length: int | None = None,
    ) -> int:
        """See `Deciding.decide`. Rows in flight of which all is excluded are closed."""
        place = super().decide(weights, exclude, max_length)
        self.table.settle(self.position.batches)
        self.table.lose(self._lost)
        return place

    def _prepare(self, delivery: Delivery, after: Position, started: float) -> Any:
        """The batch of the next slot as the trainer gets it, with its receipts."""
        at, made_of, settings = self.position, delivery.made_of, self.settings
        assert made_of is not None
        if settings.max_in_flight is not None:
            self._wait(made_of.rows, delivery)
        with self._writing:
            batch = super()._prepare(delivery, after, started)
        size = _size(batch, made_of.rows) if settings.pad else 0
        receipts = self.table.give(at.batches, at.epoch << EPOCH_SHIFT | at.own_slot, made_of, size)
        if self._ledger is not None:
            self._write_noted()
        return self._with_receipts(batch, receipts)

    def _wait(self, rows: int, delivery: Delivery | None = None) -> None:
        try:
            self.table.wait(rows, self.settings.max_in_flight or 0, self.settings.workers.timeout)
        except BaseException:
            if delivery is not None:
                self.prefetcher.put_back(self.position, delivery)
            raise

    def _prepare_again(self, delivery: Delivery, started: float) -> Any:
        """A batch that was made again as the trainer gets it; the rows of one without any are not valid."""
        flight, made_of, batch = self.table.waiting[0], delivery.made_of, delivery.batch
        assert made_of is not None
        kept = made_of.kept
        if self.settings.max_in_flight is not None:
            self._wait((flight.to_come & flight.open).bit_count())
        samples = BatchSamples.of(delivery.samples if kept else ())
        if self.settings.ids:
            batch = self._sample_ids.added(batch, BatchSamples.of(delivery.samples))
        if self.settings.pin_memory:
            batch = pinned(batch)
        size = _size(batch, made_of.rows) if self.settings.pad else made_of.rows
        if not kept and isinstance(batch, dict):
            batch = {VALID: _none_of(size), **batch}  # unless it has such a key, of the encoder
        number = self.position.batches
        rows = self.table.give_again(number, kept)
        if self._ledger is not None and flight.rows:
            with self._writing:
                at, last = self.position, self.local.last_stage
                self._ledger.given_again(at, flight.batch, samples.in_rows(kept), rows, last, self.states.packed)
        self._write_noted()
        self.stats.add(time.perf_counter() - started, replace(delivery, samples=()))
        self._last_again = number + 1, flight.batch, samples
        return self._with_receipts(batch, receipts_of(flight.batch, size, rows, kept))

    def _with_receipts(self, batch: Any, found: torch.Tensor) -> Any:
        """The batch with its receipts, which become those of the batch given last."""
        given = self.position.batches + 1
        self._receipts[given & 1] = given, found
        if not isinstance(batch, dict):
            return batch
        if RECEIPTS in batch:
            raise EncodeError(f"acknowledge=True adds the key {RECEIPTS!r} to batches: batch() must not give it")
        return {**batch, RECEIPTS: found}

    # Saving, restoring and looking back.

    def state_at(self, position: Position, lag: int = 0) -> dict[str, Any]:
        """See `Run.state_at`, with what is in flight. Raises ValueError for any `lag`."""
        if lag:
            raise ValueError("lag must be 0 with acknowledge=True: its state has each row that is not acknowledged")
        state = super().state_at(position)
        self._write_noted()
        place = place_of(position.epoch, position.slot)
        return state | ACKNOWLEDGE | self.table.state(position.batches, place, state)

    def global_state(
        self, group: dist.ProcessGroup | None = None, *, position: Position | None = None, lag: int = 0
    ) -> dict[str, Any]:
        """See `Run.global_state`. What ranks acknowledged for each other is known to all then. Collective."""
        ranks = self.ranks if group is None else Ranks(self.ranks.rank, self.ranks.world_size, group)
        own = self.state_at(self.position if position is None else position, lag)
        return self.joined(own, ranks.gather(own))

    def joined(self, own: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of all ranks, of which this one has just saved `own`; it learns what the others acknowledged."""
        merged = merge_states(states)
        if self.ranks.world_size > 1:
            self.table.agree(read_flights(own), read_flights(merged), read_acks(own))
        return merged

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """See `SavableLoader.load_state_dict`."""
        check_flat(state)
        flights = read_flights(state)
        self._write_noted()
        super().load_state_dict(without_flights(state), allow)
        with restoring("the state"):
            lost = {each.batch: self._lost(each) for of_lane in flights.values() for each in of_lane}
        counts = [0] * self.ranks.world_size
        for lane, of_lane in flights.items():
            counts[lane % self.ranks.world_size] += sum(each.open != lost[each.batch] for each in of_lane)
        own = [flight for lane in self.position.lanes for flight in flights.get(lane, ())]
        self._forget_given()
        self._is_agreed = len(lane_numbers(state)) == self.settings.lanes
        self.table.load(sorted(own, key=_batch_of), max(counts) if self._is_agreed else 0, lost)

    def trace(self, lag: int = 0) -> Trace:
        """See `SavableLoader.trace`: of a batch given again, as of any other."""
        if lag or self._last_again is None or self._last_again[0] != self.position.batches:
            return super().trace(lag)
        _, place, samples = self._last_again
        slot = place & SLOTS
        return Trace(slot, slot % self.settings.lanes, traced_rows(self.local.last_stage, samples))

    def _write_noted(self) -> None:
        """Write to the ledger what was acknowledged, if it has a file open."""
        if self._ledger is not None and self._ledger.is_open:
            with self._writing:
                for (kind, reason), rows in self.table.noted().items():
                    self._ledger.acknowledged(kind, reason, rows)

    def close(self) -> None:
        """See `SavableLoader.close`."""
        self._write_noted()
        super().close()


def place_of(epoch: int, slot: int) -> int:
    """What receipts call a slot: in epoch 0, and where there is only one, the slot itself."""
    return epoch << EPOCH_SHIFT | slot


def _size(batch: Any, rows: int) -> int:
    """The rows of a batch that was filled up."""
    return len(batch[VALID]) if isinstance(batch, dict) and VALID in batch else rows


def _none_of(size: int) -> torch.Tensor:
    import torch

    return torch.zeros(size, dtype=torch.bool)


def _batch_of(flight: Flight) -> int:
    return flight.batch
