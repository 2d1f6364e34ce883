"""Records of a ledger file, its layout, and the `LedgerWriter` that appends them.

    record    length u32 │ crc32 of the body u32 │ body: MessagePack of a `Record`

A file starts with a `Start` record, and records are only appended, one at a time. So a killed process loses no record
that it wrote. A record that a crash of the machine cut short is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.errors import SavableError
from savable_pipeline.stages.batch_samples import BatchSamples, Integers

log = logging.getLogger(__name__)

FORMAT = 2
_HEAD = 8  # bytes of length and checksum
_ONE_NUMBER = 8  # added to the first byte of a column, its width, if all numbers are equal and only one follows


class LedgerSource(msgspec.Struct, array_like=True, frozen=True):
    """Source of the run: its name in a `Blend`, the tag of its refs, and its address.

    `files`: the files that its reader was created with, as absolute paths. It is "" for a user's own store, and if a
    URL has a password. Other settings of the reader are in the fingerprint.
    """

    name: str
    tag: int
    address: str
    files: str | list[str] = ""


class Start(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """First record of a file: which rank started, and at which position.

    `number` comes from `next_number`. Ranks that can communicate have the same.
    """

    format: int
    number: int
    rank: int
    world_size: int
    lanes: int
    seed: int
    epoch: int
    slot: int  # first slot of the first step, or the first that was skipped before it
    sources: list[LedgerSource]
    fingerprint: bytes
    pad: bool = False  # whether the last batches are padded
    cores: int = 0  # CPU cores of the machine; 0: not recorded

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and slot."""
        return self.epoch, self.slot


