"""`RecordStore`: the protocol of a store, which knows how samples lie; a `Dataset` counts and finds samples by it.

    entries      name, bytes, samples, digest of each shard     what is there, and what a saved state must agree on
    key          ┐
    extensions   ├ of (shard, row)                              one sample
    read         ┘

A store knows nothing of order, lanes or randomness. Its samples are numbered 0, 1, 2, … through all its shards; a shard
is one file of the store, a table, or whatever is replaced as a whole. The five names above are all that a store must
have; everything else below has a default, which a store replaces where it can do better.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry


class RecordStore(Protocol):
    """Samples that lie somewhere: derive from it to read a format of your own with `sp.RecordReader`.

    `address` is what messages call the store, a folder or a URL. `entries` lists its shards, sorted by name: the digest
    is any number that changes when the shard's content does, and a state is refused where it differs. `unit` says in
    which unit `offset` counts. `root` is the folder that may hold Megatron-Energon's metadata (`.nv-meta`).
    `key_column` names the column that keys are read from, if that is a setting of the store. `endings` are those of the
    shards' names that tell the format, such as ".tar": a `subset` is the same with any of them.

    A sample is named by its shard, a number, and its row in that shard. The same shard and row give the same bytes for
    ever. Methods raise `ShardError` for damaged data, with the place and what to do, and KeyError for a missing part.
    What cannot be used after a fork, such as a connection, is opened at the first read in the process that reads.

    >>> class Squares(sp.RecordStore):
    ...     address = "squares"
    ...     entries = [sp.ShardEntry("all", size=0, samples=100, digest=1)]
    ...     def key(self, shard, row):
    ...         return str(row)
    ...     def extensions(self, shard, row):
    ...         return ["txt"]
    ...     def read(self, shard, row, extension):
    ...         return str(row * row).encode()
    >>> samples = sp.RecordReader(Squares(), sp.Lane(), shuffle=False)
    >>> [next(samples).text() for _ in range(5)]
    ['0', '1', '4', '9', '16']
    """

    address: str
    entries: Sequence[ShardEntry]
    unit: str = "row"
    root: Path | None = None
    key_column: str | None = None
    endings: Sequence[str] = ()

    @abstractmethod
    def key(self, shard: int, row: int, /) -> str:
        """The key of a sample."""

    @abstractmethod
    def extensions(self, shard: int, row: int, /) -> list[str]:
        """The names of a sample's parts, in their order."""

    @abstractmethod
    def read(self, shard: int, row: int, extension: str, /) -> bytes:
        """The bytes of one part. Raises KeyError without the part. Called once per part: without a detour."""

    def array(self, shard: int, row: int, extension: str, /) -> NDArray[Any]:
        """One part as a writable array (any,) in the memory where batches are made: uint8, or numbers as they lie."""
        data = self.read(shard, row, extension)
        array = empty_bytes(len(data))
        array[:] = np.frombuffer(data, np.uint8)
        return array

    def head(self, shard: int, row: int, extension: str, limit: int, /) -> tuple[bytes, int]:
        """The first bytes of a part, at most `limit`, and the size of the part in bytes."""
        data = self.read(shard, row, extension)
        return data[:limit], len(data)

    def sizes(self, shard: int, row: int, /) -> dict[str, int]:
        """The size in bytes of each part of a sample, by extension."""
        return {extension: len(self.read(shard, row, extension)) for extension in self.extensions(shard, row)}

    def part_sizes(self) -> dict[str, Rows] | None:
        """The sizes in bytes of all parts with an extension, by extension; None where that means reading them all."""
        return None

    def left_out(self) -> str:
        """What to say of what the files hold and samples do not have; "" for nothing. Told when the store is opened."""
        return ""

    def offset(self, shard: int, row: int, /) -> int:
        """Where a sample begins in its shard, in `unit`."""
        return row

    def part_offset(self, shard: int, row: int, extension: str, /) -> int | None:
        """The byte of its shard that a part begins at; None where it is made of more than bytes of the shard."""
        return None

    decoded_bytes: int = 0

    def row_groups(self, shard: int, /) -> tuple[list[int], int] | None:
        """The rows of each group of a shard that is decoded as a whole, and the bytes of all; None without groups.

        With groups, `decoded_bytes` is how many bytes of them the store keeps.
        """
        return None

    def rows(self, shards: Rows, places: Rows, /) -> Rows:
        """The rows of the samples at these places, counted from 0 in each of these shards: int64 of the same shape."""
        return places

    @property
    def prefetch_refs(self) -> int:
        """The number of refs that `prefetch` should be given ahead of their use; 0: no more than the next ones."""
        return 0

    def prefetch(self, indices: Rows, /) -> None:
        """Announces that the samples with these numbers will be read. Returns at once, and raises nothing."""
        return

    def request(self, rows: Rows, /) -> None:
        """Announces that the samples in these rows will be read next. Returns at once."""
        return

    def verify(self, slot: int, /) -> None:
        """Raises `ShardError` if data changed that the batch of this slot, to be given next, may have been read from.

        Called for each batch: look at most once a second.
        """
        return

    def verify_given(self) -> None:
        """Raises `ShardError` if data changed that batches may have been read from which were given since a last look.

        Called where a run pauses or ends, and when it is saved, also from another thread: look at once.
        """
        return
