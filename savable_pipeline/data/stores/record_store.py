"""`RecordStore`: the protocol of a store, by which a `Dataset` finds samples.

    entries      name, bytes, samples, digest of each shard     what exists, and what must equal a saved state's
    key          ┐
    extensions   ├ of (shard, row)                              one sample
    read         ┘

A store knows nothing of order, lanes or randomness. Its samples are numbered 0, 1, 2, … through all its shards. A shard
is one file, a table, or anything that is replaced as a whole. A store must define the four names above and `address`.
All other names have defaults, which a store may override. `FileStore` is the base of stores that read files in place:
entries, checked files, messages.
"""

from __future__ import annotations

import contextlib
import io
from abc import abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index import FileBlob, IndexedFiles, ShardTable
from savable_pipeline.data.shards.part_types import is_part
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.data.stores.shard_files import LocalFiles, StoreFile
from savable_pipeline.errors import SavableError, ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.stores.cached_blocks import CachedBlocks


class StoreFacts(Protocol):
    """Facts about a store for commands. Most stores use the defaults.

    `keys_in_shards` says whether keys depend on the shards alone, and on no setting. `parts_in_rows` says whether the
    names of a sample's parts are only in its row, and not in the index. `found` is the opened index of files, which a
    store of your own lacks.
    """

    keys_in_shards: ClassVar[bool] = False
    parts_in_rows: ClassVar[bool] = False
    key_column: str | None = None
    decoded_bytes: int = 0
    found: IndexedFiles | None = None

    @property
    def fix(self) -> str:
        """What to do about rows that name files without their bytes."""
        return ""

    def part_sets(self) -> list[list[str]]:
        """Return the sets of parts that samples have, if the index has them."""
        return []

    def lacking(self, shard: int, row: int, /) -> tuple[list[str], set[str]]:
        """Return the null columns of a row, and those that name files without bytes."""
        return [], set()

    def rejects(self) -> list[Reject]:
        """Return the files that are no parts of samples."""
        return []

    def validate(self, shard: int, /) -> None:
        """Raise `ShardError` for a shard that has another hash than its index."""
        return

    def row_groups(self, shard: int, /) -> tuple[list[int], int] | None:
        """Return the number of rows of each group, and the bytes of all groups.

        A group of rows is decoded as a whole. The result is None for a shard without groups.

        Args:
            shard: The number of the shard.
        """
        return None

    def byte_ranges(self, shard: int, rows: Rows, /) -> tuple[Rows, Rows]:
        """Return the byte ranges of a file that reading these rows needs.

        The result is two arrays, starts and ends, int64 (any,) each. Both are empty if the ranges are unknown. Raises
        `ShardError`.
        """
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def next_readable(self, shard: int, row: int, reason: str, /) -> int:
        """Return the next row to read after one that raised an error with this reason."""
        return row + 1


