"""`ShardFiles`: where the bytes of a store's shards lie. On a disk: `LocalFiles`; behind a URL: `CachedFiles`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

from savable_pipeline.core.open_files import keep_below, most_kept, register, with_handles
from savable_pipeline.shards.shard_list import Rows

OPEN_SHARDS = 256  # descriptors kept open by one dataset in one process

Where = TypeVar("Where")  # names a part of a sample
T = TypeVar("T")
Read: TypeAlias = Callable[[int, int, Where], T]  # of shard, row, and where in the sample


class ShardFiles(OrderedDict[int, int], ABC):
    """The open files of some shards: `files[shard]` is a descriptor, to be used at once.

    A shard that is not open is opened and checked. At most `OPEN_SHARDS` stay open, and all datasets of a process
    together keep no more than the system permits it (see `open_files`); the one that was opened first is closed first.
    (A plain dict look-up for an open shard: a method call would cost a tenth of a read.)
    """

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

    def __del__(self) -> None:
        for descriptor in self.values():
            os.close(descriptor)

    @property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`."""
        return 0

    @abstractmethod
    def open(self, shard: int) -> int:
        """A new descriptor of a shard that was checked. Raises `ShardError`, `RemoteError`, or OSError without one."""

    @abstractmethod
    def path(self, shard: int) -> Path:
        """The local file of a shard."""

    @abstractmethod
    def prefetch(self, indices: Rows) -> None:
        """Announces that these samples will be read."""

    def verify(self, slot: int) -> None:
        """Raises `ShardError` if a shard changed while the batch of this slot, to be given next, may have been read."""

    def request(self, rows: Rows) -> None:
        """Announces that these rows will be read next; a disk needs no word of it."""

    def peek(self, shard: int, row: int, place: tuple[int, int]) -> bytes | None:
        """The bytes (offset, size) of a sample too long to be downloaded for them; None: read them from the file."""
        return None

    def guard(self, read: Read[Where, T]) -> Read[Where, T]:
        """`read`, made to wait until the bytes of the row are in the file, and to repeat if they left it meanwhile."""
        return read
