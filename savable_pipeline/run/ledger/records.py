"""The records of a ledger file, its layout, and the `LedgerWriter` that appends them.

    record    length u32 │ crc32 of the body u32 │ body: MessagePack of a `Start`, `Batch`, `LaneAt` or `Numbers`

A file begins with its `Start` and is only appended to, a record at a time: a process that is killed loses no record
that it wrote. A record cut short by a crash of the machine is ignored.
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
_CONSTANT = 8  # in place of the bytes of a number: all numbers are equal


class LedgerSource(msgspec.Struct, array_like=True, frozen=True):
    """A source of the run: its name in a `Blend`, the tag of its refs, and the place of its samples.

    `files`: the arguments of its reader, as absolute paths; empty for a user's own store, and where they contain
    a password. Its other settings are in the fingerprint.
    """

    name: str
    tag: int
    address: str
    files: str | list[str] = ""


class Start(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The first record: which rank began, and where. `number`, of `next_number`, is that of all ranks, or its own."""

    format: int
    number: int
    rank: int
    world_size: int
    lanes: int
    seed: int
    epoch: int
    slot: int  # the first slot of the first step, or the first that was skipped before it
    sources: list[LedgerSource]
    fingerprint: bytes
    pad: bool = False  # whether batches are filled up
    cores: int = 0  # of the machine; 0: not recorded

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and slot."""
        return self.epoch, self.slot


class Batch(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A batch that was given; the columns are as `pack_column` packs them, one number for each item."""

    epoch: int
    slot: int
    items: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]  # a constant column is expanded to this many
    indices: bytes
    epochs: bytes
    parts: bytes
    rows: bytes = b""
    cost: int = 0  # of its packs, as a `Balance` or `OnlinePacker(max_cost=)` counts it; 0: not known
    again: bytes = b""  # of a batch given again, the rows that came again, as bits; in any other, nothing

    @classmethod
    def of(cls, epoch: int, slot: int, samples: BatchSamples, cost: int = 0) -> Batch:
        """The record of a batch made of these samples."""
        items = len(samples.refs)
        if not items:
            return cls(epoch, slot, 0, b"", b"", b"", cost=cost)
        columns = np.ascontiguousarray(samples.refs.T)
        indices, epochs, parts = map(_packed, columns, columns.min(1).tolist(), columns.max(1).tolist())
        rows = b"" if samples.rows is None else pack_column(samples.rows)
        return cls(epoch, slot, items, indices, epochs, parts, rows, cost)

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and slot."""
        return self.epoch, self.slot

    @property
    def came_again(self) -> int:
        """Of a batch given again, the rows that came again, as bits; 0 of any other."""
        return int.from_bytes(self.again, "little")

    @property
    def samples(self) -> BatchSamples:
        """The samples of the batch."""
        columns = [unpack_column(column, self.items) for column in (self.indices, self.epochs, self.parts)]
        return BatchSamples(np.stack(columns, axis=1), unpack_column(self.rows, self.items) if self.rows else None)


class LaneAt(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """A lane's state before its batch of a slot, from which its batches can be made again."""

    epoch: int
    slot: int
    lane: int
    state: bytes


