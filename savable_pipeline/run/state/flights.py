"""Batches in flight in a state: yielded batches with rows not acknowledged yet.

    "acknowledge"    1 if saved with acknowledge=True, else 0
    "flight_00042"   of lane 42: for each epoch, the rounds of its batches, their refs and the rows that are done; and
                     the checksum of "lane_00042"
    "acks_00003"     rows of other ranks' batches that rank 3 has acknowledged, by batch

If "acknowledge" is 1, each lane has its flight entry, even without any batch. torch.distributed.checkpoint loads only
the keys that it is asked for, so a missing entry is an error, and no row is lost silently. By the checksum, an entry
that was saved with another state of the lane is an error, too.

A batch is identified by one number with its epoch and slot, and a set of its rows by the bits of a number:

    batch 3 << 40 | 96042    slot 96042 of epoch 3, round 1000 of lane 42 of 96        rows 0b101   rows 0 and 2

Merging states applies the acknowledgements, so the merged state has no "acks_" entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from savable_pipeline.core.state_numbers import EpochNumber, SavedCount
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.state.lane_state import checksum, pack_state, restoring, unpack_state
from savable_pipeline.stages.item_ref import ItemRef

EPOCH_SHIFT = 40  # a batch is identified by `epoch << EPOCH_SHIFT | slot`
SLOT_MASK = (1 << EPOCH_SHIFT) - 1  # the bits of the slot in a batch's number
MOST_ROWS = 1 << 20  # most rows of a batch
ACKNOWLEDGE = "acknowledge"
_FLIGHT, _ACKS = re.compile(r"flight_([0-9]{5,18})"), re.compile(r"acks_[0-9]{5,18}")


class Flight(msgspec.Struct, gc=False):
    """Batch in flight: its number, its ref, perhaps in MessagePack, and its rows.

    `rows` is the number of its rows, and `done` has the bits of those that are done. `size` is the number of rows with
    padding, or 0 without padding.
    """

    batch: int
    ref: ItemRef | msgspec.Raw
    rows: int
    done: int = 0
    size: int = 0

    @property
    def open_rows(self) -> int:
        """Return the bits of the rows that are not acknowledged."""
        return (1 << self.rows) - 1 & ~self.done

    def encode_ref(self) -> None:
        """Encode the ref as MessagePack.

        It then takes a tenth of the memory, and of the time to save a state.
        """
        if type(self.ref) is not msgspec.Raw:
            self.ref = msgspec.Raw(msgspec.msgpack.encode(self.ref))


class EpochFlights(msgspec.Struct, array_like=True):
    """A lane's batches in flight of one epoch, in columns."""

    epoch: EpochNumber
    rounds: list[SavedCount]
    refs: list[msgspec.Raw]
    done: list[bytes]  # little-endian; empty if no batch has a row that is done
    sizes: list[SavedCount] = []  # empty if batches are not padded


class _LaneFlights(msgspec.Struct):
    lane: SavedCount
    saved_with: bytes  # checksum of the lane's state
    epochs: list[EpochFlights]


class _Acknowledged(msgspec.Struct):
    rows: dict[SavedCount, bytes]


def flights_name(lane: int) -> str:
    """Return the key of a lane's batches in flight in the flat dict."""
    return f"flight_{lane:05d}"


def packed_flights(lane: int, columns: list[EpochFlights], saved_with: bytes) -> bytes:
    """Pack a lane's batches in flight, with the checksum of the lane's state."""
    return pack_state(_LaneFlights(lane, saved_with, columns))