class Batch(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Batch that the trainer got.

    Each column has one number per item, packed by `pack_column`.
    """

    epoch: int
    slot: int
    items: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]  # bounded, because a constant column is expanded to it
    indices: bytes
    epochs: bytes
    parts: bytes
    rows: bytes = b""
    cost: int = 0  # cost of its packs, as a `Balance` or `OnlinePacker(max_cost=)` counts it; 0: unknown
    again: bytes = b""  # the repeated rows of a repeated batch, as bits; empty for any other

    @classmethod
    def of(cls, epoch: int, slot: int, samples: BatchSamples, cost: int = 0) -> Batch:
        """Build the record of a batch of these samples."""
        items = len(samples.refs)
        if not items:
            return cls(epoch, slot, 0, b"", b"", b"", cost=cost)
        columns = np.ascontiguousarray(samples.refs.T)
        indices, epochs, parts = map(_packed, columns, columns.min(1).tolist(), columns.max(1).tolist())
        rows = b"" if samples.rows is None else pack_column(samples.rows)
        return cls(epoch, slot, items, indices, epochs, parts, rows, cost)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and slot."""
        return self.epoch, self.slot

    @property
    def repeated_rows(self) -> int:
        """Repeated rows of a repeated batch, as bits; 0 for any other."""
        return int.from_bytes(self.again, "little")

    @property
    def samples(self) -> BatchSamples:
        """Samples of the batch."""
        columns = [unpack_column(column, self.items) for column in (self.indices, self.epochs, self.parts)]
        rows = unpack_column(self.rows, self.items) if self.rows else None
        return BatchSamples(arrays=(np.stack(columns, axis=1), rows))


class LaneAt(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """State of a lane before its batch of this slot, to rebuild batches from it."""

    epoch: int
    slot: int
    lane: int
    state: bytes


class Numbers(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Result of `SavableLoader.stats()` before the batch of a slot, without rates.

    Counters start when the loader is created, which may be before the file starts. So only differences between records
    count. `at_ns`: the time, in ns since 1970. `names`: strings, such as the slowest shard so far.
    """

    epoch: int
    slot: int
    at_ns: int
    numbers: dict[str, float]
    names: dict[str, str] = {}


class Acknowledged(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Rows that were acknowledged since the last such record.

    `kind`: "done", "dropped" for a reason, or requested "again". `rows`: the rows as bits, by slot, with the epoch
    above it as in receipts.
    """

    kind: str
    reason: str
    rows: dict[int, bytes]


class Facts(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Facts that are the same for all lanes of the run, from the next record on."""

    facts: RunFacts


class Saved(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Record that a state was saved from which the run can resume at this slot.

    It is written with the next batch, so the run continued after saving.
    """

    epoch: int
    slot: int


Record: TypeAlias = Start | Batch | LaneAt | Numbers | Acknowledged | Facts | Saved
_decode = msgspec.msgpack.Decoder(Record).decode
_encode = msgspec.msgpack.Encoder().encode


def framed(record: Record) -> bytes:
    """Return a record as bytes, with its length and checksum."""
    body = _encode(record)
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, up to the first incomplete one.

    A crash of the machine may leave an incomplete record. Raises `SavableError` if the file cannot be read or does not
    start as a ledger.
    """
    try:
        with path.open("rb") as file:
            is_first = True
            while head := file.read(_HEAD):
                body = file.read(int.from_bytes(head[:4], "little"))
                if len(head) < _HEAD or zlib.crc32(body) != int.from_bytes(head[4:], "little"):
                    break
                record = _decode(body)
                if is_first and (not isinstance(record, Start) or record.format != FORMAT):
                    break
                is_first = False
                yield record
            else:
                return
    except (OSError, msgspec.MsgspecError) as error:
        raise SavableError(f"{path}: damaged ledger ({error}). Use another copy of the file.") from error
    if is_first:
        fix = "Remove it, or read it with the version that wrote it."
        raise SavableError(f"{path}: not a ledger of this version. {fix}")
    log.warning("%s: the last record is incomplete. All records before it were read.", path)


def pack_column(numbers: Integers) -> bytes:
    """Pack integers of at least 0 in 1, 2, 4 or 8 bytes each.

    If all are equal, the number is packed only once. There must be at least one.
    """
    return _packed(numbers, int(numbers.min()), int(numbers.max()))


def _packed(numbers: Integers, least: int, most: int) -> bytes:
    """Pack integers with this minimum and maximum.

    The first byte is the number of bytes of each integer. All integers follow. If they are equal, only one follows,
    and the first byte is larger by `_ONE_NUMBER`.
    """
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    if least == most:
        return bytes([_ONE_NUMBER + width]) + most.to_bytes(width, "little")
    return bytes([width]) + numbers.astype(f"<u{width}").tobytes()


def unpack_column(packed: bytes, count: int) -> Integers:
    """Return the `count` integers of a packed column: int64 (count,).

    An empty column has none. Raises `SavableError` if the column has more or fewer than `count`.
    """
    first_byte = packed[0] if packed else 1
    has_one_number = first_byte > _ONE_NUMBER
    width = first_byte - _ONE_NUMBER if has_one_number else first_byte
    if width not in (1, 2, 4, 8) or max(0, len(packed) - 1) != (width if has_one_number else width * count):
        problem = "the ledger is damaged: a column and its batch differ in length"
        raise SavableError(f"{problem}. Use another copy of the file.")
    numbers = np.frombuffer(packed, f"<u{width}", offset=1).astype(np.int64) if packed else np.empty(0, np.int64)
    return np.repeat(numbers, count) if has_one_number else numbers


SUFFIX = ".ledger"
STATE_EVERY = 1000  # batches of a lane between two of its states in the ledger


class LedgerWriter:
    """Writer of a new file in `folder`, for one rank and one start.

    Raises `SavableError` if the file cannot be created, or if the folder has the ledger of another run.
    """

    def __init__(self, folder: Path, start: Start) -> None:
        self._path = folder / f"{start.number:020d}-rank-{start.rank:05d}{SUFFIX}"
        self._batches_since_state: dict[int, int] = {}  # by lane
        self._fd = -1  # -1 while the file is closed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _reject_other_runs(folder, start)
            self._fd = self._open(os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise self._write_error(error) from error
        try:
            self.write(start)
        except BaseException:
            self.discard()
            raise

    def _open(self, extra_flags: int = 0) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | extra_flags, 0o666)

    def append(self, epoch: int, slot: int, lane: int, before: bytes, samples: BatchSamples, cost: int = 0) -> None:
        """Write the record of a slot's batch.

        `before` is the state of its lane before the batch, `cost` the cost of its packs. Raises `SavableError` if
        writing fails, as on a full disk.
        """
        batches_since_state = self._batches_since_state.get(lane, STATE_EVERY)
        if batches_since_state >= STATE_EVERY:
            self.write(LaneAt(epoch, slot, lane, before))
            batches_since_state = 0
        self.write(Batch.of(epoch, slot, samples, cost))
        self._batches_since_state[lane] = batches_since_state + 1

    def forget_lanes(self) -> None:
        """Write the state of each lane again before its next batch."""
        self._batches_since_state.clear()

    def write(self, record: Record) -> None:
        """Write a record. Raises `SavableError` if that fails."""
        data = framed(record)
        try:
            if self._fd < 0:
                self._fd = self._open()
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> SavableError:
        fix = "Free space or set another ledger=. The batch was not returned."
        return SavableError(f"ledger {self._path}: {error.strerror}. {fix}")

    def close(self) -> None:
        """Close the file. The next write opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self) -> None:
        """Close and remove the file.

        Its records do not count, because another rank failed to start.
        """
        self.close()
        self._path.unlink(missing_ok=True)


def next_number(folder: Path) -> int:
    """Return the number of a new start: the time in ns since 1970, or more.

    It is larger than the number of any start in the folder. So numbers are in the order of the starts, even if the
    clocks of their machines differ. An unreadable folder counts as empty.
    """
    numbers = [time.time_ns()]
    with contextlib.suppress(OSError):
        names = [path.name.partition("-rank-") for path in folder.glob(f"*{SUFFIX}")]
        numbers += [int(number) + 1 for number, is_start, _ in names if is_start and number.isdecimal()]
    return max(numbers)


def _reject_other_runs(folder: Path, start: Start) -> None:
    """Raise `SavableError` if the oldest file in a folder is of another run.

    A damaged file is ignored, because `LedgerFiles` reports it.
    """
    oldest = min(folder.glob(f"*{SUFFIX}"), default=None)
    found = None
    with contextlib.suppress(SavableError):
        found = None if oldest is None else next(read_records(oldest), None)
    if isinstance(found, Start) and (found.seed, found.lanes) != (start.seed, start.lanes):
        raise SavableError(
            f"{folder} has the ledger of seed={found.seed} and lanes={found.lanes}, not {start.seed} and "
            f"{start.lanes}. Use another folder."
        )