class RecordStore(StoreFacts, Protocol):
    """Base of a store of your own, for `custom.RecordReader`.

    A sample is named by its shard, a number, and its row there; the same shard and row always return the same bytes.
    Methods raise `ShardError` for damaged data, which says where it is and what to do, and KeyError for a missing part.
    An object that cannot be used after a fork, such as a connection, is created at the first read of a process.

    Attributes:
        address: The store's name in messages: a folder or a URL.
        entries: The shards, sorted by name. A digest is any number that changes with the shard's content. A
            state whose digests differ is rejected.
        unit: The unit of `offset`.
        root: The folder that may hold Megatron-Energon's metadata (`.nv-meta`).
        key_column: The column that keys are read from, if that is a setting of the store.
        endings: Suffixes of the format, such as ".tar". A `subset` is the same with any of them.
        decoded_bytes: The most bytes of row groups that the store keeps decoded.

    Example:
        >>> class Squares(custom.RecordStore):
        ...     address = "squares"
        ...     entries = [custom.ShardEntry("all", size=0, samples=100, digest=1)]
        ...     def key(self, shard, row):
        ...         return str(row)
        ...     def extensions(self, shard, row):
        ...         return ["txt"]
        ...     def read(self, shard, row, extension):
        ...         return str(row * row).encode()
        >>> samples = custom.RecordReader(Squares(), sp.Lane(), shuffle=False)
        >>> [next(samples).text() for _ in range(5)]
        ['0', '1', '4', '9', '16']
    """

    address: str
    entries: Sequence[ShardEntry]
    unit: str = "row"
    root: Path | None = None
    endings: Sequence[str] = ()

    @abstractmethod
    def key(self, shard: int, row: int, /) -> str:
        """Return the key of a sample.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
        """

    @abstractmethod
    def extensions(self, shard: int, row: int, /) -> list[str]:
        """Return the names of a sample's parts, in their order.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
        """

    def has_part(self, shard: int, row: int, extension: str, /) -> bool:
        """Return whether `read` returns a part of this name.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
            extension: The name of the part, in letters of any case.
        """
        return is_part(extension, self.extensions(shard, row))

    @abstractmethod
    def read(self, shard: int, row: int, extension: str, /) -> bytes:
        """Return the bytes of one part.

        It is called once for each part, so avoid wrappers.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
            extension: The name of the part.

        Raises:
            KeyError: The sample has no such part.
        """

    def array(self, shard: int, row: int, extension: str, /) -> NDArray[Any]:
        """Return one part as a writable array (any,): uint8, or numbers as stored.

        In a worker, its memory is that of the next batch if there is room.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
            extension: The name of the part.
        """
        data = self.read(shard, row, extension)
        array = empty_bytes(len(data))
        array[:] = np.frombuffer(data, np.uint8)
        return array

    def open(self, shard: int, row: int, extension: str, /) -> BinaryIO:
        """Return one part as a seekable file, to read only some of a large part.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
            extension: The name of the part.
        """
        return io.BytesIO(self.read(shard, row, extension))

    def head(self, shard: int, row: int, extension: str, limit: int, /) -> tuple[bytes, int]:
        """Return the first bytes of a part, and the size of the part in bytes.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
            extension: The name of the part.
            limit: The most bytes to return.
        """
        data = self.read(shard, row, extension)
        return data[:limit], len(data)

    def sizes(self, shard: int, row: int, /) -> dict[str, int]:
        """Return the size in bytes of each part of a sample, by extension.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
        """
        return {extension: len(self.read(shard, row, extension)) for extension in self.extensions(shard, row)}

    def part_sizes(self) -> dict[str, Rows] | None:
        """Return the sizes in bytes of all parts, by extension, or None.

        It is None if all parts would have to be read.
        """
        return None

    def rejects_warning(self) -> str:
        """Return a warning of content of the files that is in no sample, or ""."""
        return ""

    def offset(self, shard: int, row: int, /) -> int:
        """Return the position of a sample in its shard, in `unit`.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
        """
        return row

    def part_offset(self, shard: int, row: int, extension: str, /) -> int | None:
        """Return the offset in bytes of a part in its shard, or None.

        It is None for a part that is not a range of the shard.

        Args:
            shard: The number of the shard.
            row: The sample's row in it.
            extension: The name of the part.
        """
        return None

    def rows(self, shards: Rows, positions: Rows, /) -> Rows:
        """Return the rows of samples by their positions in shards.

        The result is int64 of the same shape.

        Args:
            shards: The numbers of the shards.
            positions: The position of each sample among those of its shard, from 0.
        """
        return positions

    @property
    def prefetch_refs(self) -> int:
        """The number of refs to pass to `prefetch` ahead of their use.

        0 means only the next ones.
        """
        return 0

    def prefetch(self, indices: Rows, /) -> None:
        """Announce samples that will be read. Returns at once, and raises nothing.

        Args:
            indices: The numbers of the samples in the store.
        """
        return

    def request(self, rows: Rows, /) -> None:
        """Announce samples that will be read next. Returns at once.

        Args:
            rows: The rows of the samples.
        """
        return

    def verify(self, slot: int, /) -> None:
        """Check the data read for the next batch.

        It is called for each batch, so check at most once a second.

        Args:
            slot: The slot of the batch.

        Raises:
            ShardError: A file that was read for the batch has changed.
        """
        return

    def verify_yielded(self) -> None:
        """Check the data read for batches yielded since the last check.

        It is called when a run pauses, ends or is saved, also from another thread. Check at once.

        Raises:
            ShardError: A file read for these batches has changed.
        """
        return