def flight_columns(flights: Sequence[Flight], lanes: int) -> list[EpochFlights]:
    """Return a lane's batches in flight as columns, one for each epoch.

    `flights` is in ascending order.
    """
    columns: list[EpochFlights] = []
    while flights:
        epoch = flights[0].batch >> EPOCH_SHIFT
        first, end = epoch << EPOCH_SHIFT, (epoch + 1) << EPOCH_SHIFT
        of_epoch = flights if flights[-1].batch < end else [each for each in flights if each.batch < end]
        flights = flights[len(of_epoch) :]
        done = [each.done for each in of_epoch]
        rounds = [(each.batch - first) // lanes for each in of_epoch]
        refs: list[Any] = [each.ref for each in of_epoch]
        masks = [mask_bytes(mask) for mask in done] if any(done) else []
        sizes = [each.size for each in of_epoch]
        columns.append(EpochFlights(epoch, rounds, refs, masks, sizes if any(sizes) else []))
    return columns


def mask_bytes(mask: int) -> bytes:
    """Return the bits of rows as bytes, with the bit of the first row lowest."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def read_flights(state: Mapping[str, Any]) -> dict[int, list[Flight]]:
    """Return the batches in flight in a flat dict, by lane.

    Raises `StateError` for a batch that is damaged or not yielded yet. Raises `CheckpointMismatchError` for a lane
    without its entry, if the state was saved with `acknowledge`, and for an entry of another save.
    """
    found = {}
    next_batch_number = state["epoch"] << EPOCH_SHIFT | state["slot"]
    lanes = [name for name in state if name.startswith("lane_")] if state.get(ACKNOWLEDGE) else []
    if missing := [name for name in lanes if name.replace("lane", "flight") not in state]:
        raise CheckpointMismatchError(
            f"the state has {missing[0]}, but no {missing[0].replace('lane', 'flight')}. Load all entries of the "
            "checkpoint, or use another copy."
        )
    for name, raw in state.items():
        if number := _FLIGHT.fullmatch(name):
            with restoring(name):
                found[int(number[1])] = _read_lane(name, int(number[1]), raw, state, next_batch_number)
    return found


def _read_lane(name: str, lane: int, raw: bytes, state: Mapping[str, Any], next_batch_number: int) -> list[Flight]:
    """Return the batches in flight in the entry `name` of a lane. All must be before `next_batch_number`."""
    saved, lanes = unpack_state(raw, _LaneFlights, name), state["lanes"]
    if saved.saved_with != _lane_checksum(state, lane):
        raise CheckpointMismatchError(f"{name} was saved with another lane_{lane:05d}. Take both from one checkpoint.")
    flights: list[Flight] = []
    for each in saved.epochs:
        done, sizes = each.done or [b""] * len(each.refs), each.sizes or [0] * len(each.refs)
        for number, ref, mask, size in zip(each.rounds, each.refs, done, sizes, strict=True):
            batch = each.epoch << EPOCH_SHIFT | number * lanes + lane
            flight = Flight(batch, ref.copy(), _rows_of(ref), int.from_bytes(mask, "little"), size)
            before = flights[-1].batch if flights else -1
            is_yielded = before < batch < next_batch_number and number * lanes + lane <= SLOT_MASK
            is_filled = not size or flight.rows <= size <= MOST_ROWS
            if not is_yielded or flight.done >> flight.rows or not flight.open_rows or not is_filled:
                rows = f"{flight.rows} rows of {size}, done {flight.done:#x}"
                raise ValueError(f"round {number} of epoch {each.epoch} has {rows}")
            flights.append(flight)
    if saved.lane != lane or lane >= lanes:
        raise ValueError(f"{len(flights)} batches of lane {saved.lane}")
    return flights


def _lane_checksum(state: Mapping[str, Any], lane: int) -> bytes:
    """Return the checksum of a lane's state in a flat dict."""
    return checksum(state.get(f"lane_{lane:05d}"))


def _rows_of(ref: msgspec.Raw) -> int:
    """Return the number of rows in a batch's ref: (the batch's number, if it has one, and the ref of each row)."""
    parts = msgspec.msgpack.decode(ref)
    rows = parts[1:] if parts and type(parts[0]) is int else parts
    if not isinstance(parts, list) or not 0 < len(rows) <= MOST_ROWS or not all(map(_is_ref, rows)):
        raise ValueError("this is no ref of a batch")
    return len(rows)


def _is_ref(part: Any) -> bool:
    """Return whether this is a list, not empty, of integers or of such lists."""
    return type(part) is list and bool(part) and all(type(each) is int or _is_ref(each) for each in part)


def packed_acks(rank: int, rows: Mapping[int, int]) -> dict[str, bytes]:
    """Return the entry with the rows that a rank acknowledged for other ranks.

    The result is {} if there are none. `rows` has the bits of rows by batch.
    """
    return {f"acks_{rank:05d}": _packed_rows(rows)} if rows else {}


def _packed_rows(rows: Mapping[int, int]) -> bytes:
    return pack_state(_Acknowledged({batch: mask_bytes(mask) for batch, mask in rows.items()}))


def read_acks(state: Mapping[str, Any]) -> dict[int, int]:
    """Return the rows in all "acks_" entries of a flat dict, as bits by batch.

    Raises `StateError` for a damaged entry.
    """
    found: dict[int, int] = {}
    for name, raw in state.items():
        if _ACKS.fullmatch(name):
            for batch, rows in _read_rows(name, raw).items():
                found[batch] = found.get(batch, 0) | rows
    return found


def _read_rows(name: str, raw: bytes) -> dict[int, int]:
    """Return the bits of acknowledged rows in the entry `name`, by batch."""
    with restoring(name):
        saved = unpack_state(raw, _Acknowledged, name).rows
        return {batch: int.from_bytes(mask, "little") for batch, mask in saved.items()}


def without_flights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat dict without batches in flight.

    It is as if saved without acknowledge=True.
    """
    removed = {name for name in state if _FLIGHT.fullmatch(name) or _ACKS.fullmatch(name)}
    return {name: 0 if name == ACKNOWLEDGE else each for name, each in state.items() if name not in removed}


def reject_flights(state: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatchError` if a state has batches in flight.

    They would be lost.
    """
    number = sum(map(bool, read_flights(state).values()))
    if number:
        raise CheckpointMismatchError(
            f"the state has unacknowledged batches of {number} lanes. Load it into a SavableLoader with "
            "acknowledge=True."
        )


def with_acks_applied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a merged flat dict with all acknowledged rows marked as done.

    Acknowledgements of batches whose lanes are missing stay as entries.
    """
    acks = {name: raw for name, raw in state.items() if _ACKS.fullmatch(name)}
    if not acks:
        return state
    flights, lanes = read_flights(state), state["lanes"]
    merged = without_flights(state) | {ACKNOWLEDGE: state.get(ACKNOWLEDGE, 0)}
    by_batch = {flight.batch: flight for of_lane in flights.values() for flight in of_lane}
    for name, raw in acks.items():
        rows = _read_rows(name, raw)
        for batch in [batch for batch in rows if f"lane_{(batch & SLOT_MASK) % lanes:05d}" in state]:
            mask, flight = rows.pop(batch), by_batch.get(batch)
            if flight is not None:
                flight.done |= mask & flight.open_rows
        if rows:
            merged[name] = _packed_rows(rows)
    unacknowledged = {lane: [flight for flight in of_lane if flight.open_rows] for lane, of_lane in flights.items()}
    return merged | {
        flights_name(lane): packed_flights(lane, flight_columns(of_lane, lanes), _lane_checksum(state, lane))
        for lane, of_lane in unacknowledged.items()
    }
