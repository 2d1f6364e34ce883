"""`Acknowledgements`: the rows that a rank's trainer has not acknowledged.

    row of a loaded state ──▶ to repeat ──▶ yielded ──▶ done, or dropped
                                  ▲            │
    row of a new batch ───────────┼───────▶ yielded
                                  └── requeue ─┘

A batch leaves the table with its last row. One thread iterates, and any thread may acknowledge. Ctrl-C may come at any
call, so values that belong together are changed without a call in between.

A batch in flight is a `Flight`, and `batch` is its number, `epoch << 40 | slot`. A set of its rows is an int: bit i is
row i. Receipts are int64 (rows, 2): the number of the batch and the row, or -1 for padding. A trainer mostly passes
back the whole tensor that it got. Its rows are then known without torch, whose calls would take longer than the rest.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.state import flights
from savable_pipeline.run.state.lane_state import checksum
from savable_pipeline.run.state.state_dict import lane_name

if TYPE_CHECKING:
    import torch


Acknowledgement: TypeAlias = Literal["done", "dropped", "again"]
# by kind and reason: the rows of each batch as bits, by the number of the batch
AcknowledgedRows: TypeAlias = dict[tuple[Acknowledgement, str], dict[int, int]]
_NOT_REBUILT = "can no longer be made"  # reason of rows whose samples are excluded or removed


class InFlight(NamedTuple):
    """The number of unacknowledged rows, and the receipt of the oldest, or None."""

    rows: int
    oldest: tuple[int, int] | None


class OpenFlight(flights.Flight, gc=False):
    """Batch in flight on this rank. A padding batch has no rows.

    `number` is the number of batches that the rank got before this one, or -1 if it was loaded. `to_repeat` has the
    rows to repeat as bits. Some of them may be done by now. `issued` has the receipts of all rows.
    """

    number: int = -1
    to_repeat: int = 0
    issued: IssuedReceipts | None = None


class _Lane:
    """A lane's batches in flight, in ascending order, and their packed form until they change.

    `columns` has the same batches in columns as long as none of their rows is done, else it is None. Batches are added
    soon after they are yielded. So saving a state after thousands of batches does not read each batch again.
    """

    def __init__(self) -> None:
        self.flights: dict[int, OpenFlight] = {}  # by number of the batch
        self.packed: tuple[bytes, bytes] | None = None  # the checksum of the lane's state, and the packed batches
        self.columns: flights.EpochFlights | None = None

    def add_to_columns(self, flight: OpenFlight, round_number: int) -> None:
        """Add a batch to the columns if they have all batches before it.

        `round_number` is its slot divided by the number of lanes.
        """
        if flight.batch == next(iter(self.flights), None):
            self.columns = flights.EpochFlights(flight.batch >> flights.EPOCH_SHIFT, [], [], [])
        columns = self.columns
        if columns is None or flight.done or flight.size:
            self.columns = None
        elif not columns.rounds or round_number > columns.rounds[-1]:  # else of a later epoch, or added already
            columns.rounds.append(round_number)
            columns.refs.append(flight.ref)  # type: ignore[arg-type]

    def in_columns(self, lanes: int) -> list[flights.EpochFlights]:
        """Return all batches in flight as columns, one `EpochFlights` per epoch.

        `lanes` is the number of lanes of the run.
        """
        columns = self.columns
        if columns is not None and len(columns.rounds) == len(columns.refs) == len(self.flights) > 0:
            return [columns]
        return flights.flight_columns(list(self.flights.values()), lanes)


class Acknowledgements:
    """Table of a rank's unacknowledged rows.

    If `is_recording`, it records acknowledgements for `pop_acknowledged`.
    """

    def __init__(self, ranks: Ranks, lanes: int, *, is_recording: bool) -> None:
        self._ranks, self._lane_count, self._is_recording = ranks, lanes, is_recording
        self._lock = Lock()
        self._freed = Condition(self._lock)  # notified when rows are acknowledged
        self._is_awaited = False  # whether `wait` was ever called, so that `_freed` must be notified
        self._counts: Counter[tuple[str, str]] = Counter()  # number of rows by kind and reason
        self._acknowledged: AcknowledgedRows = {}
        self._issued: dict[int, IssuedReceipts] = {}  # receipts built in advance, by batch
        self._new_flights: list[OpenFlight] = []  # batches yielded since the last call of `_encode_new_refs`
        self.load([], 0)

    def load(self, saved: Iterable[flights.Flight], least_count: int, lost: Mapping[int, int] = {}) -> None:
        """Start with the saved batches, whose open rows are repeated first.

        `lost` has rows that cannot be repeated, by batch. A batch without other open rows is not repeated. Batches of
        padding are added until at least `least_count` batches are repeated.
        """
        loaded = [OpenFlight(f.batch, f.ref, f.rows, f.done, f.size, to_repeat=f.open_rows) for f in saved]
        with self._lock:
            self._lanes = {lane: _Lane() for lane in self._ranks.lanes(self._lane_count)}
            for flight in loaded:
                self._lanes[(flight.batch & flights.SLOT_MASK) % self._lane_count].flights[flight.batch] = flight
            self._by_tensor: dict[int, OpenFlight] = {}  # batches by the `id` of the tensor of their receipts
            self._pending = 0  # number of rows yielded and not acknowledged
            self.waiting = deque(  # batches to repeat, in this order; other threads add to it
                flight for flight in loaded if flight.open_rows != lost.get(flight.batch, 0)
            )
            self._foreign_acks: dict[int, int] = {}  # rows of other ranks' batches that were acknowledged here
            # the last batch of `issue` or `issue_again`: its number among the rank's batches, itself, and its rows
            self._last: tuple[int, OpenFlight, int] | None = None
            for flight in loaded:
                self._drop_lost(flight, lost.get(flight.batch, 0))
        self.pad_replays(least_count)

    def pad_replays(self, least_count: int) -> None:
        """Add padding batches until `least_count` batches wait to be repeated."""
        self.waiting += [OpenFlight(self._ranks.rank, (), 0) for _ in range(least_count - len(self.waiting))]

    def _set_rows(self, flight: OpenFlight, done: int, to_repeat: int) -> None:
        """Set the rows of a batch that are done, and those to repeat. Remove the batch if all are done."""
        batch, all_rows, issued = flight.batch, (1 << flight.rows) - 1, flight.issued
        lane = self._lanes[(batch & flights.SLOT_MASK) % self._lane_count]
        pending = self._pending + (all_rows & ~(done | to_repeat)).bit_count()
        pending -= (all_rows & ~(flight.done | flight.to_repeat)).bit_count()
        key = 0 if issued is None else id(issued.tensor)
        is_finished = done == all_rows and lane.flights.get(batch) is flight  # a padding batch belongs to no lane
        # Make no calls below, so that Ctrl-C comes before or after the assignments.
        flight.done, flight.to_repeat, lane.packed, lane.columns, self._pending = done, to_repeat, None, None, pending
        if is_finished:
            del lane.flights[batch]
            if key in self._by_tensor:
                del self._by_tensor[key]

    def drop_lost(self, lost: Callable[[flights.Flight], int]) -> None:
        """Drop the open rows that `lost` returns for each batch, as bits."""
        with self._lock:
            for flight in [flight for lane in self._lanes.values() for flight in lane.flights.values()]:
                self._drop_lost(flight, lost(flight))
            self._freed.notify_all()

    def _drop_lost(self, flight: OpenFlight, row_bits: int) -> None:
        """Count these rows of a batch as dropped, because their data no longer exist."""
        if row_bits:
            self._set_rows(flight, flight.done | row_bits, flight.to_repeat)
            self._record(flight.batch, row_bits, "dropped", _NOT_REBUILT)

    def cancel_unreceived(self, batches: int) -> None:
        """Undo the last `issue` or `issue_again` if its step was interrupted.

        `batches` is the number of batches that the rank got. The step was interrupted if its batch is not among them.
        """
        number, flight, row_bits = self._last or (-1, None, 0)
        if flight is None or number < batches:
            return
        with self._lock:
            if flight.number == number:
                self._set_rows(flight, row_bits, 0)
            else:
                if not self.waiting or self.waiting[0] is not flight:
                    self.waiting.appendleft(flight)
                self._set_rows(flight, flight.done, flight.to_repeat | row_bits)
            self._last = None

    def wait(self, new_count: int, most: int, timeout_s: float) -> None:
        """Wait until at most `most` rows are in flight together with `new_count` new ones.

        Raises `SavableError` after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_awaited = True
            while self._pending and self._pending + new_count > most:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not self._freed.wait(remaining_s):
                    raise SavableError(
                        f"{self._pending} rows are in flight and the next batch has {new_count}, more than "
                        f"max_in_flight={most}. Call acknowledge or drop: this rank waited {timeout_s:g} s."
                    )

    def issue(self, number: int, batch: int, delivery: Delivery, size: int = 0) -> torch.Tensor:
        """Add a new batch, and return its receipts.

        `number` is the number of batches that the rank got before. `size` is the number of rows including padding rows,
        or 0 if batches are not padded.
        """
        rows, lane = delivery.rows, self._lanes[(batch & flights.SLOT_MASK) % self._lane_count]
        if not rows:
            return receipts_of(batch, size)
        if size > rows:
            issued = IssuedReceipts.of(receipts_of(batch, size, (1 << rows) - 1).numpy()[None])[0]
        else:
            if batch not in self._issued or len(self._issued[batch].memory) != rows:
                self._issued = next_receipts(batch, rows, self._ranks.world_size)
                with self._lock:
                    self._encode_new_refs()
            issued = self._issued.pop(batch)
        flight = OpenFlight(batch, delivery.ref, rows, 0, size, number, 0, issued)
        self._new_flights.append(flight)
        key, last = id(issued.tensor), (number, flight, (1 << rows) - 1)
        with self._lock:  # make no calls here, so that Ctrl-C comes before or after the assignments
            self._last, lane.flights[batch], lane.packed, self._pending = last, flight, None, self._pending + rows
            self._by_tensor[key] = flight
        return issued.tensor

    def _encode_new_refs(self) -> None:
        """Encode the refs of new batches, and add the batches to their lanes' columns.

        These are the batches yielded since the last call, without those of which all rows are acknowledged. A call for
        each batch would take longer.
        """
        for flight in self._new_flights:
            if flight.open_rows:
                flight.encode_ref()
                slot = flight.batch & flights.SLOT_MASK
                self._lanes[slot % self._lane_count].add_to_columns(flight, slot // self._lane_count)
        self._new_flights = []

    def issue_again(self, number: int, remaining: Iterable[int]) -> int:
        """Record that the first waiting batch is repeated, and return its rows as bits.

        `remaining` has the row numbers that the rebuilt batch still has.
        """
        with self._lock:
            flight = self.waiting[0]
            self._drop_lost(flight, flight.open_rows & ~sum(1 << row for row in remaining))
            row_bits = flight.to_repeat & flight.open_rows
            self._counts["repeated", ""] += row_bits.bit_count()
            self._last = number, flight, row_bits
            self._set_rows(flight, flight.done, 0)
            self.waiting.popleft()
        return row_bits

    def acknowledge(self, receipts: Any, kind: Acknowledgement, reason: str = "") -> None:
        """Record how rows were acknowledged. Raises ValueError for anything but receipts."""
        flight, invalid_count = self._by_tensor.get(id(receipts)), 0
        issued: Any = flight and flight.issued
        # Is this the yielded tensor, neither changed nor moved to shared memory?
        if flight and issued.memory.tobytes() == issued.raw and receipts.data_ptr() == issued.pointer:
            if kind != "again" and self._acknowledge_whole(flight, kind, reason):
                return
            bits_by_batch = {flight.batch: (1 << flight.rows) - 1}
        else:
            bits_by_batch, invalid_count = rows_of(receipts)
        with self._lock:
            for batch, row_bits in bits_by_batch.items():
                known_bits = self._acknowledge_rows(batch, row_bits, kind)
                invalid_count += (row_bits ^ known_bits).bit_count()
                if known_bits:
                    self._record(batch, known_bits, kind, reason)
            if invalid_count:
                self._counts["unknown", ""] += invalid_count
            if self._is_awaited:
                self._freed.notify_all()

    def _acknowledge_whole(self, flight: OpenFlight, kind: Acknowledgement, reason: str) -> bool:
        """Acknowledge all rows of a batch. Return False, and do nothing, if some were acknowledged or requeued before.

        This special case of `_acknowledge_rows` takes half the time. With most trainers, there is no other case.
        """
        batch, rows, key = flight.batch, flight.rows, id(flight.issued.tensor)  # type: ignore[union-attr]
        lane = self._lanes[(batch & flights.SLOT_MASK) % self._lane_count]
        with self._lock:
            if flight.done or flight.to_repeat or key not in self._by_tensor:
                return False
            # Make no calls in the next two statements, so that Ctrl-C comes before or after them.
            flight.done, lane.packed, lane.columns, self._pending = (1 << rows) - 1, None, None, self._pending - rows
            del lane.flights[batch], self._by_tensor[key]
            if self._is_recording:
                self._record(batch, flight.done, kind, reason)
            else:
                self._counts[kind, reason] += rows
            if self._is_awaited:
                self._freed.notify_all()
        return True

    def _acknowledge_rows(self, batch: int, row_bits: int, kind: Acknowledgement) -> int:
        """Acknowledge those of the rows of a batch that are in flight, and return these as bits."""
        lane = self._lanes.get((batch & flights.SLOT_MASK) % self._lane_count)
        if lane is None:
            row_bits &= 0 if kind == "again" else ~self._foreign_acks.get(batch, 0)
            if row_bits:  # the batch is of another rank
                self._foreign_acks[batch] = self._foreign_acks.get(batch, 0) | row_bits
            return row_bits
        if (flight := lane.flights.get(batch)) is None:
            return 0
        row_bits &= flight.open_rows
        if kind != "again":
            self._set_rows(flight, flight.done | row_bits, flight.to_repeat)
            return row_bits
        if (row_bits := row_bits & ~flight.to_repeat) and not flight.to_repeat:
            self.waiting.append(flight)
        self._set_rows(flight, flight.done, flight.to_repeat | row_bits)
        return row_bits

    def _record(self, batch: int, row_bits: int, kind: Acknowledgement, reason: str) -> None:
        """Count acknowledged rows of a batch, and record them for `pop_acknowledged`."""
        self._counts[kind, reason] += row_bits.bit_count()
        if self._is_recording:
            recorded = self._acknowledged.setdefault((kind, reason), {})
            recorded[batch] = recorded.get(batch, 0) | row_bits

    def pop_acknowledged(self) -> AcknowledgedRows:
        """Return the rows acknowledged since the last call."""
        with self._lock:
            acknowledged, self._acknowledged = self._acknowledged, {}
        return acknowledged

    def in_flight(self) -> InFlight:
        """Return the number of unacknowledged rows, and the receipt of the oldest.

        Rows to repeat count, too.
        """
        with self._lock:
            bits = {batch: flight.open_rows for lane in self._lanes.values() for batch, flight in lane.flights.items()}
        oldest = min(bits, default=None)
        # the row of the lowest bit that is set
        receipt = None if oldest is None else (oldest, (bits[oldest] & -bits[oldest]).bit_length() - 1)
        return InFlight(sum(map(int.bit_count, bits.values())), receipt)

    def numbers(self) -> dict[str, int]:
        """Return counts of acknowledged rows, by kind and reason, and of rows in flight."""
        with self._lock:
            by_name = {"/".join(filter(None, ("acknowledged", *key))): count for key, count in self._counts.items()}
        return by_name | {"in_flight": self.in_flight().rows}

    def state(self, batches: int, next_batch_number: int, saved: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the state's entries after the rank got `batches` batches.

        `next_batch_number` is the number of the next step's first batch, as in receipts. `saved` has the lanes' states.
        """
        with self._lock:
            self._encode_new_refs()
            entries = {
                flights.flights_name(number): self._packed(number, lane, batches, checksum(saved[lane_name(number)]))
                for number, lane in self._lanes.items()
            }
            acks = {batch: bits for batch, bits in self._foreign_acks.items() if batch < next_batch_number}
        return entries | flights.packed_acks(self._ranks.rank, acks)

    def _packed(self, number: int, lane: _Lane, batches: int, saved_with: bytes) -> bytes:
        """Return the packed batches in flight of a lane, without those after the first `batches` of the rank.

        `saved_with` is the checksum of the lane's state.
        """
        newest = next(reversed(lane.flights.values()), None)
        if newest is not None and newest.number >= batches:  # the state is earlier than the newest batches
            earlier = [flight for flight in lane.flights.values() if flight.number < batches]
            return flights.packed_flights(number, flights.flight_columns(earlier, self._lane_count), saved_with)
        packed_with, packed = lane.packed or (b"", b"")
        if packed_with != saved_with or lane.packed is None:
            packed = flights.packed_flights(number, lane.in_columns(self._lane_count), saved_with)
            lane.packed = saved_with, packed
        return packed

    def agree(
        self, own: dict[int, list[flights.Flight]], merged: dict[int, list[flights.Flight]], acks: dict[int, int]
    ) -> None:
        """Remove rows that other ranks acknowledged.

        Acknowledgements that the other ranks have now received are removed, too. `own` and `acks` are the batches in
        flight and the acknowledgements of other ranks' rows that this rank has saved. `merged` are the batches in
        flight of the merged state, in which all acknowledgements are applied.
        """
        open_rows = {flight.batch: flight.open_rows for of_lane in merged.values() for flight in of_lane}
        with self._lock:
            for lane, of_lane in own.items():
                for flight in of_lane:
                    if (current := self._lanes[lane].flights.get(flight.batch)) is not None:
                        acknowledged = flight.open_rows & ~open_rows.get(flight.batch, 0)
                        self._set_rows(current, current.done | acknowledged, current.to_repeat)
            for batch, received_bits in acks.items():
                if not self._foreign_acks[batch] & ~received_bits:
                    del self._foreign_acks[batch]
                else:
                    self._foreign_acks[batch] &= ~received_bits
            self._freed.notify_all()


_BATCHES_AHEAD = 32  # batches whose receipts are built together, which is ten times as fast as one by one
_MOST_RECEIPTS = 1 << 14  # most receipts to build together, unless one batch has more


class IssuedReceipts(NamedTuple):
    """Receipts of a batch, with what shows that the trainer has not changed them."""

    tensor: torch.Tensor  # as the trainer gets it
    raw: bytes  # the original bytes of the receipts
    memory: NDArray[np.int64]  # a view of the tensor's memory
    pointer: int  # the address of this memory

    @classmethod
    def of(cls, receipts: NDArray[np.int64]) -> list[IssuedReceipts]:
        """Build the receipts of several batches from an array: int64 (batches, rows, 2)."""
        import torch

        tensors = torch.from_numpy(receipts).unbind(0)  # indexing a tensor for each batch takes ten times as long
        rows = list(receipts)
        return [cls(tensor, row.tobytes(), row, tensor.data_ptr()) for tensor, row in zip(tensors, rows, strict=True)]


def receipts_of(batch: int, size: int, row_bits: int = 0, numbers: Sequence[int] | None = None) -> torch.Tensor:
    """Return `size` receipts of a batch: int64 (size, 2).

    They are -1 for padding, and for rows that are not in `row_bits`. `numbers` has the row numbers of the batch,
    by default 0 to `size` - 1. If there are fewer, padding follows.
    """
    import torch

    numbers = range(size) if numbers is None else numbers
    receipts = [(batch, row) if row_bits >> row & 1 else (-1, -1) for row in numbers]
    receipts += [(-1, -1)] * (size - len(receipts))
    return torch.tensor(receipts, dtype=torch.int64).reshape(-1, 2)


def next_receipts(batch: int, size: int, step: int) -> dict[int, IssuedReceipts]:
    """Return the receipts of a batch of `size` rows and of the next ones, by batch.

    The batches are `step` slots apart.
    """
    batches = range(batch, batch + step * max(1, min(_BATCHES_AHEAD, _MOST_RECEIPTS // size)), step)
    receipts = np.empty((len(batches), size, 2), np.int64)
    receipts[:, :, 0] = np.array(batches)[:, None]
    receipts[:, :, 1] = np.arange(size)
    return dict(zip(batches, IssuedReceipts.of(receipts), strict=True))


def rows_of(receipts: Any) -> tuple[dict[int, int], int]:
    """Return the rows named by receipts, and the number of invalid receipts.

    The rows are bits by batch. Receipts of -1 are skipped. Raises ValueError for anything but receipts.
    """
    listed = np.asarray(receipts.numpy(force=True) if hasattr(receipts, "numpy") else receipts)
    if listed.ndim == 1:  # one receipt, or none
        listed = listed.reshape(-1, 2)
    if listed.size and (listed.ndim != 2 or listed.shape[1] != 2 or listed.dtype.kind not in "iu"):
        raise ValueError(f"receipts must be integers (rows, 2), not {listed.dtype} {listed.shape}")
    found: dict[int, int] = {}
    invalid_count = 0
    for batch, row in listed.tolist():
        if batch < 0:
            continue
        before = found.get(batch, 0)
        if 0 <= row < flights.MOST_ROWS and not before >> row & 1:
            found[batch] = before | 1 << row
        else:
            invalid_count += 1
    return found, invalid_count
