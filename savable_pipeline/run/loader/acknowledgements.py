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
from collections.abc import Iterable
from threading import Condition, Lock
from typing import Any, Literal, NamedTuple, TypeAlias

from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.messages import MadeOf
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.receipts import Handed, NextReceipts, rows_of
from savable_pipeline.run.state.flights import SLOTS, Flight, flights_name, packed_acks, packed_flights

Acknowledgement: TypeAlias = Literal["done", "dropped", "again"]
Noted: TypeAlias = dict[tuple[Acknowledgement, str], dict[int, int]]  # rows of batches, by what and why
_CANNOT_BE_MADE = "can no longer be made"


class InFlight(NamedTuple):
    """How many rows are given and not acknowledged, and the receipt (slot, row) of the oldest; None without any."""

    rows: int
    oldest: tuple[int, int] | None


class Outstanding(Flight, gc=False):
    """A batch in flight here: those of its rows that are given and not acknowledged, and those to come again.

    `number`: how many batches the rank was given before it; -1 if it was loaded. A filler has no rows. `handed`: the
    receipts of all its rows.
    """

    number: int = -1
    out: int = 0
    to_come: int = 0
    handed: Handed | None = None


class Acknowledgements:
    """The table of a rank. `noting`: whether `noted` keeps what was acknowledged, for a ledger."""

    def __init__(self, ranks: Ranks, lanes: int, *, noting: bool) -> None:
        self._ranks, self._lanes, self._noting = ranks, lanes, noting
        self._lock = Lock()
        self._freed = Condition(self._lock)
        self._is_awaited = False
        self._counts: Counter[tuple[str, str]] = Counter()  # of rows: what became of them, and why
        self._noted: Noted = {}
        self._receipts = NextReceipts(ranks.world_size)
        self.load([], 0)

    def load(self, flights: Iterable[Flight], coming: int) -> None:
        """Begin with these batches, which come first; fillers follow until there are `coming`."""
        loaded = [Outstanding(each.batch, each.ref, each.rows, each.done, to_come=each.open) for each in flights]
        with self._lock:
            own = self._ranks.lanes(self._lanes)
            self._flights: dict[int, dict[int, Outstanding]] = {lane: {} for lane in own}
            self._packed: dict[int, tuple[int, bytes]] = {}  # of lanes unchanged since, and their newest `number`
            self._handed: dict[int, Outstanding] = {}  # by the id of their receipts
            for flight in loaded:
                self._changing(flight.batch)[flight.batch] = flight
            self._out: int | None = None  # rows given and not acknowledged; None: to be counted
            self.waiting = deque(loaded)  # to come again, in this order; other threads add to it
            self._elsewhere: dict[int, int] = {}  # rows of other ranks' batches that were acknowledged here
            self._last: tuple[int, Outstanding, int] | None = None  # given, as which, with these rows
        self.fill_up(coming)

    def _changing(self, batch: int) -> dict[int, Outstanding]:
        """The batches of this one's lane, of which one will change."""
        lane = (batch & SLOTS) % self._lanes
        self._packed.pop(lane, None)
        return self._flights[lane]

    def fill_up(self, coming: int) -> None:
        """Let fillers follow until `coming` batches come again."""
        self.waiting += [Outstanding(-1, (), 0) for _ in range(coming - len(self.waiting))]

    # Giving.

    def settle(self, batches: int) -> None:
        """Take the last batch back unless it is among the `batches` that the rank was given: that was broken off."""
        if self._last is None or self._last[0] < batches:
            return
        number, flight, rows = self._last
        with self._lock:
            self._last = self._out = None
            if flight.number == number:
                self._close(flight, flight.open)
                return
            flight.out &= ~rows
            flight.to_come |= rows
            if not self.waiting or self.waiting[0] is not flight:
                self.waiting.appendleft(flight)

    def wait(self, rows: int, most: int, timeout_s: float) -> None:
        """Wait until this many rows more are at most `most`. Raises `SavableError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_awaited = True
            while (out := self._rows_out()) and out + rows > most:
                left = deadline - time.monotonic()
                if left <= 0 or not self._freed.wait(left):
                    raise SavableError(
                        f"{out} rows are in flight, and the {rows} of the next batch would make that more than "
                        f"max_in_flight={most}: too few were acknowledged here in {timeout_s:g} s. What another rank "
                        "has acknowledged is known at the next global_state_dict() only"
                    )

    def give(self, number: int, batch: int, made_of: MadeOf, size: int) -> Handed:
        """Note that a new batch of `size` rows is given, after `number` others. Returns its receipts."""
        rows = (1 << made_of.rows) - 1
        handed = self._receipts.take(batch, size) if size == made_of.rows else Handed.of(batch, size, rows)
        flight = Outstanding(batch, made_of.ref, made_of.rows, 0, number, rows)
        with self._lock:
            self._last = number, flight, rows  # first: whatever is broken off, it is taken back
            out, self._out = self._rows_out(), None
            if rows:
                self._changing(batch)[batch] = flight
            if size == made_of.rows:
                flight.handed = handed
                self._handed[id(handed.tensor)] = flight
            self._out = out + made_of.rows
        return handed

    def give_again(self, number: int, lost: Iterable[int]) -> int:
        """Note that the first of the waiting batches is given, without its `lost` rows. Returns its rows that come."""
        with self._lock:
            flight = self.waiting[0]
            out, self._out = self._rows_out(), None
            if gone := sum(1 << row for row in lost) & flight.open:
                self._close(flight, gone)
                self._note(flight.batch, gone, "dropped", _CANNOT_BE_MADE)
            rows = flight.to_come & flight.open
            self._last = number, flight, rows
            flight.out |= rows
            flight.to_come = 0
            self.waiting.popleft()
            self._counts["given_again", ""] += rows.bit_count()
            self._out = out + rows.bit_count()
        return rows

    def _rows_out(self) -> int:
        """How many rows are given and not acknowledged. Whoever changes that has it counted anew, if broken off."""
        if self._out is None:
            self._out = sum(flight.out.bit_count() for of_lane in self._flights.values() for flight in of_lane.values())
        return self._out

    # Acknowledging.

    def acknowledge(self, receipts: Any, kind: Acknowledgement, reason: str = "") -> None:
        """Note what became of the rows with these receipts. Raises ValueError for anything but receipts."""
        given, odd = self._handed.get(id(receipts)), 0
        if given is not None and given.handed is not None and given.handed.is_unchanged:
            found = {given.batch: (1 << given.rows) - 1}
        else:
            found, odd = rows_of(receipts)
        with self._lock:
            out, self._out = self._rows_out(), None
            for batch, rows in found.items():
                known, were_out = self._taken(batch, rows, kind)
                out -= were_out.bit_count()
                odd += (rows ^ known).bit_count()
                if known:
                    self._note(batch, known, kind, reason)
            self._out = out
            if odd:
                self._counts["unknown", ""] += odd
            if self._is_awaited:
                self._freed.notify_all()

    def _taken(self, batch: int, rows: int, kind: Acknowledgement) -> tuple[int, int]:
        """Those of a batch's rows that can be acknowledged so, which they are; of these, those that were out."""
        of_lane = self._flights.get((batch & SLOTS) % self._lanes)
        if of_lane is None:
            known = 0 if kind == "again" else rows & ~self._elsewhere.get(batch, 0)
            if known:
                self._elsewhere[batch] = self._elsewhere.get(batch, 0) | known
            return known, 0
        flight = of_lane.get(batch)
        if flight is None:
            return 0, 0
        were_out = rows & flight.out
        if kind != "again":
            known = rows & flight.open
            self._close(flight, known)
            return known, were_out
        flight.out ^= were_out
        if were_out and not flight.to_come:
            self.waiting.append(flight)
        flight.to_come |= were_out
        return were_out, were_out

    def _close(self, flight: Outstanding, rows: int) -> None:
        """Let go of these open rows, and of the batch if they are the last."""
        flight.done |= rows
        flight.out &= ~rows
        of_lane = self._changing(flight.batch)
        if flight.done + 1 == 1 << flight.rows:
            of_lane.pop(flight.batch, None)
            if flight.handed is not None:
                self._handed.pop(id(flight.handed.tensor), None)

    def _note(self, batch: int, rows: int, kind: Acknowledgement, reason: str) -> None:
        self._counts[kind, reason] += rows.bit_count()
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
            out = [f for of_lane in self._flights.values() for f in of_lane.values() if f.out]
            oldest = min(out, key=_batch_of, default=None)
            first = None if oldest is None else (oldest.batch, (oldest.out & -oldest.out).bit_length() - 1)
            return InFlight(self._rows_out(), first)

    def numbers(self) -> dict[str, int]:
        """Counters of rows, and how many are in flight; none before the first batch."""
        with self._lock:
            named = {"/".join(filter(None, ("acknowledged", *name))): rows for name, rows in self._counts.items()}
            return named | {"in_flight": self._rows_out()}

    def state(self, batches: int, place: int) -> dict[str, bytes]:
        """The entries of a state dict after `batches` were given, where the next slot, with its epoch, is `place`."""
        with self._lock:
            found = {flights_name(lane): self._packed_lane(lane, batches) for lane in self._flights}
            acks = {batch: rows for batch, rows in self._elsewhere.items() if batch < place}
        return found | packed_acks(self._ranks.rank, acks)

    def _packed_lane(self, lane: int, batches: int) -> bytes:
        newest, packed = self._packed.get(lane, (batches, b""))
        if newest < batches:
            return packed
        flights = list(self._flights[lane].values())
        if not flights or flights[-1].number < batches:
            packed = packed_flights(lane, flights, self._lanes)
            self._packed[lane] = flights[-1].number if flights else -1, packed
            return packed
        given = [flight for flight in flights if flight.number < batches]  # without later ones
        return packed_flights(lane, given, self._lanes)

    def agree(self, own: dict[int, list[Flight]], merged: dict[int, list[Flight]], acks: dict[int, int]) -> None:
        """Let go of rows that other ranks have acknowledged, and of acknowledgements that their ranks know now.

        `own` are the batches and `acks` the acknowledgements that this rank put into the state of all, `merged` those
        that are left in it.
        """
        left = {flight.batch: flight.open for of_lane in merged.values() for flight in of_lane}
        with self._lock:
            for flight in (flight for of_lane in own.values() for flight in of_lane):
                here = self._changing(flight.batch).get(flight.batch)
                if here is not None:
                    self._close(here, here.open & flight.open & ~left.get(flight.batch, 0))
            self._out = None
            for batch, rows in acks.items():
                if not self._elsewhere[batch] & ~rows:
                    del self._elsewhere[batch]
                else:
                    self._elsewhere[batch] &= ~rows
            if self._is_awaited:
                self._freed.notify_all()


def _batch_of(flight: Flight) -> int:
    return flight.batch
