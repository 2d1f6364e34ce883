"""`CachedFiles`: remote shards, read from the node's cache, downloaded in advance.

prefetch(indices)  refs that the reader will yield       ──▶ downloaded if nothing more urgent waits
request(rows)      samples that were yielded             ──▶ downloaded soon
a read             of a row that is not cached           ──▶ downloaded now, while the read waits

Of samples of more than 8 MiB, such as videos, only the needed blocks are read (`LongSamples`):

    CACHE/DATASET/VERSION/N.tar           other samples of shard N, each cached as a whole or not at all
    CACHE/DATASET/VERSION/long/N.bytes    blocks of the same shard, of the same version on the server

A read downloads its blocks. A read that continues after cached blocks downloads as many bytes again, at most 1 MiB.
Long samples are announced only after a long part was read whole, and then as whole samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.remote.cache_files import PIECE
from savable_pipeline.data.remote.lookup import locked_folder, open_protected
from savable_pipeline.data.remote.session import Urgency
from savable_pipeline.data.remote.shard_cache import LONG_FOLDER, NO_SPACE, USED, WANTED
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar_format import TarIndex
from savable_pipeline.data.stores.cached_blocks import TRIES, Block, CachedBlocks, DownloadedFiles
from savable_pipeline.data.stores.shard_files import Locate, Location, MemberReader, ReadRow, T
from savable_pipeline.errors import ShardError

LONG = PIECE  # a sample with more bytes, headers included, is long
_TOUCH_S = 10.0  # pause between two updates of the times when shards were last used
# pause between two checks that all samples are cached: seconds, or if longer this multiple of a check's duration
_CHECK_S, _CHECK_MULTIPLE = 1.0, 50
_CHECKED_ROWS = 1 << 12  # most rows to remember as checked


class CachedFiles(DownloadedFiles):
    """Remote tars in the cache, where each row is a sample."""

    def __init__(self, indexed: IndexedFiles) -> None:
        assert indexed.remote is not None, indexed.address
        super().__init__(indexed.remote, indexed.numbers, all_used=True)
        self._indexed, self._url = indexed, self.remote.url
        # shards to check for completeness, or None if they do not fit into the cache
        self._nonempty = indexed.numbers[indexed.entries.samples > 0] if self._blocks.in_pieces else None
        self._complete_at = -1  # the number of evictions when all shards were complete, or -1
        self._next_check = 0.0  # time of the next check for completeness
        self._prefetch_refs = self.refs_ahead(indexed.mean_bytes)
        self._touch_at = 0.0  # time of the next update of when shards were last used

    @property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`."""
        return 0 if self._complete_at >= 0 else self._prefetch_refs

    def open(self, shard: int) -> int:
        """Open a new descriptor of a shard's file in the cache, after checking the index."""
        self._check(shard)
        return super().open(shard)

    def _check(self, shard: int) -> None:
        if shard not in self._checked:
            self._indexed.check_rows(shard)
            self._checked.add(shard)

    def long_sample_reader(self, reader: MemberReader, extent: Callable[[int, str], tuple[int, int]]) -> LongSamples:
        """See `ShardFiles.long_sample_reader`."""
        self._long_samples = LongSamples(self, self._indexed, extent)
        return self._long_samples

    def download_first(self, read: ReadRow[Location, T], read_long: ReadRow[Location, T]) -> ReadRow[Location, T]:
        """See `ShardFiles.download_first`.

        The download is repeated if the row is evicted or damaged.
        """
        present, used, verified = self._cached.present.data, self._cached.used.data, self._cached.verified.data

        def read_downloaded(shard: int, row: int, location: Location) -> T:
            for _ in range(TRIES):
                before = present[row]
                if before & 1:  # the row is cached
                    if verified[row] == before or self.is_valid(shard, row, row + 1):
                        try:
                            found = read(shard, row, location)
                            if present[row] == before:
                                used[row] = USED
                                return found
                        except ShardError:
                            if present[row] == before and self.is_valid(shard, row, row + 1):
                                raise
                elif self._is_long(row):
                    return read_long(shard, row, location)
                self._download(shard, row)
            self._check_room(shard, row, row + 1, TRIES)
            raise AssertionError

        return read_downloaded

    def fetch_rows_first(self, locate: Locate) -> Locate:
        """See `ShardFiles.fetch_rows_first`."""

        def fetch_and_locate(shards: Rows, positions: Rows) -> Rows:
            self.fetch_rows(self._indexed.numbers[shards])
            return locate(shards, positions)

        self._rows = locate if self._cached.layout.parts is None else fetch_and_locate
        return self._rows

    def prefetch(self, indices: Rows) -> None:
        """Request the download of these samples, to be cached until they are read."""
        now = time.monotonic()
        if self._is_complete() and now < self._touch_at:
            return
        self._touch_at = now + _TOUCH_S
        shards = self._indexed.shards_of(indices)
        rows = self._without_long(self._rows(shards, indices - self._indexed.firsts[shards]))
        present = self._cached.present[rows] & 1 == 1
        self._cached.used[rows] = WANTED
        self._cached.touched[self._cached.shards_of(rows[present])] = time.time()
        if present.all():
            self._check_completeness(now)
            return
        for block in self._blocks.announce(np.unique(rows[~present])):
            self._prefetch(Urgency.LATER, *self._request(*block), [], False)

    def _is_complete(self) -> bool:
        """Return whether all samples are cached, so that nothing needs an announcement."""
        if self._complete_at != self._cached.evictions[0]:
            self._complete_at = -1
        return self._complete_at >= 0

    def _check_completeness(self, now: float) -> None:
        """Check now and then whether all samples are present."""
        if self._nonempty is not None and now >= self._next_check:
            evictions = self._cached.evictions[0]
            self._complete_at = evictions if self._cached.all_present(self._nonempty) else -1
            self._next_check = time.monotonic() + max(_CHECK_S, _CHECK_MULTIPLE * (time.monotonic() - now))

    def request(self, rows: Rows) -> None:
        """Request the download of those of these rows that are not cached."""
        if self._is_complete():
            return
        rows = self._without_long(rows)
        absent = np.unique(rows[self._cached.present[rows] & 1 == 0]).tolist()
        needed: dict[Block, list[int]] = {}
        for row in absent:
            needed.setdefault(self._block(row), []).append(row)
        for block, needed_rows in needed.items():
            self._prefetch(Urgency.SOON, *self._request(*block), needed_rows, False)

    def peek(self, shard: int, row: int, extent: tuple[int, int]) -> bytes | None:
        """Return bytes of a long sample without caching it whole, or None.

        `extent` is their offset and size. The result is None for a sample that is short enough to cache.
        """
        if not self._is_long(row):
            return None
        (offset, size), entry = extent, self._indexed.entries[shard]
        data = self._long_samples.cached_span(shard, row, extent) if size else b""
        end = offset + size
        return self._call("part", self._url, entry.name, entry.size, offset, end) if data is None else data

    def _is_long(self, row: int) -> bool:
        start, stop = self._cached.extent(row, row + 1)
        return stop - start > LONG

    def _without_long(self, rows: Rows) -> Rows:
        """Return these rows without absent long samples, and announce the long samples to `LongSamples`."""
        absent = rows[self._cached.present[rows] & 1 == 0]
        long = np.array([self._is_long(row) for row in absent.tolist()], dtype=bool)
        if not long.any():
            return rows
        self._long_samples.prefetch(np.unique(absent[long]))
        return np.setdiff1d(rows, absent[long])

    def _block(self, row: int) -> Block:
        """Return the rows to download with a row: its block, or the row alone if the block had no space."""
        return (row, row + 1) if self._cached.used[row] == NO_SPACE else self._blocks.block_of(row)

    def _download(self, shard: int, row: int) -> None:
        """Wait until a row is downloaded, and the rest of its block if there is space for it."""
        self._check(shard)
        self._check_room(shard, row, row + 1)
        self._call(*self._request(*self._block(row)), [row], True)


