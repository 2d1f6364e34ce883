"""`ShardFiles`: where the bytes of a store's shards lie. On a disk: `LocalFiles`; behind a URL: `CachedFiles`."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.open_files import keep_below, most_kept, register, with_handles
from savable_pipeline.data.shards.file_bytes import FileBytes, LocalBytes
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import ShardError

OPEN_SHARDS = 256  # descriptors kept open by one dataset in one process

Where = TypeVar("Where")  # names a part of a sample
T = TypeVar("T")
Locate: TypeAlias = Callable[[Rows, Rows], Rows]  # of shards, and places in them → rows of the index
Read: TypeAlias = Callable[[int, int, Where], T]  # of shard, row, and where in the sample


class MemberReader(Protocol):
    """Reads parts of samples by shard and row: as bytes, as uint8 (bytes,), and bytes (offset, size) of the shard."""

    def read(self, shard: int, row: int, extension: str, /) -> bytes: ...
    def array(self, shard: int, row: int, extension: str, /) -> NDArray[np.uint8]: ...
    def span(self, shard: int, row: int, place: tuple[int, int], /) -> bytes: ...


class ShardFiles(OrderedDict[int, int], ABC):
    """The open files of some shards: `files[shard]` is a descriptor, to be used at once.

    A shard that is not open is opened and checked. At most `OPEN_SHARDS` stay open, and all datasets of a process
    together keep no more than the system permits it (see `open_files`); the one that was opened first is closed first.
    (A plain dict look-up for an open shard: a method call would cost a tenth of a read.)
    """

    behind_url: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        register(self)

    def __missing__(self, shard: int) -> int:
        keep_below(most_kept() - 1)
        descriptor = with_handles(lambda: self.open(shard))
        self[shard] = descriptor
        while len(self) > OPEN_SHARDS:
            self.close_oldest()
        return descriptor

    def close_oldest(self) -> None:
        """Closes the shard that was opened first."""
        os.close(self.popitem(last=False)[1])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit `os` may be gone before
        for descriptor in self.values():
            close(descriptor)

    @property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`."""
        return 0

    def refs_ahead(self, mean_bytes: float) -> int:
        """The number of refs to announce ahead, of samples of this size."""
        return 0

    @abstractmethod
    def open(self, shard: int) -> int:
        """A new descriptor of a shard that was checked. Raises `ShardError`, `RemoteError`, or OSError without one."""

    @abstractmethod
    def path(self, shard: int) -> Path:
        """The local file of a shard."""

    def file(self, shard: int) -> FileBytes:
        """A file as formats read it, at once."""
        return LocalBytes(self.path(shard), self[shard])

    def prefetch(self, indices: Rows) -> None:
        """Announces that these samples will be read; nothing is done ahead for files on a disk."""

    def prefetch_bytes(self, shard: int, begins: Rows, ends: Rows) -> None:
        """Announces reads of these bytes of a file, each from one of `begins` up to one of `ends`."""

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of a shard from `offset` on. Raises `ShardError` if it cannot be read or is too short."""
        descriptor = self[shard]
        try:
            data = os.pread(descriptor, size, offset)
        except OSError as error:
            raise self.unreadable(shard, error) from error
        return data if len(data) == size else data + self.rest(shard, offset + len(data), size - len(data))

    def read_into(self, array: NDArray[np.uint8], shard: int, offset: int) -> None:
        """Fills `array`, uint8 (bytes,), with bytes of a shard. Raises the errors of `read`."""
        done = -1
        if hasattr(os, "preadv"):
            with contextlib.suppress(OSError):
                done = os.preadv(self[shard], [array], offset)  # type: ignore[list-item]
        if done != len(array):
            array[:] = np.frombuffer(ShardFiles.read(self, shard, offset, len(array)), np.uint8)

    def read_on(self, shard: int, offset: int, size: int, stop: int) -> bytes:
        """The same as `read`, of a file that may be read on, up to `stop`."""
        return self.read(shard, offset, size)

    def rest(self, shard: int, offset: int, missing: int) -> bytes:
        """What a read has left, `missing` bytes at `offset`: Linux gives 2 GB at most at once. Raises `ShardError`."""
        parts = []
        try:
            while missing and (more := os.pread(self[shard], missing, offset)):
                parts.append(more)
                offset, missing = offset + len(more), missing - len(more)
        except OSError as error:
            raise self.unreadable(shard, error) from error
        if missing:
            raise ShardError(
                f"{self.path(shard)}: {missing} bytes at byte {offset} are missing; the file was cut short: put the "
                "whole one back",
                reason="changed shard",
            )
        return b"".join(parts)

    def unreadable(self, shard: int, error: OSError) -> ShardError:
        """The error for a shard that cannot be read."""
        message = f"{self.path(shard)}: {error.strerror}; look after the disk or the network"
        return ShardError(message, reason="unreadable shard")

    def watch_view(self, number: int, path: Path) -> None:
        """Looks from now on also at a file that is mapped: a shard, or at the number `~shard` what lies beside one."""

    def verify(self, slot: int) -> None:
        """Raises `ShardError` if a shard changed while the batch of this slot, to be given next, may have been read."""

    def verify_given(self) -> None:
        """Raises `ShardError` if a shard changed while batches that were given since the last look were read."""

    def request(self, rows: Rows) -> None:
        """Announces that these rows will be read next; a disk needs no word of it."""

    def peek(self, shard: int, row: int, place: tuple[int, int]) -> bytes | None:
        """The bytes (offset, size) of a sample too long to be downloaded for them; None: read them from the file."""
        return None

    def fetch_rows(self, numbers: Rows) -> None:
        """Fetches what is not here of what the index says of the shards with these numbers in it."""

    def located(self, rows: Locate) -> Locate:
        """`rows`, made to wait until the index has the rows that it gives."""
        return rows

    def has_all_rows(self) -> bool:
        """Whether the index has the rows of all shards."""
        return True

    def long_parts(self, parts: MemberReader, place: Callable[[int, str], tuple[int, int]]) -> MemberReader:
        """What reads parts of samples too long to be downloaded whole; `parts` where there are none."""
        return parts

    def guard(self, read: Read[Where, T], long: Read[Where, T]) -> Read[Where, T]:
        """`read`, made to wait until the bytes of the row are in the file, and to repeat if they left it meanwhile.

        Of a row that is not there, and too long to be downloaded as a whole, `long` in its place.
        """
        return read