class Numbers(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The result of `SavableLoader.stats()`, without rates, just before the batch of this slot was given.

    Counters run since the loader was made, which may be before the start of the file: only differences count. `at_ns`:
    the time, in ns since 1970. `names`: texts, such as the shard that was slowest so far.
    """

    epoch: int
    slot: int
    at_ns: int
    numbers: dict[str, float]
    names: dict[str, str] = {}


class Acknowledged(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Rows that were acknowledged since the last such record: "done", "dropped" for a reason, or asked for "again".

    `rows`: by slot, with the epoch above it as in receipts, the rows as bits.
    """

    kind: str
    reason: str
    rows: dict[int, bytes]


class Facts(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """What holds for all lanes of the run alike from the next record on; nothing before the first such record."""

    facts: RunFacts


class Saved(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """A state was saved that continues at this slot, and the run went on after it."""

    epoch: int
    slot: int


Record: TypeAlias = Start | Batch | LaneAt | Numbers | Acknowledged | Facts | Saved
_decode = msgspec.msgpack.Decoder(Record).decode
_encode = msgspec.msgpack.Encoder().encode


def framed(record: Record) -> bytes:
    """A record as bytes, with its length and checksum."""
    body = _encode(record)
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, up to the first that was not written whole, as by a machine that crashed.

    Raises `SavableError` if the file cannot be read or does not begin as a ledger.
    """
    try:
        with path.open("rb") as file:
            first = True
            while head := file.read(_HEAD):
                body = file.read(int.from_bytes(head[:4], "little"))
                if len(head) < _HEAD or zlib.crc32(body) != int.from_bytes(head[4:], "little"):
                    break
                record = _decode(body)
                if first and (not isinstance(record, Start) or record.format != FORMAT):
                    break
                first = False
                yield record
            else:
                return
    except (OSError, msgspec.MsgspecError) as error:
        raise SavableError(f"{path}: damaged ledger ({error}). Use another copy of the file.") from error
    if first:
        raise SavableError(
            f"{path}: not a ledger of this version. Remove it, or read it with the version that wrote it."
        )
    log.warning("%s: the last record is incomplete. All records before it were read.", path)


def pack_column(numbers: Integers) -> bytes:
    """Integers of 0 and more, at least one, in 1, 2, 4 or 8 bytes each, or once if they are all the same."""
    return _packed(numbers, int(numbers.min()), int(numbers.max()))


def _packed(numbers: Integers, least: int, most: int) -> bytes:
    size = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    if least == most:
        return bytes([_CONSTANT + size]) + most.to_bytes(size, "little")
    return bytes([size]) + numbers.astype(f"<u{size}").tobytes()


def unpack_column(packed: bytes, count: int) -> Integers:
    """The `count` integers in a packed column: int64 (count,). Raises `SavableError` if it holds another number."""
    kind = packed[0] if packed else 1
    size = kind - _CONSTANT if kind > _CONSTANT else kind
    wanted = size if kind > _CONSTANT else size * count
    if size not in (1, 2, 4, 8) or len(packed) - bool(packed) != wanted:
        raise SavableError(
            "the ledger is damaged: a column and its batch differ in length. Use another copy of the file."
        )
    found = np.frombuffer(packed, f"<u{size}", offset=1).astype(np.int64) if packed else np.empty(0, np.int64)
    return np.repeat(found, count) if kind > _CONSTANT else found


SUFFIX = ".ledger"
STATE_EVERY = 1000  # batches of a lane from one of its states in the ledger to the next


class LedgerWriter:
    """One rank's file of one start in the folder `folder`, which is made.

    Raises `SavableError` if it cannot be, or has the ledger of another run: that could not be read any more.
    """

    def __init__(self, folder: Path, start: Start) -> None:
        self._path = folder / f"{start.number:020d}-rank-{start.rank:05d}{SUFFIX}"
        self._since: dict[int, int] = {}  # batches of each lane since its last state
        self._fd = -1  # where it is closed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_other_runs(folder, start)
            self._fd = self._opened(os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._write(start)
        except BaseException:
            self.discard()
            raise

    def _opened(self, more: int = 0) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | more, 0o666)

    def given(self, epoch: int, slot: int, lane: int, before: bytes, samples: BatchSamples, cost: int = 0) -> None:
        """Write that the batch of this slot is given; `before` is the state of its lane before it, `cost` its packs'.

        Raises `SavableError` if that fails, as on a full disk.
        """
        since = self._since.get(lane, STATE_EVERY)
        if since >= STATE_EVERY:
            self._write(LaneAt(epoch, slot, lane, before))
            since = 0
        self._write(Batch.of(epoch, slot, samples, cost))
        self._since[lane] = since + 1

    def forget_lanes(self) -> None:
        """Write the state of each lane again with its next batch."""
        self._since.clear()

    def note(self, record: Numbers | Acknowledged | Batch | Facts | Saved) -> None:
        """Write counters, what was acknowledged or saved, facts, or a batch given again. Raises `SavableError`."""
        self._write(record)

    def _write(self, record: Record) -> None:
        data = framed(record)
        try:
            if self._fd < 0:
                self._fd = self._opened()
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> SavableError:
        return SavableError(
            f"ledger {self._path}: {error.strerror}. Free space or set another ledger=. The batch was not returned."
        )

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self) -> None:
        """Close the file and remove it: it has no record that counts."""
        self.close()
        self._path.unlink(missing_ok=True)


def next_number(folder: Path) -> int:
    """The number of a start that begins now: the time in ns, or more where a start in the folder has a later one.

    So starts are in their order though the clocks of their nodes differ. What cannot be listed has none.
    """
    numbers = [time.time_ns()]
    with contextlib.suppress(OSError):
        names = [path.name.partition("-rank-") for path in folder.glob(f"*{SUFFIX}")]
        numbers += [int(number) + 1 for number, is_start, _ in names if is_start and number.isdecimal()]
    return max(numbers)


def _refuse_other_runs(folder: Path, start: Start) -> None:
    """Raises `SavableError` if the oldest file is of another run; of one that is damaged its reader tells."""
    oldest = min(folder.glob(f"*{SUFFIX}"), default=None)
    found = None
    with contextlib.suppress(SavableError):
        found = None if oldest is None else next(read_records(oldest), None)
    if isinstance(found, Start) and (found.seed, found.lanes) != (start.seed, start.lanes):
        raise SavableError(
            f"{folder} has the ledger of seed={found.seed} and lanes={found.lanes}, not {start.seed} and "
            f"{start.lanes}. Use another folder."
        )