class LongSamples:
    """Reader of parts of the long samples of `indexed`, whose files are `files`.

    Rows are those of the index. `extent` returns offset and size of a part by row and extension.
    """

    def __init__(
        self, files: DownloadedFiles, indexed: IndexedFiles, extent: Callable[[int, str], tuple[int, int]]
    ) -> None:
        assert isinstance(indexed.index, TarIndex), indexed.index
        self._files, self._indexed, self._index, self._part_extent = files, indexed, indexed.index, extent
        self._cached = files.remote.cached
        self._checked_rows: set[int] = set()  # rows whose headers match the index
        self.read_whole = False  # whether a part that is long itself was read whole

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `TarParts.read`; also raises `RemoteError`."""
        return self.span(shard, row, self._extent_read_whole(row, extension))

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        """See `TarParts.array`; also raises `RemoteError`."""
        offset, size = self._extent_read_whole(row, extension)
        self._check_first_header(shard, row)
        array = empty_bytes(size)
        self._blocks.read_into(array, shard, offset)
        return array

    def span(self, shard: int, row: int, extent: tuple[int, int]) -> bytes:
        """Return the bytes at `extent`, (offset, size), of a shard.

        Raises `ShardError`, `RemoteError`.
        """
        self._check_first_header(shard, row)
        return self._blocks.read_ahead(shard, *extent, self._cached.extent(row, row + 1)[1])

    def cached_span(self, shard: int, row: int, extent: tuple[int, int]) -> bytes | None:
        """Return the bytes at `extent`, (offset, size), if they are cached, else None."""
        return self.span(shard, row, extent) if self._blocks.has(shard, *extent) else None

    def prefetch(self, rows: Rows) -> None:
        """Start to download these samples, if a long part was read whole before.

        Otherwise only some bytes of each may be needed.
        """
        for row in rows.tolist() if self.read_whole else ():
            begin, end = self._cached.extent(row, row + 1)
            shard = int(np.searchsorted(self._indexed.numbers, self._cached.shard_of(row)))
            self._blocks.prefetch_bytes(shard, np.array([begin]), np.array([end]))

    def _extent_read_whole(self, row: int, extension: str) -> tuple[int, int]:
        """Return offset and size of a part that is read whole, and remember whether any was long."""
        offset, size = self._part_extent(row, extension)
        self.read_whole = self.read_whole or size > LONG
        return offset, size

    @cached_property
    def _blocks(self) -> CachedBlocks:
        remote = self._files.remote
        folder = self._cached.folder / LONG_FOLDER
        with locked_folder(self._cached.dataset):
            folder.mkdir(exist_ok=True)
            remote = replace(remote, cached=open_protected(folder))
        return CachedBlocks(remote, self._indexed, compares_files=False)

    def _check_first_header(self, shard: int, row: int) -> None:
        """Raise `ShardError` unless the first header of a sample matches the index."""
        if row in self._checked_rows:
            return
        blocks, index, name = self._blocks, self._index, self._indexed.entries.names[shard]
        start, size = index.starts[row], index.layout(row).gaps[0]
        if not blocks.read_downloaded(shard, start, size, lambda: index.header_matches(name, blocks[shard], row, 1)):
            self._cached.note_changed(int(self._indexed.numbers[shard]))
            raise ShardError(
                f"{blocks.url(shard)}: the shard was rewritten after indexing. Start again, or restore the old shard",
                reason="changed shard",
            )
        if len(self._checked_rows) >= _CHECKED_ROWS:
            self._checked_rows.clear()
        self._checked_rows.add(row)
