"""`LaneState` as typed, versioned and checksummed bytes, and errors of damage.

    "SAVL" │ STATE u16 │ ORDER u16 │ xxh3_64 of the rest u64 │ MessagePack of a `LaneState`

A loader's state is a flat dict of them, which `torch.load(weights_only=True)` reads and torch.distributed.checkpoint
reshards:

    "order" │ "state" │ "lanes" │ "epoch" │ "slot" │ "fingerprint" bytes │ "facts" bytes │ "lane_00000" bytes │ …

`slot` is the first slot whose batch no rank has received yet; "order" and "state" are the numbers of state_numbers.py,
"facts" a `RunFacts`.

A checksum detects damage, but not a state that was written wrongly. Any line that reads such a state may fail, in the
library or in `restore_state` of a user's stage. These errors become a `StateError` in one place, `restoring`.
`has_too_many` detects a state that would take gigabytes of memory before it is decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.core.state_numbers import ORDER, STATE, EpochNumber, SavedCount, check_numbers
from savable_pipeline.errors import EncodeError, SavableError, StateError

_MAGIC = b"SAVL"
_NUMBERED = _MAGIC + STATE.to_bytes(2, "little") + ORDER.to_bytes(2, "little")
_HEAD = len(_NUMBERED) + 8  # bytes before the MessagePack
_MAX_DEPTH = 200  # most levels of nested lists and dicts; a stage takes one or two, a ref a few more
T = TypeVar("T", bound=msgspec.Struct)


class LaneState(msgspec.Struct):
    """State of a lane between two batches, after the first `batches` of `epoch`.

    `stages` is None before the first batch. `facts` is the digest of the `RunFacts` with which the lane continues.
    `dropped` is a `DroppedCounts`. It is absent if each source has yielded a sample, which is certain for the only
    source of a lane that has yielded a batch.
    """

    lane: SavedCount
    epoch: EpochNumber
    batches: SavedCount = 0
    more: bool | None = None  # whether the lane has another batch, None if unknown
    stages: dict[str, Any] | None = None
    facts: SavedCount = 0
    dropped: dict[str, dict[str, SavedCount]] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="in_vain")


def pack_state(state: msgspec.Struct) -> bytes:
    """Return a struct as bytes with `STATE`, `ORDER` and a checksum.

    Raises TypeError for a value that MessagePack cannot hold, `StateError` for an integer beyond 64 bits.
    """
    try:
        body = msgspec.msgpack.encode(state)
    except OverflowError as error:
        raise StateError(
            f"a state has an integer beyond 64 bits: {error}. Save it as bytes in your stage, or use another copy "
            "of the checkpoint."
        ) from error
    return _NUMBERED + xxh3_64_intdigest(body).to_bytes(8, "little") + body


def fresh_lane(lane: int, epoch: int, facts: RunFacts) -> bytes:
    """Return the packed state of a lane before its first batch of an epoch.

        at slot 5 of a run with 8 lanes     lanes 0 1 2 3 4                  lanes 5 6 7
                                            started: their own states        fresh: the chunk sizes are in the facts
                                            have the chunk sizes (`cut`)     of the run

    Chunks are the units in which an epoch is divided among the lanes. If a run continues in mid-epoch with other
    settings, such as another batch size or `tail`, all lanes must use the old chunk sizes until the epoch ends.
    Otherwise a fresh lane would read samples of another lane.
    """
    return pack_state(LaneState(lane, epoch, facts=facts.digest))


def with_facts(raw: bytes, facts: RunFacts) -> bytes:
    """Return a lane's packed state with other facts.

    Whether the lane has another batch is unknown then.
    """
    return pack_state(replace(unpack_state(raw, LaneState, "lane"), facts=facts.digest, more=None))


def checksum(packed: Any) -> bytes:
    """Return the checksum in the result of `pack_state`, or b"" for other types."""
    return bytes(packed[len(_NUMBERED) : _HEAD]) if isinstance(packed, bytes | bytearray) else b""


def unpack_state(raw: Any, kind: type[T], name: str) -> T:
    """Return the struct of type `kind` in `raw`.

    Raises `StateError`, with `name`, if `raw` is damaged or has another `STATE` or `ORDER`.
    """
    if not isinstance(raw, bytes | bytearray):
        raise StateError(f"{name}: a state must be bytes, not {type(raw).__name__}")
    if raw[:4] != _MAGIC or len(raw) < _HEAD:
        raise damaged(f"{name}: no state of savable_pipeline, or truncated ({len(raw)} bytes)")
    if raw[: len(_NUMBERED)] != _NUMBERED:
        number = int.from_bytes(raw[4:6], "little")
        check_numbers(name, int.from_bytes(raw[6:8], "little") if number > 1 else None, number)
    body = raw[_HEAD:]
    if xxh3_64_intdigest(body) != int.from_bytes(raw[len(_NUMBERED) : _HEAD], "little"):
        raise damaged(f"{name}: damaged, the checksum does not match")
    return decoded(bytes(body), kind, name)


def decoded(body: bytes, kind: type[T], name: str) -> T:
    """Decode the struct `kind` from MessagePack whose checksum matched.

    Raises `StateError` for other content, because a forged state may have a valid checksum.
    """
    try:
        state = msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(f"{name}: {error}") from error
    _check_depth(state, name)
    return state


def _check_depth(state: msgspec.Struct, name: str) -> None:
    """Raise `StateError` for lists and dicts nested deeper than any saved state, which would raise a RecursionError."""
    level = [getattr(state, field) for field in state.__struct_fields__]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | dict)
        ]
        if not level:
            return
    raise damaged(f"{name}: lists nested deeper than {_MAX_DEPTH}")


DroppedCounts: TypeAlias = dict[str, dict[str, int]]
"""Numbers of samples that a lane dropped of a source, by "STAGE/TAG" and counter; {} once the source has yielded one:

    counters of a batch                  before                     after
    Encode/source/7/skipped/no txt  3    Encode/7: {}               Encode/7: {}                        has yielded
    Encode/source/9/skipped/no txt  5    Encode/9: {skipped/… : 4}  Encode/9: {"skipped/no txt": 9}     nothing yet
    Encode/source/9/items           1    Encode/9: {skipped/… : 9}  Encode/9: {}                        the first item

