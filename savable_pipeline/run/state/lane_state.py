"""The state of a lane as typed, versioned and checksummed bytes.

    "SAVL" │ STATE u16 │ ORDER u16 │ xxh3_64 of the rest u64 │ MessagePack of a `LaneState`

A loader's state is a flat dict of them, which `torch.load(weights_only=True)` reads and torch.distributed.checkpoint
reshards:

    "order" │ "state" │ "lanes" │ "epoch" │ "slot" │ "fingerprint" bytes │ "facts" bytes │ "lane_00000" bytes │ …

`slot` is the first slot whose batch no rank has received yet; "order" and "state" are the numbers of state_numbers.py,
"facts" a `RunFacts`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.state_numbers import ORDER, STATE, EpochNumber, SavedCount, check_numbers
from savable_pipeline.errors import StateError

_MAGIC = b"SAVL"
_NUMBERED = _MAGIC + STATE.to_bytes(2, "little") + ORDER.to_bytes(2, "little")
_HEAD = len(_NUMBERED) + 8
_DEEPEST = 200  # a stage is a level or two, a ref a few more
T = TypeVar("T", bound=msgspec.Struct)


class LaneState(msgspec.Struct):
    """A lane between two batches: `batches` given in pass `epoch`; `stages` is None before the first batch.

    `facts`: the digest of the `RunFacts` with which it was made. `in_vain`: in_vain.py, absent where all is known to
    have given something, as the one source of a lane with batches.
    """

    lane: SavedCount
    epoch: EpochNumber
    batches: SavedCount = 0
    more: bool | None = None  # whether another batch will come; None if not known yet
    stages: dict[str, Any] | None = None
    facts: SavedCount = 0
    in_vain: dict[str, dict[str, SavedCount]] | msgspec.UnsetType = msgspec.UNSET


def pack_state(state: msgspec.Struct) -> bytes:
    """A struct as numbered, checksummed bytes.

    Raises TypeError for a value that MessagePack cannot hold, `StateError` for an integer beyond 64 bits.
    """
    try:
        body = msgspec.msgpack.encode(state)
    except OverflowError as error:
        raise StateError(
            f"a state has an integer beyond 64 bits: {error}; a stage saves it as bytes. If it came with a loaded "
            "state, use another copy of the checkpoint"
        ) from error
    return _NUMBERED + xxh3_64_intdigest(body).to_bytes(8, "little") + body


def checksum(packed: Any) -> bytes:
    """The checksum in what `pack_state` returned; of anything else, no such one."""
    return bytes(packed[len(_NUMBERED) : _HEAD]) if isinstance(packed, bytes | bytearray) else b""


def unpack_state(raw: Any, kind: type[T], name: str) -> T:
    """The struct `kind` in `raw`. Raises `StateError`, with `name`, if `raw` is damaged or has other numbers."""
    if not isinstance(raw, bytes | bytearray):
        raise StateError(f"{name}: a state is bytes, not {type(raw).__name__}")
    if raw[:4] != _MAGIC or len(raw) < _HEAD:
        raise StateError(f"{name}: not a state of savable_pipeline, or cut short ({len(raw)} bytes)")
    if raw[: len(_NUMBERED)] != _NUMBERED:
        number = int.from_bytes(raw[4:6], "little")
        check_numbers(name, int.from_bytes(raw[6:8], "little") if number > 1 else None, number)
    body = raw[_HEAD:]
    if xxh3_64_intdigest(body) != int.from_bytes(raw[len(_NUMBERED) : _HEAD], "little"):
        raise StateError(f"{name}: damaged: the checksum does not match; use another copy of the checkpoint")
    return decoded(bytes(body), kind, name)


def decoded(body: bytes, kind: type[T], name: str) -> T:
    """The struct `kind` in MessagePack that has its checksum and may be forged all the same. Raises `StateError`."""
    try:
        found = msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"{name}: {error}; use another copy of the checkpoint") from error
    _check_depth(found, name)
    return found


def _check_depth(state: msgspec.Struct, name: str) -> None:
    """Raise `StateError` for lists and dicts nested so deep that they were forged, and would raise RecursionErrors."""
    level = [getattr(state, field) for field in state.__struct_fields__]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | dict)
        ]
        if not level:
            return
    raise StateError(f"{name}: lists within each other, deeper than {_DEEPEST}; use another copy of the checkpoint")
