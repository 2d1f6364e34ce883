"""`FileStore`: what the stores of all files have in common that are read in place: entries, checked files, messages."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from savable_pipeline.data.shards.index import FileBlob, IndexedFiles, ShardTable
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.shard_files import LocalFiles, StoreFile
from savable_pipeline.errors import SavableError, ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.stores.cached_blocks import CachedBlocks


class FileStore(RecordStore):
    """Samples in indexed files of one format, below a folder or behind a URL; a store of a format derives from it."""

    range_parts: Collection[str] = ()  # the parts that are ranges of other files: see ranges.py

    def __init__(self, found: IndexedFiles) -> None:
        self.found = found
        self.root, self.address, self.entries = found.root, found.address, found.entries
        self.firsts, self.endings = found.firsts, found.form.kind.suffixes
        self.where = found.where
        self.files = self._open_files()

    def _open_files(self) -> LocalFiles | CachedBlocks:
        found = self.found
        if found.remote is None:
            return LocalFiles(found)
        from savable_pipeline.data.stores.cached_blocks import CachedBlocks  # here: most files lie on a disk

        return CachedBlocks(found.remote, found, all_used=found.form.all_used)

    def file(self, shard: int) -> StoreFile:
        """A file as formats read it."""
        return StoreFile(self.files, shard)

    def verify(self, slot: int) -> None:
        """See `RecordStore.verify`."""
        self.files.verify(slot)

    def verify_given(self) -> None:
        """See `RecordStore.verify_given`."""
        self.files.verify_given()

    def blob(self, shard: int) -> FileBlob:
        """What the index says of a file: uint64 (any,)."""
        self.files.fetch_rows(self.found.numbers[[shard]])
        return self.found.blob(shard)

    def table(self, shard: int) -> ShardTable:
        """See `IndexedFiles.table`."""
        self.files.fetch_rows(self.found.numbers[[shard]])
        return self.found.table(shard)

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """The bytes of a file that reading these rows needs: first ones, and those after the last, int64 (any,) each.

        Raises `ShardError`.
        """
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    @cached_property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`."""
        return self.files.refs_ahead(int(self.entries.sizes.sum()) / max(int(self.firsts[-1]), 1))

    def prefetch(self, indices: Rows) -> None:
        """Has what these samples need downloaded ahead; a fault of it is raised when they are read."""
        if not self.files.behind_url:
            return
        shards = np.searchsorted(self.firsts, indices, side="right") - 1
        with contextlib.suppress(SavableError):
            self.files.fetch_rows(self.found.numbers[shards])
        for shard in np.unique(shards).tolist():
            with contextlib.suppress(SavableError, ValueError):
                rows = indices[shards == shard] - self.firsts[shard]
                self.files.prefetch_bytes(shard, *self.byte_ranges(shard, rows))

    def key(self, shard: int, row: int) -> str:
        """File and row: `a.parquet:17`."""
        return f"{self.entries.names[shard]}:{row}"

    def has_part(self, shard: int, row: int, extension: str) -> bool:
        """See `RecordStore.has_part`: also by a second name of a part, such as the column of an image."""
        try:
            return super().has_part(shard, row, extension) or bool(self.head(shard, row, extension, 0))
        except KeyError:
            return False

    def value(self, shard: int, row: int, name: str) -> bytes | None:
        """What a column, or a field, of a row holds; None for null. Raises KeyError without it, `ShardError`."""
        raise KeyError(name)

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
            f"{self.where(shard)}: row {row}: {name!r}, which key= names, {fault}; give each row a key, or "
            "leave out key=, so that keys are FILE:ROW",
            reason="no key",
        )

    def damaged(self, shard: int, where: str, fault: str, *, reason: str = "damaged shard") -> ShardError:
        """The error for a file that does not hold at `where` what it should."""
        return ShardError(
            f"{self.where(shard)}: {where}: {fault}; the file is damaged: put a good copy in its place, or "
            'leave its samples out with on_error="skip"',
            reason=reason,
        )
