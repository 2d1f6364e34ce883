"""`TarStore`: the record store of tar shards, wherever their bytes lie."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from savable_pipeline.data.shards.paths import TARS
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry
from savable_pipeline.data.stores.indexed_shards import IndexedShards
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.data.stores.tar_parts import TarParts, key_at


class TarStore:
    """A `RecordStore`: located by an index, read by `TarParts` from `files`; `root` holds the metadata. Its rows are
    those of the index.

    What others do better is bound here, not wrapped: a wrapper around `read` would cost as much as a tenth of it.
    """

    unit = "byte offset"
    decoded_bytes = 0
    key_column: str | None = None
    endings: Sequence[str] = TARS.suffixes

    def __init__(self, root: Path | None, shards: IndexedShards, files: ShardFiles) -> None:
        self.root = root
        self.files = files
        self._shards = shards
        self.address = shards.address
        self.entries: Sequence[ShardEntry] = shards.entries
        self.rows = files.located(shards.rows)
        self.table = shards.table
        self.links_told = shards.links_told
        self.offset, self.extensions, self.sizes = shards.offset, shards.extensions, shards.sizes
        self.prefetch, self.request = files.prefetch, files.request
        self.verify, self.verify_given = files.verify, files.verify_given
        parts = TarParts(shards, files)
        self.read, self.array = files.guard(parts.read), files.guard(parts.array)
        self._span, self._key = files.guard(parts.span), files.guard(parts.key)

    def part_sizes(self) -> dict[str, Rows] | None:
        """See `RecordStore.part_sizes`; None where the index is here in part."""
        return self._shards.part_sizes() if self.files.has_all_rows() else None

    def row_groups(self, shard: int) -> None:
        """None: nothing is decoded in groups."""

    @property
    def prefetch_refs(self) -> int:
        """The number of refs that `prefetch` should be given ahead of their use."""
        return self.files.prefetch_refs

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        """The first bytes of a part, at most `limit`, and its size. Raises KeyError, or `ShardError`."""
        offset, size = self._shards.place(row, extension)
        place = offset, min(size, limit)
        head = self.files.peek(shard, row, place)
        return self._span(shard, row, place) if head is None else head, size

    def key(self, shard: int, row: int) -> str:
        """The key of a sample, read from the header of its first member. Raises `ShardError`."""
        path = f"{self.address}/{self.entries[shard].name}"
        headers = self.files.peek(shard, row, (self.offset(shard, row), self._shards.layout(row).gaps[0]))
        if headers is None:
            return self._key(shard, row, path)
        with tempfile.TemporaryFile() as file:
            file.write(headers)
            file.truncate(self.entries[shard].size)  # a hole where the payload would be
            return key_at(path, file.fileno(), 0)
