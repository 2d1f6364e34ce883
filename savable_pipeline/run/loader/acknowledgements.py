"""`Acknowledgements`: which rows of a rank's batches are in flight, given to the caller and not acknowledged yet.

    loaded ──▶ to come again ──▶ out ──▶ done, or dropped
                     ▲            │
    given ───────────┼──────────▶ out
                     └── again ───┘

Batches leave the table when their last row has. One thread takes batches; any thread may acknowledge.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from threading import Condition, Lock
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.messages import MadeOf
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.state.flights import MOST_ROWS, SLOTS, Flight, flights_name, packed_acks, packed_flights
from savable_pipeline.stages.batch_samples import Integers

Acknowledgement: TypeAlias = Literal["done", "dropped", "again"]
Noted: TypeAlias = dict[tuple[Acknowledgement, str], dict[int, int]]  # rows of batches, by what and why
_CANNOT_BE_MADE = "can no longer be made"


class InFlight(NamedTuple):
    """How many rows are given and not acknowledged, and the receipt (slot, row) of the oldest; None without any."""

    rows: int
    oldest: tuple[int, int] | None


class Outstanding(Flight, gc=False):
    """A batch in flight here: of its open rows, those that are out, and those to come again.

    `number`: how many batches the rank was given before it; -1 if it was loaded. A filler has no rows.
    """

    number: int = -1
    out: int = 0
    to_come: int = 0

    @property
    def rows_out(self) -> int:
        """The rows that are given and not acknowledged."""
        return self.out & self.open


class _LastGiven(NamedTuple):
    number: int
    flight: Outstanding
    rows: int
    again: bool


class Acknowledgements:
    """The table of a rank. `noting`: whether `noted` keeps what was acknowledged, for a ledger."""

    def __init__(self, ranks: Ranks, lanes: int, *, noting: bool) -> None:
        self._ranks, self._lanes, self._noting = ranks, lanes, noting
        self._lock = Lock()
        self._freed = Condition(self._lock)
        self._is_awaited = False
        self._counts: Counter[str] = Counter()
        self._noted: Noted = {}
        self.load([], 0)

    def load(self, flights: Iterable[Flight], coming: int) -> None:
        """Begin with these batches, which come first; fillers follow until there are `coming`."""
        loaded = [Outstanding(each.batch, each.ref, each.rows, each.open, to_come=each.open) for each in flights]
        with self._lock:
            self._flights: dict[int, dict[int, Outstanding]] = {}  # by lane
            self._packed: dict[int, tuple[int, bytes]] = {}  # of lanes unchanged since, and their newest `number`
            for flight in loaded:
                self._of_lane(flight.batch)[flight.batch] = flight
            self._waiting = deque(loaded)  # to come again, in this order
            self._elsewhere: dict[int, int] = {}  # rows of other ranks' batches that were acknowledged here
            self._last: _LastGiven | None = None
        self.fill_up(coming)

    def _of_lane(self, batch: int) -> dict[int, Outstanding]:
        """The batches of this one's lane, of which one will change."""
        lane = (batch & SLOTS) % self._lanes
        self._packed.pop(lane, None)
        return self._flights.setdefault(lane, {})

    def fill_up(self, coming: int) -> None:
        """Let fillers follow until `coming` batches come again."""
        self._waiting += [Outstanding(-1, b"", 0, 0) for _ in range(coming - len(self._waiting))]

    # Giving.

    @property
    def waiting(self) -> list[Outstanding]:
        """The batches to come again, in order."""
        return list(self._waiting)

    @property
    def is_waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting)

    def settle(self, batches: int) -> None:
        """Take the last batch back unless it is among the `batches` that the rank was given: that was broken off."""
        last = self._last
        if last is None or last.number < batches:
            return
        with self._lock:
            self._last, flight = None, last.flight
            flight.out &= ~last.rows
            if not last.again:
                self._of_lane(flight.batch).pop(flight.batch, None)
                return
            flight.to_come |= last.rows
            if not self._waiting or self._waiting[0] is not flight:
                self._waiting.appendleft(flight)

    def wait(self, rows: int, most: int, timeout_s: float) -> None:
        """Wait until this many rows more are at most `most`. Raises `SavableError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_awaited = True
            while (out := self._out()) and out + rows > most:
                left = deadline - time.monotonic()
                if left <= 0 or not self._freed.wait(left):
                    raise SavableError(
                        f"{out} rows are in flight, and the {rows} of the next batch would make that more than "
                        f"max_in_flight={most}: too few were acknowledged here in {timeout_s:g} s. What another rank "
                        "has acknowledged is known at the next global_state_dict() only"
                    )

    def give(self, number: int, batch: int, made_of: MadeOf) -> int:
        """Note that a new batch is given, after `number` others. Returns its rows."""
        rows = (1 << made_of.rows) - 1
        flight = Outstanding(batch, made_of.ref, made_of.rows, rows, number, out=rows)
        with self._lock:
            self._last = _LastGiven(
                number, flight, rows, again=False
            )  # first: whatever is broken off, it is taken back
            if rows:
                self._of_lane(batch)[batch] = flight
        return rows

    def give_again(self, number: int, lost: Iterable[int]) -> int:
        """Note that the first of the waiting batches is given, without its `lost` rows. Returns its rows that come."""
        with self._lock:
            flight = self._waiting[0]
            if gone := sum(1 << row for row in lost) & flight.open:
                self._close(flight, gone)
                self._note(flight.batch, gone, "dropped", _CANNOT_BE_MADE)
            rows = flight.to_come & flight.open
            self._last = _LastGiven(number, flight, rows, again=True)
            flight.out |= rows
            flight.to_come = 0
            self._waiting.popleft()
            self._counts["acknowledged/given_again"] += rows.bit_count()
        return rows

    def _out(self) -> int:
        """How many rows are given and not acknowledged."""
        return sum(flight.rows_out.bit_count() for of_lane in self._flights.values() for flight in of_lane.values())

    # Acknowledging.

    def acknowledge(self, receipts: Any, kind: Acknowledgement, reason: str = "") -> None:
        """Note what became of the rows with these receipts. Raises ValueError for anything but receipts."""
        found, odd = _by_batch(receipts)
        with self._lock:
            for batch, rows in found.items():
                known = self._taken(batch, rows, kind)
                odd += (rows ^ known).bit_count()
                if known:
                    self._note(batch, known, kind, reason)
            if odd:
                self._counts["acknowledged/unknown"] += odd
            if self._is_awaited:
                self._freed.notify_all()

    def _taken(self, batch: int, rows: int, kind: Acknowledgement) -> int:
        """Those of a batch's rows that can be acknowledged so; they are."""
        lane = (batch & SLOTS) % self._lanes
        flight = self._flights.get(lane, {}).get(batch)
        if flight is None:
            if kind == "again" or lane % self._ranks.world_size == self._ranks.rank:
                return 0
            known = rows & ~self._elsewhere.get(batch, 0)
            self._elsewhere[batch] = self._elsewhere.get(batch, 0) | known
            return known
        if kind != "again":
            known = rows & flight.open
            self._close(flight, known)
            return known
        known = rows & flight.rows_out
        flight.out ^= known
        if known and not flight.to_come:
            self._waiting.append(flight)
        flight.to_come |= known
        return known

    def _close(self, flight: Outstanding, rows: int) -> None:
        """Let go of these open rows, and of the batch if they are the last."""
        flight.open &= ~rows
        of_lane = self._of_lane(flight.batch)
        if not flight.open:
            del of_lane[flight.batch]

    def _note(self, batch: int, rows: int, kind: Acknowledgement, reason: str) -> None:
        self._counts[f"acknowledged/{kind}/{reason}" if reason else f"acknowledged/{kind}"] += rows.bit_count()
        if self._noting:
            noted = self._noted.setdefault((kind, reason), {})
            noted[batch] = noted.get(batch, 0) | rows

    def noted(self) -> Noted:
        """What was acknowledged since this was last asked."""
        with self._lock:
            found, self._noted = self._noted, {}
        return found

    # Looking and saving.

    def in_flight(self) -> InFlight:
        """What is given and not acknowledged here."""
        with self._lock:
            out = {f.batch: f.rows_out for of_lane in self._flights.values() for f in of_lane.values() if f.rows_out}
            if not out:
                return InFlight(0, None)
            oldest = min(out)
            return InFlight(self._out(), (oldest, (out[oldest] & -out[oldest]).bit_length() - 1))

    def numbers(self) -> dict[str, int]:
        """Counters of rows, and how many are in flight; none before the first batch."""
        with self._lock:
            return {**self._counts, "in_flight": self._out()}

    def state(self, batches: int, place: int) -> dict[str, bytes]:
        """The entries of a state dict after `batches` were given, where the next slot, with its epoch, is `place`."""
        with self._lock:
            own = self._ranks.lanes(self._lanes)
            lanes = {lane: self._packed_lane(lane, self._flights.get(lane, {}), batches) for lane in own}
            acks = {batch: rows for batch, rows in self._elsewhere.items() if batch < place}
        found = {flights_name(lane): packed for lane, packed in lanes.items()}
        return found | packed_acks(self._ranks.rank, acks)

    def _packed_lane(self, lane: int, of_lane: Mapping[int, Outstanding], batches: int) -> bytes:
        newest, packed = self._packed.get(lane, (batches, b""))
        if newest < batches:
            return packed
        given = [flight for flight in of_lane.values() if flight.number < batches]
        packed = packed_flights(lane, given, self._lanes)
        if len(given) == len(of_lane):  # else one is being given
            self._packed[lane] = given[-1].number if given else -1, packed
        return packed

    def agree(self, own: dict[int, list[Flight]], merged: dict[int, list[Flight]], acks: dict[int, int]) -> None:
        """Let go of rows that other ranks have acknowledged, and of acknowledgements that their ranks know now.

        `own` are the batches and `acks` the acknowledgements that this rank put into the state of all, `merged` those
        that are left in it.
        """
        left = {flight.batch: flight.open for of_lane in merged.values() for flight in of_lane}
        with self._lock:
            for flight in (flight for of_lane in own.values() for flight in of_lane):
                here = self._of_lane(flight.batch).get(flight.batch)
                if here is not None:
                    self._close(here, here.open & flight.open & ~left.get(flight.batch, 0))
            for batch, rows in acks.items():
                if not self._elsewhere[batch] & ~rows:
                    del self._elsewhere[batch]
                else:
                    self._elsewhere[batch] &= ~rows
            if self._is_awaited:
                self._freed.notify_all()


