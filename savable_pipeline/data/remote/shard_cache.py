"""The local cache of remote shards: files with holes, shared by all processes of a node (see cache_files.py).

    CACHE/UID/room                      see `cache_space`
    CACHE/UID/DATASET/*.json            which VERSION holds the index: the dataset's own, or one made here of some names
    CACHE/UID/DATASET/VERSION/index     what is known of the shards; in parts: see `IndexParts`
    CACHE/UID/DATASET/VERSION/N.tar     the rows of shard number N that are here; the rest is a hole (N.bytes: no tar)
    CACHE/UID/DATASET/VERSION/N.pin     the server's version (ETag) of that shard, of which all its rows are
    CACHE/UID/DATASET/VERSION/flags     format 56 │ evictions u64 │ touched f64 (shards,) │ checksum u32 (rows,)
                                        │ present u8 (rows,) │ used u8 (rows,) │ changed u8 (shards,)
    CACHE/UID/DATASET/VERSION/long/…    flags and N.bytes of the tars' long samples: see `LongSamples`
    …/metadata, …/VERSION/beside        files that are here whole; CACHE/UID/DATASET/scan: shards that are being indexed

A row is a sample of a tar, or a block of another file. `present` is a sequence lock. Under a lock on the row's bytes, a
download writes them, then their checksum, and makes `present` odd; an eviction makes it even, then makes a hole. Who
finds one odd number before and after a read has read what was downloaded, if the checksum fits the file: each process
looks once for each number. So nothing else need be on the disk in any order: what a crash, a kill or a bad disk has
spoiled is downloaded again. The pin is in the checksum: rows of another version never fit.

`used`: whether a row was read since it was announced. `touched`: the shard's last use, in seconds since 1970.
`changed`: the shard was found to be other than the index says, and is indexed again at the next start.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.files import replacing
from savable_pipeline.data.remote.cache_files import (
    PIECE,
    flock,
    locked,
    open_own,
    own_file,
    own_folder,
    punch_hole,
    read_pin,
    write_pin,
)
from savable_pipeline.data.remote.cache_layout import LONG_FOLDER, CacheLayout, open_layout
from savable_pipeline.errors import RemoteError, SavableError, ShardError

log = logging.getLogger(__name__)

WANTED, USED, LEFT_OUT = 0, 1, 2  # of rows: LEFT_OUT were announced, but there was no space
_FORMAT = b"savable_pipeline cache 3".ljust(56, b"\0")
_HEAD = 64
BLOCK = 4096  # bytes of a block of the disk

Flags = NDArray[np.uint8]


class ShardCache:
    """One version of a dataset in the cache: its rows, its flags and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version = folder.parent if folder.name == LONG_FOLDER else folder  # whose pins hold
        self.dataset = self._version.parent
        self.layout = open_layout(folder)
        self.shards, self.firsts, self.extent = self.layout.shards, self.layout.firsts, self.layout.extent
        self.rows = int(self.firsts[-1])
        for each in (self.dataset, self._version, folder):
            own_folder(each)
        self._file = open_own(folder / "flags", "r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        if len(self._map) != flags_bytes(self.layout) or self._map[: len(_FORMAT)] != _FORMAT:
            raise ValueError(f"{folder}/flags: damaged, or of another release")
        shards, rows = len(self.shards), self.rows
        self.evictions = memoryview(self._map)[len(_FORMAT) : _HEAD].cast("Q")  # uint64 (1,)
        self.touched: NDArray[np.float64] = np.frombuffer(self._map, np.float64, shards, offset=_HEAD)
        self._sums: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32, rows, offset=_HEAD + 8 * shards)
        flags = np.frombuffer(self._map, np.uint8, offset=_HEAD + 8 * shards + 4 * rows)
        self.present: Flags = flags[:rows]
        self.used: Flags = flags[rows : 2 * rows]
        self.changed: Flags = flags[2 * rows :]
        self.verified: Flags = np.zeros(rows, np.uint8)  # the `present` of which this process has compared the bytes
        self._views = self.present.data, self._sums.data, self.verified.data  # of which a number costs less
        self._seeds: dict[int, int] = {}  # of checksums, by shard
        self._dropped: set[int] = set()  # shards that were found to be damaged

    def hold(self) -> None:
        """Keeps announced rows from being evicted, until this process and its forks have ended."""
        flock(self._file, fcntl.LOCK_SH)

    def is_current(self) -> bool:
        """Whether the flags are still those in the folder, which may have been removed and made again."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), (self.folder / "flags").stat())
        except FileNotFoundError:
            return False

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{shard}{self.layout.suffix}"

    def pin(self, shard: int, version: str = "") -> str:
        """The server's version of a shard that is pinned; pins it to `version` if none is. Empty if none is."""
        path = self._version / f"{shard}.pin"
        if not (found := read_pin(path)) and version:
            aside = path.with_name(f"{shard}.{os.getpid()}.{threading.get_ident()}.tmp")
            write_pin(aside, version)
            try:
                path.hardlink_to(aside)  # the first of several processes wins
            except FileExistsError:
                if not read_pin(path):  # it is damaged
                    aside.replace(path)
            aside.unlink(missing_ok=True)
            found = read_pin(path)
        return found

    def forget(self, shard: int) -> None:
        """Drops what is here of a shard, which is another now, and its pin."""
        (self._version / f"{shard}.pin").unlink(missing_ok=True)
        fd = self.open(shard)
        try:
            self.evict(shard, fd, wanted=True)
        finally:
            os.close(fd)

    def forget_changed(self) -> None:
        """Drops what is here of shards that were found to be other than indexed, with the pins and the notes."""
        for shard in np.flatnonzero(self.changed).tolist():
            self.forget(shard)
            self.changed[shard] = 0

    def note_changed(self, shard: int) -> None:
        """Notes that a shard is other than it was indexed, so that the next start indexes it."""
        with open_own(self._version / "flags", "r+b") as file:
            os.pwrite(file.fileno(), b"\1", os.fstat(file.fileno()).st_size - len(self.shards) + shard)

    def shard_of(self, row: int) -> int:
        """The number of a row's shard."""
        return bisect.bisect_right(self.firsts.data, row) - 1

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each row's shard."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def missing(self, row: int, stop: int) -> list[tuple[int, int]]:
        """The runs of rows from `row` to `stop - 1` that are not present."""
        return runs(row + np.flatnonzero(self.present[row:stop] & 1 == 0))

    def all_present(self, shards: NDArray[np.int64]) -> bool:
        """Whether every row of these shards is present."""
        absent = np.append(np.cumsum(self.present & 1 == 0), 0)  # absent[i]: in the rows up to i; absent[-1]: 0
        return bool((absent[self.firsts[shards + 1] - 1] == absent[self.firsts[shards] - 1]).all())

    def open(self, shard: int) -> int:
        """A new descriptor of a shard's file, which is of its full size from then on."""
        fd = own_file(self.path(shard), os.O_RDWR | os.O_CREAT)
        size = int(self.shards.sizes[shard])
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
        return fd

    def mark_present(self, shard: int, fd: int, row: int, stop: int) -> None:
        """Marks rows of a shard that were absent and have been written as present; the caller holds the lock on their
        bytes, and has pinned the shard.
        """
        seed = self._seed(shard)
        self._sums[row:stop] = [self._checksum(fd, each, seed) for each in range(row, stop)]
        self.used[row:stop] = WANTED
        self.touched[shard] = time.time()
        self.present[row:stop] |= 1

    def is_right(self, shard: int, fd: int, row: int, stop: int) -> bool:
        """Whether rows of a shard, in an open file, are present and as they were downloaded.

        Those that are not are marked as evicted, and the first of a file is warned about.
        """
        right, (present, sums, verified), seed = True, self._views, self._seeds.get(shard, 0)
        for each in range(row, stop):
            seen = present[each]
            if seen & 1 and (self._checksum(fd, each, seed) == sums[each] or self._fits(shard, fd, each)):
                verified[each] = seen
                continue
            right = False
            if seen & 1:
                self._drop_damaged(shard, each)
        return right

    def _fits(self, shard: int, fd: int, row: int) -> bool:
        seed = self._seeds[shard] = self._seed(shard)  # it may be pinned to another version by now
        return self._checksum(fd, row, seed) == int(self._sums[row])

    def _seed(self, shard: int) -> int:
        return xxh3_64_intdigest(self.pin(shard).encode())

    def _checksum(self, fd: int, row: int, seed: int) -> int:
        start, past = self.extent(row, row + 1)
        if past - start <= PIECE:
            return xxh3_64_intdigest(os.pread(fd, past - start, start), seed) & 0xFFFFFFFF
        summed = xxh3_64(seed=seed)
        for begin in range(start, past, PIECE):
            summed.update(os.pread(fd, min(PIECE, past - begin), begin))
        return summed.intdigest() & 0xFFFFFFFF

    def _drop_damaged(self, shard: int, row: int) -> None:
        """Marks a row as evicted if it is present and not as it was downloaded, at first with all such rows of its
        shard; another process may be at them just now.
        """
        rows = range(int(self.firsts[shard]), int(self.firsts[shard + 1])) if shard not in self._dropped else [row]
        fd = self.open(shard)
        try:
            for each in rows:
                if self.present[each] & 1 and not self._fits(shard, fd, each):
                    extent = self.extent(each, each + 1)
                    with contextlib.suppress(BlockingIOError), locked(fd, *extent, wait=False):
                        if self.present[each] & 1 and not self._fits(shard, fd, each):
                            self._warn(shard, *extent)
                            self._mark_evicted(slice(each, each + 1))
        finally:
            os.close(fd)

    def _warn(self, shard: int, start: int, past: int) -> None:
        if shard not in self._dropped:
            self._dropped.add(shard)
            log.warning(
                "%s: bytes %d to %d were changed by a crash, the disk or a program. They are downloaded again",
                self.path(shard),
                start,
                past - 1,
            )

    def evict(self, shard: int, fd: int, *, wanted: bool) -> None:
        """Evicts the used rows of a shard, or with `wanted` all, and what was left of downloads that were killed; rows
        that are being written stay.
        """
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        if first == end or (wanted and self._evict(shard, fd, first, end)):
            return
        drop = self.present[first:end] & 1 == 1
        if not wanted:
            drop &= self.used[first:end] == USED
        for row, stop in runs(first + np.flatnonzero(drop)):
            self._evict(shard, fd, row, stop)

    def _evict(self, shard: int, fd: int, row: int, stop: int) -> bool:
        """Evicts rows, unless one of them or beside them is being written: then returns False."""
        around = self._rows_around(shard, row, stop)
        with contextlib.suppress(BlockingIOError), locked(fd, *self.extent(*around), wait=False):
            self._mark_evicted(slice(row, stop))
            punch_hole(fd, *self._hole(row, stop, *around))
            return True
        return False

    def _mark_evicted(self, rows: slice) -> None:
        """Marks rows as not present, then counts an eviction; the caller holds the lock on their bytes."""
        self.present[rows] += self.present[rows] & 1
        self.evictions[0] += 1

    def _rows_around(self, shard: int, row: int, stop: int) -> tuple[int, int]:
        """The rows that share a block of the disk with rows `row` to `stop - 1`, those included."""
        (start, past), first = self.extent(row, stop), int(self.firsts[shard])
        low = self.layout.row_from(shard, start // BLOCK * BLOCK + 1) - 1
        high = self.layout.row_from(shard, -(-past // BLOCK) * BLOCK)
        return min(max(low, first), row), max(high, stop)

    def _hole(self, row: int, stop: int, low: int, high: int) -> tuple[int, int]:
        """The bytes of evicted rows, extended to whole blocks of the disk if the neighbouring rows are absent too.

        (Otherwise a block that two rows share would stay when both are gone.)
        """
        start, past = self.extent(row, stop)
        if not (self.present[low:row] & 1).any():
            start = start // BLOCK * BLOCK
        if not (self.present[stop:high] & 1).any():
            past = -(-past // BLOCK) * BLOCK
        return start, past


def create_flags(folder: Path) -> None:
    """Makes the flags of a version; anew, with all shards dropped, if they are of another release or damaged.

    Raises `ShardError` if a process uses such flags.
    """
    path, size = folder / "flags", flags_bytes(open_layout(folder))
    with contextlib.suppress(FileNotFoundError), open_own(path, "rb") as file:
        if file.read(len(_FORMAT)) == _FORMAT and os.fstat(file.fileno()).st_size == size:
            return
        if is_held(folder):
            raise ShardError(
                f"{folder}: the cache is damaged or of another release. End the runs that use it, and remove it"
            )
        log.warning("%s: the cache is damaged or of another release. Its files are downloaded again", folder)
    for shard in cached_files(folder):  # nothing tells what is in them
        shard.unlink()
    with replacing(path) as new:
        new.write(_FORMAT)
        _allocate(new, size)


def _allocate(file: BinaryIO, size: int) -> None:
    """Gives a file of flags its bytes on the disk: a hole that cannot be filled would end who writes to its map.

    Raises `RemoteError` if the disk is full.
    """
    try:
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        Path(file.name).unlink(missing_ok=True)
        raise disk_error(error) from error


def disk_error(error: OSError) -> RemoteError:
    """The error for a cache that cannot be written."""
    return RemoteError(
        f"the cache of remote shards: {error}. Free space there, or set another folder by cache= or SAVABLE_CACHE"
    )


def flags_bytes(layout: CacheLayout) -> int:
    """The size of the flags file of a version, in bytes."""
    return _HEAD + 9 * len(layout.shards) + 6 * int(layout.firsts[-1])


def is_held(folder: Path) -> bool:
    """Whether a reader holds the version in this folder."""
    with open_own(folder / "flags", "rb") as file:
        try:
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cached_files(folder: Path) -> Iterator[Path]:
    """The files below a folder of the cache that hold bytes of shards."""
    yield from folder.rglob("*.tar")
    yield from folder.rglob("*.bytes")


def changed_shards(version: Path) -> set[str]:
    """The names of the shards of a version that were found to be other than its index says."""
    with contextlib.suppress(OSError, ValueError, SavableError):
        cached = ShardCache(version)
        return {cached.shards.names[number] for number in np.flatnonzero(cached.changed).tolist()}
    return set()


def runs(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The runs of consecutive numbers among ascending ones: first, and the one after the last."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1)
    first = rows[np.r_[0, breaks + 1]]
    last = rows[np.r_[breaks, len(rows) - 1]] + 1
    return list(zip(first.tolist(), last.tolist(), strict=True))
