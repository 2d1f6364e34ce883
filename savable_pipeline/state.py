"""The state of a lane as bytes: typed, versioned and checksummed; and the flat dict that holds one a lane.

    "SAVL" │ version u16 │ xxh3_64 of the rest u64 │ MessagePack of a `LaneState`

Around it is a dict that `torch.load(weights_only=True)` reads and torch.distributed.checkpoint reshards:

    "format" 1 │ "lanes" │ "epoch" │ "slot" │ "fingerprint" bytes │ "lane_00000" bytes │ "lane_00001" bytes │ …

`slot` is the first slot that no rank has been given. A lane that has not begun says so in a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from savable_pipeline.errors import CheckpointMismatchError, StateError

VERSION = 1
_MAGIC = b"SAVL"
_HEAD = len(_MAGIC) + 2 + 8
T = TypeVar("T", bound=msgspec.Struct)


class LaneState(msgspec.Struct):
    """A lane between two batches: `batches` given in pass `epoch`; `stages` is None for one that has not begun."""

    lane: int
    epoch: int
    batches: int = 0
    more: bool | None = None  # whether another batch will come, where that has been found out
    stages: dict[str, Any] | None = None


def pack_state(state: msgspec.Struct) -> bytes:
    """A struct as versioned, checksummed bytes. Raises TypeError for a value that is not plain."""
    body = msgspec.msgpack.encode(state)
    return _MAGIC + VERSION.to_bytes(2, "little") + xxh3_64_intdigest(body).to_bytes(8, "little") + body


def unpack_state(raw: bytes, kind: type[T], what: str) -> T:
    """The struct `kind` in `raw`. Raises `StateError` if it is damaged or of another version; `what` names it."""
    if not isinstance(raw, bytes | bytearray):
        raise StateError(f"{what}: a state is bytes, not {type(raw).__name__}")
    if raw[:4] != _MAGIC or len(raw) < _HEAD:
        raise StateError(f"{what}: not a state of savable_pipeline, or cut short ({len(raw)} bytes)")
    version = int.from_bytes(raw[4:6], "little")
    if version != VERSION:
        raise StateError(f"{what}: state version {version}; this release reads version {VERSION}")
    body = raw[_HEAD:]
    if xxh3_64_intdigest(body) != int.from_bytes(raw[6:_HEAD], "little"):
        raise StateError(f"{what}: damaged: the checksum does not match; use another copy of the checkpoint")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise StateError(f"{what}: {error}") from error


def lane_name(lane: int) -> str:
    """The key under which a lane's state lies in the flat dict."""
    return f"lane_{lane:05d}"


def lane_numbers(state: Mapping[str, Any]) -> list[int]:
    """The lanes that a flat dict holds."""
    return sorted(int(name[5:]) for name in state if name.startswith("lane_") and name[5:].isdigit())


def batches_before(slot: int, lane: int, lanes: int) -> int:
    """How many batches lane `lane` gave to the slots before `slot`."""
    return max(0, slot - lane + lanes - 1) // lanes


def check_flat(state: Mapping[str, Any]) -> None:
    """Raise `StateError` unless this is a flat dict of this version."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a dict, not {type(state).__name__}")
    missing = {"format", "lanes", "epoch", "slot", "fingerprint"} - state.keys()
    if missing:
        inside = [name for name, value in state.items() if isinstance(value, Mapping) and "fingerprint" in value]
        hint = f"; load what lies in it under {inside[0]!r}" if inside else ""
        raise StateError(
            f"this is no state of a SavableLoader: it holds {', '.join(map(repr, list(state)[:8])) or 'nothing'}, "
            f"but not {', '.join(sorted(missing))}{hint}"
        )
    if state["format"] != VERSION:
        raise StateError(f"state version {state['format']}; this release reads version {VERSION}")
    numbers = [name for name in ("lanes", "epoch", "slot") if type(state[name]) is not int or state[name] < 0]
    if numbers:
        raise StateError(f"the state's {numbers[0]} is {state[numbers[0]]!r}, not a count")
    if not state["lanes"]:
        raise StateError("the state is of a run with no lanes")


def read_lanes(state: Mapping[str, Any], wanted: Iterable[int]) -> dict[int, LaneState]:
    """The states of the lanes `wanted`, checked to be of the step that the flat dict says.

    Raises `CheckpointMismatchError` for a lane that is not there or of another step, `StateError` for a damaged one.
    """
    lanes, slot, epoch = state["lanes"], state["slot"], state["epoch"]
    read = {}
    for lane in wanted:
        name = lane_name(lane)
        if name not in state:
            raise CheckpointMismatchError(
                f"the state holds the lanes {_ranges(lane_numbers(state))} of {lanes}, but this rank needs lane "
                f"{lane}: save on every rank and join with merge_states, or save global_state_dict()"
            )
        found = unpack_state(state[name], LaneState, name)
        expected = batches_before(slot, lane, lanes)
        if found.lane != lane or found.epoch != epoch or found.batches != expected:
            raise CheckpointMismatchError(
                f"{name}: its batch {found.batches} of epoch {found.epoch} (lane {found.lane}), but slot {slot} of "
                f"epoch {epoch} needs batch {expected}: were the ranks' states saved at different steps?"
            )
        read[lane] = found
    return read


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state with all the lanes of several, saved by the ranks of one run after the same step.

    Raises `CheckpointMismatchError` if they are of different runs or steps.
    """
    merged: dict[str, Any] = {}
    for state in states:
        check_flat(state)
        for name in ("lanes", "epoch", "slot", "fingerprint"):
            if merged and state[name] != merged[name]:
                shown = "" if name == "fingerprint" else f": {state[name]} and {merged[name]}"
                raise CheckpointMismatchError(f"the states to merge differ in {name}{shown}; save all at one step")
        read_lanes(state, lane_numbers(state))
        merged.update(state)
    if not merged:
        raise ValueError("merge_states needs at least one state")
    return merged


def _ranges(numbers: list[int]) -> str:
    """Numbers as people write them: [0, 1, 2, 5] → "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in parts) or "none"
