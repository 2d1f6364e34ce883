"""`FileStore`: what the stores of all files have in common that are read in place: entries, checked files, messages."""

from __future__ import annotations

import contextlib
import weakref
from functools import cached_property
from typing import ClassVar

import numpy as np

from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.file_bytes import FileBytes, LocalBytes
from savable_pipeline.data.stores.file_format import FileFormat
from savable_pipeline.data.stores.file_indexing import IndexedFiles
from savable_pipeline.data.stores.local_files import LocalFiles
from savable_pipeline.data.stores.place_index import FileTable, Places
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import SavableError, ShardError


class FileStore(RecordStore):
    """Samples in indexed files of one format, below a folder or behind a URL; a store of a format derives from it."""

    all_used: ClassVar[bool] = True  # whether every byte of a file is read in an epoch

    def __init__(self, found: IndexedFiles, form: FileFormat) -> None:
        self.root = found.root
        self.address = found.address
        self.entries = [found.index.entries[name] for name in found.names]
        self.index_path = found.index_path
        self._index, self._form = found.index, form
        self.endings = form.kind.suffixes
        self.files: LocalFiles | CachedBlocks = (
            LocalFiles(found.root, weakref.proxy(self))
            if found.place is None
            else CachedBlocks(found.place, self, all_used=self.all_used, downloader=found.downloader)
        )

    def places(self, shard: int) -> Places:
        """What the index says of a file: uint64 (any,)."""
        return self._index.places(self.entries[shard].name)

    def table(self, shard: int) -> FileTable:
        """What the index says of a file, to be written into another. Raises `ShardError` if it is damaged."""
        self.check_rows(shard)
        return self._index.table(self.entries[shard].name)

    def place(self, shard: int) -> str:
        """What messages call the file of a shard: its path or its URL."""
        return f"{self.address}/{self.entries[shard].name}"

    def file(self, shard: int) -> FileBytes:
        """The file of a shard as formats read it."""
        return self.files.file(shard)

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """The bytes of a file that reading these rows needs: first ones, and those after the last, int64 (any,) each.

        Raises `ShardError`.
        """
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    @cached_property
    def firsts(self) -> Rows:
        """The number of the first sample of each shard, then of all: int64 (shards + 1,)."""
        return np.cumsum([0, *(entry.samples for entry in self.entries)])

    @cached_property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`."""
        if isinstance(self.files, LocalFiles):
            return 0
        return self.files.refs_ahead(sum(entry.size for entry in self.entries) / max(int(self.firsts[-1]), 1))

    def prefetch(self, indices: Rows) -> None:
        """Has what these samples need downloaded ahead; a fault of it is raised when they are read."""
        if isinstance(self.files, LocalFiles):
            return
        shards = np.searchsorted(self.firsts, indices, side="right") - 1
        for shard in np.unique(shards).tolist():
            with contextlib.suppress(SavableError, ValueError):
                rows = indices[shards == shard] - self.firsts[shard]
                self.files.prefetch_bytes(shard, *self.byte_ranges(shard, rows))

    def verify(self, slot: int) -> None:
        """See `RecordStore.verify`."""
        self.files.verify(slot)

    def verify_given(self) -> None:
        """See `RecordStore.verify_given`."""
        self.files.verify_given()

    def check_rows(self, shard: int) -> None:
        """See `Indexed.check_rows`."""
        if not self._index.is_whole(self.entries[shard].name):
            raise ShardError(
                f"{self.address}: the index of {self.entries[shard].name} is damaged; remove {self.index_path} and "
                "start again",
                reason="damaged index",
            )

    def is_as_written(self, shard: int, descriptor: int) -> bool:
        """See `Indexed.is_as_written`."""
        return self.is_as_indexed(shard, LocalBytes(self.files.path(shard), descriptor))

    def is_as_indexed(self, shard: int, file: FileBytes) -> bool:
        """See `IndexedBytes.is_as_indexed`."""
        return self._form.is_as_indexed(file, self._index.table(self.entries[shard].name))

    def key(self, shard: int, row: int) -> str:
        """File and row: `a.parquet:17`."""
        return f"{self.entries[shard].name}:{row}"

    def as_key(self, shard: int, row: int, name: str, found: bytes | None) -> str:
        """What the field or column `name` of a row holds, as its key. Raises `ShardError` for null, and for no UTF-8.

        (Another key in its place could be that of another row, and a `Join` would mix the two up.)
        """
        fault = "is missing or null"
        if found is not None:
            try:
                return found.decode()
            except UnicodeDecodeError:
                fault = "holds bytes that are no UTF-8"
        raise ShardError(
            f"{self.place(shard)}: row {row}: {name!r}, which key= names, {fault}; give each row a key, or leave out "
            "key=, so that keys are FILE:ROW",
            reason="no key",
        )

    def damaged(self, shard: int, place: str, fault: str, *, reason: str = "damaged shard") -> ShardError:
        """The error for a file that does not hold at `place` what it should."""
        return ShardError(
            f"{self.place(shard)}: {place}: {fault}; the file is damaged: put a good copy in its place, or leave its "
            'samples out with on_error="skip"',
            reason=reason,
        )