def _by_batch(receipts: Any) -> tuple[dict[int, int], int]:
    """The rows of each batch that is named, and how many receipts are none that any batch has, or stand twice.

    Receipts of -1, of rows that do not count, are passed over.
    """
    listed = np.asarray(receipts.numpy(force=True) if hasattr(receipts, "numpy") else receipts)
    if listed.ndim == 1:  # one, or none
        listed = listed.reshape(-1, 2)
    if listed.size and (listed.ndim != 2 or listed.shape[1] != 2 or listed.dtype.kind not in "iu"):
        raise ValueError(f"receipts are integers (rows, 2), slot and row of each, not {listed.dtype} {listed.shape}")
    numbers = listed.ravel().tolist()
    batches, rows = numbers[::2], numbers[1::2]
    count = len(rows)
    if count and batches[0] >= 0 and batches.count(batches[0]) == count and rows == list(range(count)):
        return {batches[0]: (1 << count) - 1}, 0  # a whole batch: the usual case, the short way
    found: dict[int, int] = {}
    odd = 0
    for batch, row in zip(batches, rows, strict=True):
        before = found.get(batch, 0)
        if batch < 0:
            continue
        if 0 <= row < MOST_ROWS and not before >> row & 1:
            found[batch] = before | 1 << row
        else:
            odd += 1
    return found, odd


def whole_receipts(batch: int, size: int) -> Integers:
    """The receipts of all rows of a batch: int64 (size, 2)."""
    found = _numbered(size).copy()
    found[:, 0] = batch
    return found


@lru_cache
def _numbered(size: int) -> Integers:
    return np.stack([np.zeros(size, np.int64), np.arange(size)], axis=1)
