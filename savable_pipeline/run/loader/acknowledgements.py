"""`Acknowledgements`: the rows that a rank's trainer has not acknowledged.

    loaded ──▶ to repeat ──▶ yielded ──▶ done, or dropped
                   ▲            │
    new batch ─────┼───────▶ yielded
                   └── requeue ─┘

A batch leaves the table with its last row. One thread takes batches, and any thread may acknowledge. Ctrl-C may come
at any call, so values that belong together are changed without a call in between.

Receipts are int64 (rows, 2): the slot and the row of each row of a batch, or -1. A trainer mostly passes back the whole
tensor that it got. Its rows are then known without torch, whose calls would take longer than everything else here.
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
Noted: TypeAlias = dict[tuple[Acknowledgement, str], dict[int, int]]  # by kind and reason: rows as bits, by batch
_NOT_REBUILT = "can no longer be made"


class InFlight(NamedTuple):
    """The number of unacknowledged rows, and the receipt of the oldest, or None."""

    rows: int
    oldest: tuple[int, int] | None


class OpenFlight(flights.Flight, gc=False):
    """Batch in flight on this rank. A padding batch has no rows.

    `number` is the number of batches that the rank got before it, or -1 if it was loaded. `to_repeat` has the rows to
    repeat as bits, some of which may be done by now. `handed` has the receipts of all its rows.
    """

    number: int = -1
    to_repeat: int = 0
    handed: IssuedReceipts | None = None

    @property
    def out(self) -> int:
        """Return the rows that were yielded and not acknowledged, as bits."""
        return self.open & ~self.to_repeat


class _Lane:
    """A lane's batches in flight, in ascending order, and their packed form until they change.

    `columns` has the same batches as they were yielded, from the first on, so that saving a state after thousands of
    batches does not read each batch again.
    """

    def __init__(self) -> None:
        self.flights: dict[int, OpenFlight] = {}
        self.packed: tuple[bytes, bytes] | None = None  # the checksum of the lane's state, and the packed batches
        self.columns: flights.EpochFlights | None = None

    def add_to_columns(self, flight: OpenFlight, number: int) -> None:
        """Add the batch of a round if the columns have all batches before it."""
        if flight.batch == next(iter(self.flights), None):
            self.columns = flights.EpochFlights(flight.batch >> flights.EPOCH_SHIFT, [], [], [])
        columns = self.columns
        if columns is None or flight.done or flight.size:
            self.columns = None
        elif not columns.rounds or number > columns.rounds[-1]:  # otherwise of a later epoch, or added before Ctrl-C
            columns.rounds.append(number)
            columns.refs.append(flight.ref)  # type: ignore[arg-type]

    def in_columns(self, lanes: int) -> list[flights.EpochFlights]:
        """Return all batches in flight in columns.

        `lanes` is the number of lanes of the run.
        """
        columns = self.columns
        if columns is not None and len(columns.rounds) == len(columns.refs) == len(self.flights) > 0:
            return [columns]
        return flights.flight_columns(list(self.flights.values()), lanes)


class Acknowledgements:
    """Table of a rank's unacknowledged rows.

    With `noting`, it records acknowledgements for `noted`.
    """

    def __init__(self, ranks: Ranks, lanes: int, *, noting: bool) -> None:
        self._ranks, self._lane_count, self._noting = ranks, lanes, noting
        self._lock = Lock()
        self._freed = Condition(self._lock)
        self._is_awaited = False
        self._counts: Counter[tuple[str, str]] = Counter()  # number of rows by outcome and reason
        self._noted: Noted = {}
        self._issued: dict[int, IssuedReceipts] = {}  # receipts of the next batches
        self._unpacked: list[OpenFlight] = []  # batches yielded since they were last packed
        self.load([], 0)

    def load(self, saved: Iterable[flights.Flight], coming: int, lost: Mapping[int, int] = {}) -> None:
        """Start with the saved batches without `lost` rows, which are repeated first.

        A batch whose open rows are all lost is not repeated. Padding batches follow until there are `coming` batches.
        """
        loaded = [OpenFlight(one.batch, one.ref, one.rows, one.done, one.size, to_repeat=one.open) for one in saved]
        with self._lock:
            self._lanes = {lane: _Lane() for lane in self._ranks.lanes(self._lane_count)}
            for flight in loaded:
                self._lanes[(flight.batch & flights.SLOTS) % self._lane_count].flights[flight.batch] = flight
            self._handed: dict[int, OpenFlight] = {}  # by the id of their receipts
            self._pending = 0  # number of rows yielded and not acknowledged
            self.waiting = deque(  # batches to repeat, in this order; other threads add to it
                flight for flight in loaded if flight.open != lost.get(flight.batch, 0)
            )
            self._foreign_acks: dict[int, int] = {}  # rows of other ranks' batches that were acknowledged here
            self._last: tuple[int, OpenFlight, int] | None = None  # the last batch: its number, itself, and its rows
            for flight in loaded:
                self._drop_lost(flight, lost.get(flight.batch, 0))
        self.pad_replays(coming)

    def pad_replays(self, coming: int) -> None:
        """Add padding batches until `coming` batches wait to be repeated."""
        self.waiting += [OpenFlight(self._ranks.rank, (), 0) for _ in range(coming - len(self.waiting))]

    def _set_rows(self, flight: OpenFlight, done: int, to_repeat: int) -> None:
        """Set the rows of a batch that are done and those to repeat. Remove the batch when all rows are done."""
        batch, rows, handed = flight.batch, (1 << flight.rows) - 1, flight.handed
        lane = self._lanes[(batch & flights.SLOTS) % self._lane_count]
        pending = self._pending + (rows & ~(done | to_repeat)).bit_count()
        pending -= (rows & ~(flight.done | flight.to_repeat)).bit_count()
        key = 0 if handed is None else id(handed.tensor)
        is_finished = done == rows and lane.flights.get(batch) is flight  # a padding batch belongs to no lane
        # Make no calls below, so that Ctrl-C comes before or after the assignments.
        flight.done, flight.to_repeat, lane.packed, lane.columns, self._pending = done, to_repeat, None, None, pending
        if is_finished:
            del lane.flights[batch]
            if key in self._handed:
                del self._handed[key]

    def drop_lost(self, lost: Callable[[flights.Flight], int]) -> None:
        """Drop the open rows that `lost` returns for each batch, as bits."""
        with self._lock:
            for flight in [flight for lane in self._lanes.values() for flight in lane.flights.values()]:
                self._drop_lost(flight, lost(flight))
            self._freed.notify_all()

    def _drop_lost(self, flight: OpenFlight, rows: int) -> None:
        if rows:
            self._set_rows(flight, flight.done | rows, flight.to_repeat)
            self._note(flight.batch, rows, "dropped", _NOT_REBUILT)

    def cancel_unreceived(self, batches: int) -> None:
        """Take the last batch back if it is not among the `batches` that the rank got.

        Its step was interrupted.
        """
        if self._last is None or self._last[0] < batches:
            return
        number, flight, rows = self._last
        with self._lock:
            if flight.number == number:
                self._set_rows(flight, rows, 0)
            else:
                if not self.waiting or self.waiting[0] is not flight:
                    self.waiting.appendleft(flight)
                self._set_rows(flight, flight.done, flight.to_repeat | rows)
            self._last = None

    def wait(self, rows: int, most: int, timeout_s: float) -> None:
        """Wait until `rows` more rows are at most `most` in flight.

        Raises `SavableError` after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_awaited = True
            while self._pending and self._pending + rows > most:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not self._freed.wait(remaining_s):
                    raise SavableError(
                        f"{self._pending} rows are in flight and the next batch has {rows}, more than "
                        f"max_in_flight={most}. Call acknowledge or drop: this rank waited {timeout_s:g} s."
                    )

    def issue(self, number: int, batch: int, delivery: Delivery, size: int = 0) -> torch.Tensor:
        """Add the `number`-th batch, padded to `size` rows, and return its receipts."""
        rows, lane = delivery.rows, self._lanes[(batch & flights.SLOTS) % self._lane_count]
        if not rows:
            return receipts_of(batch, size)
        if size > rows:
            handed = IssuedReceipts.of(receipts_of(batch, size, (1 << rows) - 1).numpy()[None])[0]
        else:
            if batch not in self._issued or len(self._issued[batch].memory) != rows:
                self._issued = next_receipts(batch, rows, self._ranks.world_size)
                with self._lock:
                    self._pack_new_flights()
            handed = self._issued.pop(batch)
        flight = OpenFlight(batch, delivery.ref, rows, 0, size, number, 0, handed)
        self._unpacked.append(flight)
        key, last = id(handed.tensor), (number, flight, (1 << rows) - 1)
        with self._lock:  # make no calls here
            self._last, lane.flights[batch], lane.packed, self._pending = last, flight, None, self._pending + rows
            self._handed[key] = flight
        return handed.tensor

    def _pack_new_flights(self) -> None:
        """Pack the new batches that still have open rows, and free the others together, which is faster."""
        for flight in self._unpacked:
            if flight.open:
                flight.pack()
                slot = flight.batch & flights.SLOTS
                self._lanes[slot % self._lane_count].add_to_columns(flight, slot // self._lane_count)
        self._unpacked = []

    def issue_again(self, number: int, remaining: Iterable[int]) -> int:
        """Repeat the first waiting batch with its `remaining` rows.

        Return the open ones as bits.
        """
        with self._lock:
            flight = self.waiting[0]
            self._drop_lost(flight, flight.open & ~sum(1 << row for row in remaining))
            rows = flight.to_repeat & flight.open
            self._counts["repeated", ""] += rows.bit_count()
            self._last = number, flight, rows
            self._set_rows(flight, flight.done, 0)
            self.waiting.popleft()
        return rows

    def acknowledge(self, receipts: Any, kind: Acknowledgement, reason: str = "") -> None:
        """Record the outcome of rows. Raises ValueError for anything but receipts."""
        whole, odd = self._handed.get(id(receipts)), 0
        handed: Any = whole and whole.handed
        # Was the tensor neither changed nor moved to shared memory?
        if whole and handed.memory.tobytes() == handed.raw and receipts.data_ptr() == handed.pointer:
            if kind != "again" and self._acknowledge_whole(whole, kind, reason):
                return
            named = {whole.batch: (1 << whole.rows) - 1}
        else:
            named, odd = rows_of(receipts)
        with self._lock:
            for batch, rows in named.items():
                known = self._acknowledge_rows(batch, rows, kind)
                odd += (rows ^ known).bit_count()
                if known:
                    self._note(batch, known, kind, reason)
            if odd:
                self._counts["unknown", ""] += odd
            if self._is_awaited:
                self._freed.notify_all()

    def _acknowledge_whole(self, flight: OpenFlight, kind: Acknowledgement, reason: str) -> bool:
        """Acknowledge all rows of a batch, and return whether none was acknowledged or requeued before.

        This is a case of `_acknowledge_rows` that takes half the time. Most trainers always use it.
        """
        batch, rows, key = flight.batch, flight.rows, id(flight.handed.tensor)  # type: ignore[union-attr]
        lane = self._lanes[(batch & flights.SLOTS) % self._lane_count]
        with self._lock:
            if flight.done or flight.to_repeat or key not in self._handed:
                return False
            # Make no calls here: Ctrl-C comes before, or after.
            flight.done, lane.packed, lane.columns, self._pending = (1 << rows) - 1, None, None, self._pending - rows
            del lane.flights[batch], self._handed[key]
            if self._noting:
                self._note(batch, flight.done, kind, reason)
            else:
                self._counts[kind, reason] += rows
            if self._is_awaited:
                self._freed.notify_all()
        return True

    def _acknowledge_rows(self, batch: int, rows: int, kind: Acknowledgement) -> int:
        """Acknowledge the rows of a batch that are in flight, and return them as bits."""
        lane = self._lanes.get((batch & flights.SLOTS) % self._lane_count)
        if lane is None:
            rows &= 0 if kind == "again" else ~self._foreign_acks.get(batch, 0)
            if rows:  # of another rank
                self._foreign_acks[batch] = self._foreign_acks.get(batch, 0) | rows
            return rows
        if (flight := lane.flights.get(batch)) is None:
            return 0
        rows &= (1 << flight.rows) - 1 & ~flight.done
        if kind != "again":
            self._set_rows(flight, flight.done | rows, flight.to_repeat)
            return rows
        if (rows := rows & ~flight.to_repeat) and not flight.to_repeat:
            self.waiting.append(flight)
        self._set_rows(flight, flight.done, flight.to_repeat | rows)
        return rows

    def _note(self, batch: int, rows: int, kind: Acknowledgement, reason: str) -> None:
        self._counts[kind, reason] += rows.bit_count()
        if self._noting:
            noted = self._noted.setdefault((kind, reason), {})
            noted[batch] = noted.get(batch, 0) | rows

    def noted(self) -> Noted:
        """Return the acknowledgements recorded since the last call."""
        with self._lock:
            found, self._noted = self._noted, {}
        return found

    def in_flight(self) -> InFlight:
        """Return the number of unacknowledged rows, with those to repeat, and the oldest."""
        with self._lock:
            rows = {batch: flight.open for lane in self._lanes.values() for batch, flight in lane.flights.items()}
        oldest = min(rows, default=None)
        first = None if oldest is None else (oldest, (rows[oldest] & -rows[oldest]).bit_length() - 1)
        return InFlight(sum(map(int.bit_count, rows.values())), first)

    def numbers(self) -> dict[str, int]:
        """Return the numbers of rows by outcome, and of rows in flight."""
        with self._lock:
            named = {"/".join(filter(None, ("acknowledged", *name))): rows for name, rows in self._counts.items()}
        return named | {"in_flight": self.in_flight().rows}

    def state(self, batches: int, next_batch: int, saved: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the entries of a state dict after `batches` batches.

        `next_batch` is the next slot with its epoch, as in receipts. `saved` has the state of each lane by its name.
        """
        with self._lock:
            self._pack_new_flights()
            found = {
                flights.flights_name(number): self._packed(number, lane, batches, checksum(saved[lane_name(number)]))
                for number, lane in self._lanes.items()
            }
            acks = {batch: rows for batch, rows in self._foreign_acks.items() if batch < next_batch}
        return found | flights.packed_acks(self._ranks.rank, acks)

    def _packed(self, number: int, lane: _Lane, batches: int, saved_with: bytes) -> bytes:
        newest = next(reversed(lane.flights.values()), None)
        if newest is not None and newest.number >= batches:  # the state is earlier than the newest batches
            earlier = [flight for flight in lane.flights.values() if flight.number < batches]
            return flights.packed_flights(number, flights.flight_columns(earlier, self._lane_count), saved_with)
        if lane.packed is None or lane.packed[0] != saved_with:
            lane.packed = saved_with, flights.packed_flights(number, lane.in_columns(self._lane_count), saved_with)
        return lane.packed[1]

    def agree(
        self, own: dict[int, list[flights.Flight]], merged: dict[int, list[flights.Flight]], acks: dict[int, int]
    ) -> None:
        """Drop rows that other ranks acknowledged, and acknowledgements they received.

        `own` and `acks` are this rank's batches and acknowledgements in the state of all ranks. `merged` are the
        batches that remain in it.
        """
        open_rows = {flight.batch: flight.open for of_lane in merged.values() for flight in of_lane}
        with self._lock:
            for lane, of_lane in own.items():
                for flight in of_lane:
                    if (current := self._lanes[lane].flights.get(flight.batch)) is not None:
                        acknowledged = flight.open & ~open_rows.get(flight.batch, 0)
                        self._set_rows(current, current.done | acknowledged, current.to_repeat)
            for batch, rows in acks.items():
                if not self._foreign_acks[batch] & ~rows:
                    del self._foreign_acks[batch]
                else:
                    self._foreign_acks[batch] &= ~rows
            self._freed.notify_all()


_BATCHES_AHEAD = 32  # batches whose receipts are built together, which is ten times as fast as one by one
_MOST_RECEIPTS = 1 << 14  # most receipts to build together, unless one batch has more


class IssuedReceipts(NamedTuple):
    """Receipts as the trainer gets them."""

    tensor: torch.Tensor
    raw: bytes  # bytes as they were written
    memory: NDArray[np.int64]
    pointer: int  # address of torch's memory

    @classmethod
    def of(cls, receipts: NDArray[np.int64]) -> list[IssuedReceipts]:
        """Build receipts of several batches, int64 (batches, rows, 2), in own memory."""
        import torch

        tensors = torch.from_numpy(receipts).unbind(0)  # indexing a tensor for each batch takes ten times as long
        rows = list(receipts)
        return [cls(tensor, row.tobytes(), row, tensor.data_ptr()) for tensor, row in zip(tensors, rows, strict=True)]


def receipts_of(batch: int, size: int, rows: int = 0, numbers: Sequence[int] | None = None) -> torch.Tensor:
    """Return `size` receipts of a batch, with -1 for rows not in the bits `rows`.

    `numbers` has the numbers of its rows without padding, by default 0 to `size` - 1.
    """
    import torch

    numbers = range(size) if numbers is None else numbers
    found = [(batch, row) if rows >> row & 1 else (-1, -1) for row in numbers]
    found += [(-1, -1)] * (size - len(found))
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def next_receipts(batch: int, size: int, step: int) -> dict[int, IssuedReceipts]:
    """Return the receipts of a batch and of the next ones, `step` slots apart."""
    batches = range(batch, batch + step * max(1, min(_BATCHES_AHEAD, _MOST_RECEIPTS // size)), step)
    receipts = np.empty((len(batches), size, 2), np.int64)
    receipts[:, :, 0] = np.array(batches)[:, None]
    receipts[:, :, 1] = np.arange(size)
    return dict(zip(batches, IssuedReceipts.of(receipts), strict=True))


def rows_of(receipts: Any) -> tuple[dict[int, int], int]:
    """Return the rows of each batch as bits, and the number of invalid receipts.

    Receipts of -1 are skipped. Raises ValueError for anything but receipts.
    """
    listed = np.asarray(receipts.numpy(force=True) if hasattr(receipts, "numpy") else receipts)
    if listed.ndim == 1:  # one receipt, or none
        listed = listed.reshape(-1, 2)
    if listed.size and (listed.ndim != 2 or listed.shape[1] != 2 or listed.dtype.kind not in "iu"):
        raise ValueError(f"receipts must be integers (rows, 2), not {listed.dtype} {listed.shape}")
    found: dict[int, int] = {}
    odd = 0
    for batch, row in listed.tolist():
        if batch < 0:
            continue
        before = found.get(batch, 0)
        if 0 <= row < flights.MOST_ROWS and not before >> row & 1:
            found[batch] = before | 1 << row
        else:
            odd += 1
    return found, odd