def hash_some(digest: Any, file: ByteSource, size: int, blocks: int) -> int:
    """Add some bytes of a file to a hash, and return its value.

    They are `blocks` + 1 evenly spread pieces of `size` bytes, the first and the last bytes included.
    """
    ranges = [(max(0, file.size - size) * block // blocks, size) for block in range(blocks + 1)]
    file.expect(ranges)
    for offset_and_size in ranges:
        digest.update(file.read_at(*offset_and_size))
    return int(digest.intdigest())


class FileStore(RecordStore):
    """Base of stores with indexed files of one format, local or remote."""

    found: IndexedFiles
    all_used: ClassVar[bool] = True  # whether an epoch reads every byte of a file
    range_parts: Collection[str] = ()  # the parts that are ranges of other files: see ranges.py

    def __init__(self, found: IndexedFiles) -> None:
        self.found, self.root, self.address, self.entries = found, found.root, found.address, found.entries
        self.firsts, self.endings, self.where = found.firsts, found.form.suffixes, found.where
        self.files = self._open_files()

    def _open_files(self) -> LocalFiles | CachedBlocks:
        found = self.found
        if found.remote is None:
            return LocalFiles(found)
        from savable_pipeline.data.stores.cached_blocks import CachedBlocks  # imported only for remote files

        return CachedBlocks(found.remote, found, all_used=self.all_used)

    def file(self, shard: int) -> StoreFile:
        """Return a file of the store as a `ByteSource`."""
        return StoreFile(self.files, shard)

    def verify(self, slot: int) -> None:
        """See `RecordStore.verify`."""
        self.files.verify(slot)

    def verify_yielded(self) -> None:
        """See `RecordStore.verify_yielded`."""
        self.files.verify_yielded()

    def blob(self, shard: int) -> FileBlob:
        """Return the index blob of a file: uint64 (any,)."""
        self.files.fetch_rows(self.found.numbers[[shard]])
        return self.found.blob(shard)

    def table(self, shard: int) -> ShardTable:
        """See `IndexedFiles.table`."""
        self.files.fetch_rows(self.found.numbers[[shard]])
        return self.found.table(shard)

    @cached_property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`."""
        return self.files.refs_ahead(int(self.entries.sizes.sum()) / max(int(self.firsts[-1]), 1))

    def prefetch(self, indices: Rows) -> None:
        """Download the bytes that these samples need in advance.

        Errors are ignored here, and raised when the samples are read.
        """
        if not self.files.is_remote:
            return
        shards = np.searchsorted(self.firsts, indices, side="right") - 1
        with contextlib.suppress(SavableError):
            self.files.fetch_rows(self.found.numbers[shards])
        for shard in np.unique(shards).tolist():
            with contextlib.suppress(SavableError, ValueError):
                rows = indices[shards == shard] - self.firsts[shard]
                self.files.prefetch_bytes(shard, *self.byte_ranges(shard, rows))

    def key(self, shard: int, row: int) -> str:
        """Return the key of a row: a column or field, or else `a.parquet:17`.

        Raises `ShardError` for null and invalid UTF-8. (A substitute could equal the key of another row, and a `Join`
        would mix them up.)
        """
        name, value, fault = self.key_column, None, "is missing or null"
        if name is None:
            return f"{self.entries.names[shard]}:{row}"
        with contextlib.suppress(KeyError):
            value = self.value(shard, row, name)
        if value is not None:
            try:
                return value.decode()
            except UnicodeDecodeError:
                fault = "is not UTF-8"
        raise ShardError(
            f"{self.where(shard)}: row {row}: {name!r} of key= {fault}. Give each row a key, or leave out key=",
            reason="no key",
        )

    def has_part(self, shard: int, row: int, extension: str) -> bool:
        """See `RecordStore.has_part`.

        Alternative names of a part also work, such as the column of an image.
        """
        try:
            return super().has_part(shard, row, extension) or bool(self.head(shard, row, extension, 0))
        except KeyError:
            return False

    def value(self, shard: int, row: int, name: str) -> bytes | None:
        """Return the value of a column or field of a row, or None for null.

        Raises `ShardError`, and KeyError if there is no such column or field.
        """
        raise KeyError(name)

    def damaged(self, shard: int, where: str, fault: str, *, reason: str = "damaged shard") -> ShardError:
        """Return the error for a file whose content at `where` is damaged."""
        return ShardError(
            f'{self.where(shard)}: {where}: {fault}. The file is damaged: restore it, or pass on_error="skip"',
            reason=reason,
        )
