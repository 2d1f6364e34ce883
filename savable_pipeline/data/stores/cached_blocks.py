"""Remote files, which the downloading process of a session puts into the cache.

    DownloadedFiles    base of all remote files: their location, requests, space in the cache
    CachedBlocks       files with some blocks in the cache; for tars see cached_samples.py
    DownloadBlocks     the groups of rows that are downloaded together

A dataset that fits into the cache is downloaded in pieces of 8 MiB. For a larger dataset, exactly the announced byte
ranges are downloaded, so that each byte is downloaded once per epoch despite evictions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.files import lacks_handles
from savable_pipeline.data.remote.cache_files import PIECE, pin_whole, whole_version
from savable_pipeline.data.remote.cache_space import PREFETCH_FRACTION
from savable_pipeline.data.remote.lookup import RemoteFolder
from savable_pipeline.data.remote.session import Downloader, Urgency
from savable_pipeline.data.remote.shard_cache import DISK_BLOCK, NO_SPACE, USED, WANTED, ShardCache, runs
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.shard_files import ShardFiles, StoreFile, T
from savable_pipeline.errors import RemoteError, ShardError

TRIES = 100  # attempts to read a row that is evicted each time before it is read
_LEAST_REFS, _MOST_REFS = 16, 2048  # refs that are announced ahead, at least and at most
_PREFETCH_BYTES = 64 << 20  # about as many bytes are announced ahead, per lane
_AHEAD_BYTES = 1 << 20  # most bytes to download in advance after a read
_CACHED_ROWS = 1 << 18  # number of rows whose blocks are remembered
_sidecar_locks: dict[Path, threading.Lock] = {}  # one lock per sidecar file

Block: TypeAlias = tuple[int, int]  # rows of one shard: the first, and the one after the last


class DownloadedFiles(ShardFiles):
    """Base of remote files, which are downloaded into the cache of `remote`.

    `numbers` has the number of each file in the cache's index. With `all_used`, an epoch reads every byte.
    """

    is_remote = True

    def __init__(self, remote: RemoteFolder, numbers: Rows, *, all_used: bool) -> None:
        super().__init__()
        self.remote, self._cached, self._limit = remote, remote.cached, remote.session.limit
        # A `shard` is a number among the files of this store. In the cache's index, which may have more files, it is
        # `numbers[shard]`.
        self._numbers = numbers
        fits = int(self._cached.shards.sizes[numbers].sum()) <= self._limit * PREFETCH_FRACTION
        self._blocks = DownloadBlocks(self._cached, in_pieces=all_used and fits)
        self._checked: set[int] = set()  # files that match the index
        self._known_rows: set[int] = set()  # files whose index rows match their checksum
        self._informed: Downloader | None = None  # the process that received the announced samples

    def refs_ahead(self, mean_bytes: float) -> int:
        """Return the number of refs to announce ahead, for samples of this mean size."""
        ahead = int(min(_PREFETCH_BYTES, self._limit // 256) / max(mean_bytes, 1))
        return max(_LEAST_REFS, min(_MOST_REFS, ahead))

    def path(self, shard: int) -> Path:
        """Return the path of a file in the cache."""
        return self._cached.path(int(self._numbers[shard]))

    def open(self, shard: int) -> int:
        """Open a new descriptor of a file in the cache."""
        try:
            return self._cached.open(int(self._numbers[shard]))
        except OSError as error:
            if lacks_handles(error):
                raise
            raise RemoteError(f"{self.path(shard)}: {error.strerror}. Check that the cache is there") from error

    def is_valid(self, shard: int, row: int, stop: int) -> bool:
        """Return whether cached rows match their checksums.

        Otherwise they must be downloaded again, perhaps to a new file, because the open one may be deleted.
        """
        is_valid = self._cached.is_valid(int(self._numbers[shard]), self[shard], row, stop)
        if not is_valid:
            self.reopen(shard)
        return is_valid

    def entry(self, shard: int) -> tuple[str, int]:
        """See `ShardFiles.entry`."""
        number = int(self._numbers[shard])
        return self._cached.shards.names[number], int(self._cached.shards.sizes[number])

    def url(self, shard: int) -> str:
        """Return the URL of a file."""
        return f"{self.remote.url}/{self._cached.shards.names[int(self._numbers[shard])]}"

    def _request(self, row: int, stop: int) -> tuple[str, str, str, int, int]:
        """Return the first fields of a request to download the rows `row` to `stop - 1` of the cache."""
        return "rows", self.remote.url, str(self._cached.folder), row, stop

    def _check_room(self, shard: int, row: int, stop: int, tries: int = 0) -> None:
        """Raise `RemoteError` if the cache is too small for these rows, or if `tries` reads of them failed."""
        begin_byte, end_byte = self._cached.extent(row, stop)
        size = end_byte // DISK_BLOCK * DISK_BLOCK - begin_byte // DISK_BLOCK * DISK_BLOCK + DISK_BLOCK
        least = size + self._limit if tries else size
        if tries and not self._cached.is_current():
            raise RemoteError(
                f"{self.url(shard)}: its cache {self._cached.folder} was removed during the run. Create a new loader"
            )
        if least > self._limit:
            lost = f"read in vain {tries} times (evicted or damaged). " if tries else ""
            raise RemoteError(
                f"{self.url(shard)}: {lost}{size} bytes at once do not fit into the cache of {self._limit}. Set "
                f"cache_bytes= or SAVABLE_CACHE_BYTES to at least {least}"
            )

    def fetch_rows(self, numbers: Rows) -> None:
        """See `ShardFiles.fetch_rows`. Damaged rows are fetched again."""
        if (parts := self._cached.layout.parts) is None:
            return
        numbers = np.unique(numbers)
        unchecked = [number for number in numbers.tolist() if number not in self._known_rows]
        parts.check(np.array(unchecked, dtype=np.int64))
        absent = parts.absent(numbers).tolist()
        if absent:
            self._call("index_rows", self.remote.url, str(self._cached.folder), absent)
        self._known_rows.update(unchecked)

    def has_all_rows(self) -> bool:
        """Return whether the whole index is in the cache."""
        parts = self._cached.layout.parts
        return parts is None or not len(parts.all_absent())

    def _call(self, kind: str, *arguments: Any) -> Any:
        answer = self.remote.session.call(kind, *arguments)
        self._announce_to_new_process()
        return answer

    def _prefetch(self, urgency: Urgency, *request: Any) -> None:
        self._announce_to_new_process()
        self.remote.session.prefetch(urgency, *request)

    def _announce_to_new_process(self) -> None:
        """Announce the samples again if the downloading process was replaced."""
        downloader = self.remote.session.connected()
        if downloader is not self._informed:
            self._informed = downloader
            self._blocks.forget_announced()


class CachedBlocks(DownloadedFiles):
    """Remote files in blocks, of which some are in the cache.

    Files are compared with the index `indexed`, if any. Their bytes are compared only if `compares_files`. With
    `all_used`, files that all fit into the cache are downloaded in pieces of 8 MiB.
    """

    def __init__(
        self,
        remote: RemoteFolder,
        indexed: IndexedFiles | None = None,
        *,
        all_used: bool = False,
        compares_files: bool = True,
    ) -> None:
        numbers = np.arange(len(remote.cached.shards)) if indexed is None else indexed.numbers
        super().__init__(remote, numbers, all_used=all_used)
        self._indexed, self._compares_files = indexed, compares_files
        self._checked_sidecars: set[Path] = set()  # sidecars that match their download

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file from `offset` on, after downloading missing ones.

        Raises `ShardError` if the file is too short or differs from the index, and `RemoteError`.
        """
        return self.read_downloaded(shard, offset, size, lambda: super(CachedBlocks, self).read(shard, offset, size))

    def read_into(self, array: NDArray[np.uint8], shard: int, offset: int) -> None:
        """Fill `array`, uint8 (bytes,), with bytes of a file.

        Raises the errors of `read`.
        """
        read_into = super().read_into
        self.read_downloaded(shard, offset, len(array), lambda: read_into(array, shard, offset))

    def has(self, shard: int, offset: int, size: int) -> bool:
        """Return whether these bytes of a file are cached."""
        return bool((self._cached.present[self._rows(shard, offset, size)] & 1).all())

    def read_ahead(self, shard: int, offset: int, size: int, stop: int) -> bytes:
        """Return bytes of a file, and download in advance if those before them are cached.

        As many bytes are downloaded as are cached directly before, but at most 1 MiB, and none after `stop`.
        """
        rows, present = self._rows(shard, offset, size), self._cached.present
        absent = rows.start + np.flatnonzero(present[rows] & 1 == 0)[:1]
        if not len(absent):
            return self.read(shard, offset, size)
        row, first = int(absent[0]), int(self._cached.firsts[self._numbers[shard]])
        block = self._cached.extent(first, first + 1)[1]  # bytes of a block, which the first one has from 0 on
        before = present[max(first, row - _AHEAD_BYTES // block) : row][::-1] & 1  # the nearest block comes first
        ahead = self._cached.extent(row, row + 1)[0] + block * int(np.cumprod(before).sum())
        return self.read(shard, offset, max(size, min(stop, ahead) - offset))[:size]

    def read_downloaded(self, shard: int, offset: int, size: int, read: Callable[[], T]) -> T:
        """Return the result of `read` once the bytes are cached.

        The read is repeated if the bytes were evicted in the meantime.
        """
        if shard not in self._checked:
            self._check(shard)
        rows = self._rows(shard, offset, size)
        # numbers that are 0 if absent and odd if present
        present, verified = self._cached.present[rows], self._cached.verified[rows]
        for _ in range(TRIES):
            before = present.tobytes()  # bytes compare faster than arrays
            if (verified.tobytes() == before and 0 not in before) or self._are_intact(shard, rows):
                try:
                    found = read()
                    if present.tobytes() == before:
                        self._cached.used[rows] = USED
                        return found
                except ShardError:
                    if present.tobytes() == before and self.is_valid(shard, rows.start, rows.stop):
                        raise
            self._download(shard, rows)
        self._check_room(shard, rows.start, rows.stop, TRIES)
        raise AssertionError

    def _are_intact(self, shard: int, rows: slice) -> bool:
        """Return whether these rows are cached and match their checksums, which are compared once per process."""
        present = self._cached.present[rows]
        unchecked = rows.start + np.flatnonzero(self._cached.verified[rows] != present)
        return bool((present & 1).all()) and all(self.is_valid(shard, row, stop) for row, stop in runs(unchecked))

    def _check(self, shard: int) -> None:
        """Raise `ShardError` unless the file is the one that was indexed."""
        self._checked.add(shard)  # before the check, which reads the file by the same methods
        try:
            if self._indexed is not None:
                self.fetch_rows(self._numbers[[shard]])
                self._indexed.check_rows(shard)
                if self._compares_files and not self._indexed.matches_index(shard, StoreFile(self, shard)):
                    self._cached.note_changed(int(self._numbers[shard]))
                    raise ShardError(
                        f"{self.url(shard)}: not as its index says. Start again to index it, or restore the old file",
                        reason="changed shard",
                    )
        except BaseException:
            self._checked.discard(shard)
            raise

    def sidecar(self, name: str) -> Path | None:
        """See `ShardFiles.sidecar`: a local copy, downloaded if it is not here."""
        path = self.remote.sidecar(name)
        with _sidecar_locks.setdefault(path, threading.Lock()):  # several files may share it
            if path not in self._checked_sidecars and whole_version(path) is None:
                if (stat := self._call("stat", self.remote.url, name)) is None:
                    return None
                pin_whole(path, self._call("whole", self.remote.url, name, stat[0], str(path)))
            self._checked_sidecars.add(path)
        return path

    def prefetch_bytes(self, shard: int, begins: Rows, ends: Rows, *, soon: bool = False) -> None:
        """Download these bytes of a file in advance, and protect them until they are read.

        Range i is from `begins[i]` to `ends[i]`.
        """
        rows = self._blocks_of(shard, begins, ends)
        if not len(rows):
            return
        absent = rows[self._cached.present[rows] & 1 == 0]
        self._cached.used[rows] = WANTED
        self._cached.touched[self._numbers[shard]] = time.time()
        for block in self._blocks.announce(absent) if len(absent) else []:
            self._prefetch(Urgency.SOON if soon else Urgency.LATER, *self._request(*block), [], False)

    def _blocks_of(self, shard: int, begins: Rows, ends: Rows) -> Rows:
        """Return the rows of the cache with these bytes, ascending."""
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        slices = [self._rows(shard, begin, end - begin) for begin, end in pairs]
        return np.unique(np.concatenate([np.arange(rows.start, rows.stop) for rows in slices])) if slices else begins

    def _rows(self, shard: int, offset: int, size: int) -> slice:
        """Return the rows of the cache with these bytes of a file."""
        row_from, number = self._cached.layout.row_from, int(self._numbers[shard])
        if size <= 0:
            return slice(0, 0)
        return slice(row_from(number, offset + 1) - 1, row_from(number, offset + size))

    def _download(self, shard: int, rows: slice) -> None:
        """Wait until these rows are downloaded, with the rest of their pieces if pieces are downloaded whole."""
        absent = rows.start + np.flatnonzero(self._cached.present[rows] & 1 == 0)
        if not len(absent):
            return
        self._check_room(shard, rows.start, rows.stop)
        whole = self._blocks.in_pieces and not (self._cached.used[absent] == NO_SPACE).any()
        blocks = self._blocks.needed_blocks(absent, whole=whole)
        for (row, stop), needed in blocks[1:]:
            self._prefetch(Urgency.SOON, *self._request(row, stop), needed, False)
        for (row, stop), needed in blocks:
            self._call(*self._request(row, stop), needed, True)


class DownloadBlocks:
    """The blocks in which rows of a cached dataset version are downloaded.

    With `in_pieces`, these are all rows of 8 MiB of a file. Otherwise they are runs of announced rows.
    """

    def __init__(self, cached: ShardCache, *, in_pieces: bool) -> None:
        self._cached = cached
        self.in_pieces = in_pieces
        self._by_row: dict[int, Block] = {}  # the block that a row was announced in
        self._announced: set[Block] = set()  # pieces

    def announce(self, rows: Rows) -> list[Block]:
        """Return the blocks of these ascending rows, without announced pieces."""
        blocks = self._blocks(rows)
        if self.in_pieces:
            blocks = [block for block in blocks if block not in self._announced]
            self._announced.update(blocks)
            return blocks
        if len(self._by_row) > _CACHED_ROWS:
            self._by_row.clear()
        self._by_row.update((row, block) for block in blocks for row in range(*block))
        return blocks

    def needed_blocks(self, rows: Rows, *, whole: bool) -> list[tuple[Block, list[int]]]:
        """Return the blocks of ascending rows that are needed now, with these rows.

        A block is a `whole` piece, or the rows of a piece from the first needed one to the last.
        """
        shards, pieces = self._cached.shards_of(rows), self._cached.layout.offsets(rows) // PIECE
        cuts = np.flatnonzero((np.diff(shards) != 0) | (np.diff(pieces) != 0)) + 1
        found = []
        for group in np.split(rows, cuts):
            row, stop = int(group[0]), int(group[-1]) + 1
            block = self._piece(self._cached.shard_of(row), self._cached.extent(row, stop)[0] // PIECE)
            found.append((block if whole else (row, stop), group.tolist()))
        return found

    def forget_announced(self) -> None:
        """Forget which pieces were announced, because their downloader is gone."""
        self._announced.clear()

    def block_of(self, row: int) -> Block:
        """Return the block to download for a row: its piece, or its announced run."""
        if self.in_pieces:
            return self._piece(self._cached.shard_of(row), self._cached.extent(row, row + 1)[0] // PIECE)
        return self._by_row.get(row, (row, row + 1))

    def _blocks(self, rows: Rows) -> list[Block]:
        """Return the blocks with these ascending rows: whole pieces, or runs of rows that each end with a piece."""
        shards = self._cached.shards_of(rows)
        pieces = self._cached.layout.offsets(rows) // PIECE
        if self.in_pieces:
            return [self._piece(*piece) for piece in dict.fromkeys(zip(shards.tolist(), pieces.tolist(), strict=True))]
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(shards) != 0) | (np.diff(pieces) != 0)) + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, cuts)]

    def _piece(self, shard: int, piece: int) -> Block:
        """Return the rows of a shard that start in its 8 MiB number `piece`, without a row longer than 8 MiB."""
        row_from = self._cached.layout.row_from
        row, stop = row_from(shard, piece * PIECE), row_from(shard, (piece + 1) * PIECE)
        if row < stop:
            begin, end = self._cached.extent(stop - 1, stop)
            stop -= end - begin > PIECE
        return row, stop
