"""`CachedBlocks`: files behind a URL, of which the node's cache holds the blocks that were needed.

A read asks which blocks of its bytes are absent, waits until they are downloaded, and reads the file in the cache; what
is announced (`prefetch_bytes`) is downloaded ahead. See `shard_cache` for how a read notices an eviction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.remote.cache_space import PREFETCH_SHARE
from savable_pipeline.data.remote.downloader import Urgency
from savable_pipeline.data.remote.remote_files import RemotePlace
from savable_pipeline.data.remote.shard_cache import LEFT_OUT, USED, WANTED, runs
from savable_pipeline.data.remote.version_pins import pin_whole, whole_version
from savable_pipeline.data.shards.file_bytes import FileBytes
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.download_blocks import DownloadBlocks
from savable_pipeline.data.stores.downloaded_files import TRIES, DownloadedFiles
from savable_pipeline.data.stores.shard_files import T
from savable_pipeline.errors import ShardError

_fetching: dict[Path, threading.Lock] = {}  # what lies beside files
_AHEAD = 1 << 20  # bytes that are downloaded with what is read, at most


class IndexedBytes(Protocol):
    """What an index says of files: what they must be when they are first read; `numbers` are theirs in it."""

    numbers: Rows

    def check_rows(self, shard: int, /) -> None:
        """Raises `ShardError` if what the index says of a file is damaged."""

    def is_as_indexed(self, shard: int, file: FileBytes, /) -> bool:
        """Whether a file of the right size is the one that was indexed."""


class CachedBlocks(DownloadedFiles):
    """The files of a place in the cache. They are checked against what is `indexed`, if that is given.

    With `all_used` every byte is read once an epoch: if all fit into the cache, they are downloaded in pieces of 8 MiB.
    """

    def __init__(
        self,
        place: RemotePlace,
        indexed: IndexedBytes | None = None,
        *,
        all_used: bool = False,
    ) -> None:
        numbers = np.arange(len(place.cached.shards)) if indexed is None else indexed.numbers
        super().__init__(place, numbers)
        self._indexed = indexed
        size = int(self._cached.shards.sizes[self._numbers].sum())
        self._blocks = DownloadBlocks(self._cached, in_pieces=all_used and size <= place.session.limit * PREFETCH_SHARE)
        self._checked: set[int] = set()
        self._beside: set[Path] = set()  # that were found to be as they were downloaded

    def _forget_announced(self) -> None:
        self._blocks.forget_announced()

    def file(self, shard: int) -> FileBytes:
        """A file as formats read it."""
        return CachedBytes(self, shard)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of a file from `offset` on, downloaded first where they are absent.

        Raises `ShardError` if the file is not as it was indexed or too short, `RemoteError`.
        """
        return self.guarded(shard, offset, size, lambda: super(CachedBlocks, self).read(shard, offset, size))

    def read_into(self, array: NDArray[np.uint8], shard: int, offset: int) -> None:
        """Fills `array`, uint8 (bytes,), with bytes of a file. Raises the errors of `read`."""
        read_into = super().read_into
        self.guarded(shard, offset, len(array), lambda: read_into(array, shard, offset))

    def has(self, shard: int, offset: int, size: int) -> bool:
        """Whether these bytes of a file are here."""
        return bool((self._cached.present[self._rows(shard, offset, size)] & 1).all())

    def read_on(self, shard: int, offset: int, size: int, stop: int) -> bytes:
        """The same as `read`; if they are absent, and what lies before them is here, as many bytes before `stop` are
        downloaded with them as lie before them, at most 1 MiB.
        """
        rows, present = self._rows(shard, offset, size), self._cached.present
        absent = rows.start + np.flatnonzero(present[rows] & 1 == 0)[:1]
        if not len(absent):
            return self.read(shard, offset, size)
        row, least = int(absent[0]), int(self._cached.firsts[self._numbers[shard]])
        block = self._cached.extent(least, least + 1)[1]
        before = present[max(least, row - _AHEAD // block) : row][::-1] & 1  # the nearest first
        ahead = self._cached.extent(row, row + 1)[0] + block * int(np.cumprod(before).sum())
        return self.read(shard, offset, max(size, min(stop, ahead) - offset))[:size]

    def guarded(self, shard: int, offset: int, size: int, read: Callable[[], T]) -> T:
        """What `read` gives once the bytes are there; again if they were evicted while it read."""
        if shard not in self._checked:
            self._check(shard)
        rows = self._rows(shard, offset, size)
        present, verified = self._cached.present[rows], self._cached.verified[rows]  # which is 0, or odd
        for _ in range(TRIES):
            seen = present.tobytes()  # compared faster than arrays
            if (verified.tobytes() == seen and 0 not in seen) or self._are_right(shard, rows):
                try:
                    found = read()
                    if present.tobytes() == seen:
                        self._cached.used[rows] = USED
                        return found
                except ShardError:
                    if present.tobytes() == seen and self.is_right(shard, rows.start, rows.stop):
                        raise
            self._download(shard, rows)
        self._check_room(shard, rows.start, rows.stop, TRIES)
        raise AssertionError

    def _are_right(self, shard: int, rows: slice) -> bool:
        """Whether these rows are here, as they were downloaded; each is looked at once a process."""
        present = self._cached.present[rows]
        fresh = rows.start + np.flatnonzero(self._cached.verified[rows] != present)
        return bool((present & 1).all()) and all(self.is_right(shard, row, stop) for row, stop in runs(fresh))

    def _check(self, shard: int) -> None:
        """Raises `ShardError` unless the file is the one that was indexed."""
        self._checked.add(shard)  # first: the check reads the file
        try:
            if self._indexed is not None:
                self.fetch_rows(self._numbers[[shard]])
                self._indexed.check_rows(shard)
                if not self._indexed.is_as_indexed(shard, self.file(shard)):
                    self._cached.note_changed(int(self._numbers[shard]))
                    raise ShardError(
                        f"{self.name(shard)}: not as its index says: the file was rewritten since. Start again to "
                        "index it, or put the old file back",
                        reason="changed shard",
                    )
        except BaseException:
            self._checked.discard(shard)
            raise

    def entry(self, shard: int) -> tuple[str, int]:
        """Name and size in bytes of a file."""
        number = int(self._numbers[shard])
        return self._cached.shards.names[number], int(self._cached.shards.sizes[number])

    def beside(self, name: str) -> Path | None:
        """A local copy of what lies beside the files under this name, downloaded if it is not here."""
        path = self.place.beside(name)
        with _fetching.setdefault(path, threading.Lock()):  # several files may have it beside them
            if path not in self._beside and whole_version(path) is None:
                stat = self._call("stat", self.place.url, name)
                if stat is None:
                    return None
                pin_whole(path, self._call("whole", self.place.url, name, stat[0], str(path)))
            self._beside.add(path)
        return path

    def prefetch_bytes(self, shard: int, begins: Rows, ends: Rows, *, soon: bool = False) -> None:
        """Has these bytes of a file downloaded, each from one of `begins` up to one of `ends`, and kept until read."""
        rows = self._blocks_of(shard, begins, ends)
        if not len(rows):
            return
        absent = rows[self._cached.present[rows] & 1 == 0]
        self._cached.used[rows] = WANTED
        self._cached.touched[self._numbers[shard]] = time.time()
        for block in self._blocks.announce(absent) if len(absent) else []:
            self._prefetch(Urgency.SOON if soon else Urgency.LATER, *self._request(*block), [], False)

    def _blocks_of(self, shard: int, begins: Rows, ends: Rows) -> Rows:
        """The rows of the cache with these bytes, ascending."""
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        slices = [self._rows(shard, begin, end - begin) for begin, end in pairs]
        return np.unique(np.concatenate([np.arange(rows.start, rows.stop) for rows in slices])) if slices else begins

    def _rows(self, shard: int, offset: int, size: int) -> slice:
        """The rows of the cache with these bytes of a file."""
        row_from, number = self._cached.layout.row_from, int(self._numbers[shard])
        if size <= 0:
            return slice(0, 0)
        return slice(row_from(number, offset + 1) - 1, row_from(number, offset + size))

    def _download(self, shard: int, rows: slice) -> None:
        """Waits until these rows are downloaded, with the rest of their pieces if these are downloaded whole."""
        absent = rows.start + np.flatnonzero(self._cached.present[rows] & 1 == 0)
        if not len(absent):
            return
        self._check_room(shard, rows.start, rows.stop)
        whole = self._blocks.in_pieces and not (self._cached.used[absent] == LEFT_OUT).any()
        parts = self._blocks.parts(absent, whole=whole)
        for (row, stop), needed in parts[1:]:
            self._prefetch(Urgency.SOON, *self._request(row, stop), needed, False)
        for (row, stop), needed in parts:
            self._call(*self._request(row, stop), needed, True)


class CachedBytes:
    """A file of `CachedBlocks` as formats read it."""

    def __init__(self, files: CachedBlocks, shard: int) -> None:
        self._files, self._shard = files, shard
        self._whole_name, self.size = files.entry(shard)
        self.name = self._whole_name.rpartition("/")[2]

    def read(self, offset: int, size: int) -> bytes:
        """See `FileBytes.read`."""
        return self._files.read(self._shard, offset, max(0, min(size, self.size - offset)))

    def expect(self, places: list[tuple[int, int]]) -> None:
        """See `FileBytes.expect`."""
        begins, sizes = np.array(places, dtype=np.int64).reshape(-1, 2).T
        ends = np.minimum(begins + sizes, self.size)
        self._files.prefetch_bytes(self._shard, begins, ends, soon=True)

    def beside(self, suffix: str, name: str = "") -> Path | None:
        """See `FileBytes.beside`."""
        return self._files.beside(suffix if name else str(PurePosixPath(self._whole_name).with_suffix(suffix)))

    def fileno(self) -> int:
        """See `FileBytes.fileno`."""
        raise OSError(f"{self._files.name(self._shard)}: no file on a disk")