The state has it, so a resumed run also knows the sources that have yielded something.
"""

FIRST = "first"  # name of a counter, see `SourceCounter.counter`
# At most 30 reasons have a counter of their own, because a reason may contain a number.
_SKIPPED, _MAX_REASONS, _OTHERS = "skipped/", 30, "skipped/for other reasons"


class SourceCounter(NamedTuple):
    """Parsed name of a stage's counter for one source."""

    key: str
    """The key of the stage and the source in `DroppedCounts`: STAGE/TAG."""
    counter: str
    """"items", "tokens", "skipped_tokens", "first", or "skipped/REASON": see `SourceCounts`."""
    reason: str
    """The reason for dropping, or "" if the counter does not count drops."""

    @classmethod
    @lru_cache(maxsize=1024)  # each batch has the same few names
    def parse(cls, name: str) -> SourceCounter | None:
        """Parse a counter's name, STAGE/source/TAG/WHAT. None if it is not about a source."""
        stage, _, of_source = name.partition("/source/")
        tag, _, counter = of_source.partition("/")
        return cls(f"{stage}/{tag}", counter, counter.partition(_SKIPPED)[2]) if counter else None


def with_counts(before: DroppedCounts, counts: Mapping[str, int | float]) -> DroppedCounts:
    """Return `before` with the counters of a batch added.

    `counts` has the stages' counters by name.
    """
    parsed = [(own, int(n)) for name, n in counts.items() if n > 0 and (own := SourceCounter.parse(name))]
    after = before
    for own, number in parsed:
        if (own.reason or own.counter == FIRST) and (dropped := after.get(own.key)) != {}:
            dropped = dropped or {}
            counter = own.counter if own.counter in dropped or len(dropped) < _MAX_REASONS else _OTHERS
            after = {**after, own.key: {**dropped, counter: dropped.get(counter, 0) + number}}
    for own, _ in parsed:
        if own.counter == "items" and after.get(own.key) != {}:
            after = {**after, own.key: {}}
    return after


def reasons_of(dropped: Mapping[str, int]) -> Counter[str]:
    """Return the numbers in one entry of `DroppedCounts`, by reason."""
    return Counter({name.removeprefix(_SKIPPED): n for name, n in dropped.items() if name.startswith(_SKIPPED)})


def damaged(problem: str) -> StateError:
    """Return the error for a state that is not as it was saved."""
    return StateError(f"{problem}. Use another copy of the checkpoint.")


@contextmanager
def restoring(name: str) -> Iterator[None]:
    """Raise `StateError`, caused by the original error, if restoring `name` fails.

    `SavableError`, OSError and MemoryError are raised as they are, but not `EncodeError`: nothing is encoded when a
    state is restored, so its cause is a number in the state.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SavableError | OSError | MemoryError) and not isinstance(error, EncodeError):
            raise
        raise StateError(
            f"{name} cannot be restored ({type(error).__name__}: {error}). Use another copy of the checkpoint, or "
            "fix restore_state of your stage."
        ) from error


_FREE_OBJECTS = 1 << 20  # objects that are allowed whatever the size of a state: 75 MB of empty lists
_LOW_BYTES = bytes(range(128))  # integers without their own memory, ASCII text and small numbers


def has_too_many(packed: bytes, stored: int) -> bool:
    """Check whether a state has too many objects for the size of its file.

    The limit is a million, and one more for each of the `stored` bytes of the file. So only a large file can take much
    memory. Otherwise 131 kB of a compressed state could become gigabytes, because one byte can be an empty list of 72
    bytes. This decodes nothing. Each object starts with a byte, which is at least 128 unless the object is a small
    integer:

        93 a1 61 05 90    a list of three: "a", 5, []    3 bytes of at least 128
    """
    return len(packed.translate(None, _LOW_BYTES)) > _FREE_OBJECTS + stored
