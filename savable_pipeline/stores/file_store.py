"""`FileStore`: what the stores of all files have in common that are read in place: entries, checked files, messages."""

from __future__ import annotations

from pathlib import Path

from savable_pipeline.errors import ShardError
from savable_pipeline.stores.file_format import FileFormat
from savable_pipeline.stores.file_indexing import IndexedFiles
from savable_pipeline.stores.local_files import LocalFiles
from savable_pipeline.stores.place_index import Places
from savable_pipeline.stores.record_store import RecordStore


class FileStore(RecordStore):
    """Samples in indexed files of one format below a folder; a store of a format derives from it."""

    def __init__(self, found: IndexedFiles, form: FileFormat) -> None:
        self.root = found.root
        self.address = str(found.root)
        self.entries = [found.index.entries[name] for name in found.names]
        self.index_path = found.index_path
        self.files = LocalFiles(found.root, self)
        self._index, self._form = found.index, form

    def places(self, shard: int) -> Places:
        """What the index says of a file: uint64 (any,)."""
        return self._index.places(self.entries[shard].name)

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.files.path(shard)

    def verify(self, slot: int) -> None:
        """See `RecordStore.verify`."""
        self.files.verify(slot)

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
        return self._form.is_as_indexed(self.path(shard), descriptor, self._index.table(self.entries[shard].name))

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
            f"{self.path(shard)}: row {row}: {name!r}, which key= names, {fault}; give each row a key, or leave out "
            "key=, so that keys are FILE:ROW",
            reason="no key",
        )

    def damaged(self, shard: int, place: str, fault: str, *, reason: str = "damaged shard") -> ShardError:
        """The error for a file that does not hold at `place` what it should."""
        return ShardError(
            f"{self.path(shard)}: {place}: {fault}; the file is damaged: put a good copy in its place, or leave its "
            'samples out with on_error="skip"',
            reason=reason,
        )
