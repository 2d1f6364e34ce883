"""The local cache of remote shards: files with holes, shared by all processes of a node.

    CACHE                           the user's own folder in the cache that is named: see `own_files`
    CACHE/room                      see `cache_space`
    CACHE/DATASET/lock              held while an index is downloaded or made
    CACHE/DATASET/own.json          the version of the index that lies beside the shards
    CACHE/DATASET/made-SPECS.json   that of an index made here, of what a user named so
    CACHE/DATASET/metadata          what lies in `.nv-meta` beside the shards
    CACHE/DATASET/scan/…            shards that are being indexed
    CACHE/DATASET/new-FILES         the version of files that are read to be indexed: its index has no rows
    CACHE/DATASET/VERSION/index     the dataset's index, or the parts of it that were needed: see `index_parts`.
                                    VERSION is its checksum
    CACHE/DATASET/VERSION/flags     boot id 56 │ evictions u64 │ touched f64 (shards,) │ present u8 (rows,)
                                    │ used u8 (rows,) │ synced u8 (shards,)
    CACHE/DATASET/changed           names of shards that were found to be other than indexed, a line each
    CACHE/DATASET/reindexed         those of them that were indexed again, here
    CACHE/DATASET/VERSION/N.pin     the server's version of shard number N (its ETag), of which all bytes are
    CACHE/DATASET/VERSION/N.tar     shard number N of the index: the samples that are present; the others are holes
    CACHE/DATASET/VERSION/N.bytes   the same of a file that is no tar
    CACHE/DATASET/VERSION/long/…    flags and N.bytes of the tars' long samples: see `long_samples`
    CACHE/DATASET/VERSION/beside/…  small files beside the shards, whole

A row is a sample of the index, or a block of bytes: see `cache_layout`. `present` is a sequence lock: a download writes
the row's bytes, then makes `present` odd; an eviction makes `present` even, then makes the bytes a hole. A reader that
finds the same odd number before and after its read has read the right bytes. `evictions` is incremented between the two
steps of an eviction: a reader that has found every row present may, as long as the count is the same after each read,
ignore `present`. Both changes are made under a lock on the row's bytes in the shard's file, which ends with the process
that holds it.

`used` says whether a reader still needs the row: WANTED, USED, or LEFT_OUT if it was announced but there was no space.
`touched` is the time of a shard's last use, in seconds since 1970 (setting a file's own time takes milliseconds).

A machine that crashes may lose bytes that had not reached the disk: after a restart (another boot id) only shards are
kept that were complete and synced.
"""

from __future__ import annotations

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

from savable_pipeline.core.files import replacing
from savable_pipeline.data.remote.cache_layout import LONG_FOLDER, CacheLayout, open_layout
from savable_pipeline.data.remote.own_files import open_own, own_file, own_folder
from savable_pipeline.data.remote.sparse_file import holes, locked, punch_hole
from savable_pipeline.errors import RemoteError, ShardError

log = logging.getLogger(__name__)

WANTED, USED, LEFT_OUT = 0, 1, 2
_BOOT, _HEAD = 56, 64
_BLOCK = 4096  # bytes of a block of the disk

Flags = NDArray[np.uint8]


class ShardCache:
    """One version of a dataset in the cache: its rows, its flags and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version = folder.parent if folder.name == LONG_FOLDER else folder  # whose pins hold
        self.dataset = self._version.parent
        self.layout = open_layout(folder)
        self.shards, self.firsts = self.layout.shards, self.layout.firsts
        self.rows = int(self.firsts[-1])
        for each in (self.dataset, self._version, folder):
            own_folder(each)
        self._file = open_own(folder / "flags", "r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        if len(self._map) != flags_bytes(self.layout):
            raise ValueError(f"{folder}/flags: {len(self._map)} bytes, which do not fit its index")
        shards = len(self.shards)
        self.touched: NDArray[np.float64] = np.frombuffer(self._map, np.float64, shards, offset=_HEAD)
        flags = np.frombuffer(self._map, np.uint8, offset=_HEAD + 8 * shards)
        self.evictions = memoryview(self._map)[_BOOT:_HEAD].cast("Q")  # uint64 (1,)
        self.present: Flags = flags[: self.rows]
        self.used: Flags = flags[self.rows : 2 * self.rows]
        self.synced: Flags = flags[2 * self.rows :]

    def hold(self) -> None:
        """Keeps announced rows from being evicted, until this process and its forks have ended."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def is_current(self) -> bool:
        """Whether the flags are still those in the folder. Raises OSError if there are none."""
        return os.path.samestat(os.fstat(self._file.fileno()), (self.folder / "flags").stat())

    def is_held(self) -> bool:
        """Whether a reader holds this version."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{shard}{self.layout.suffix}"

    def pin(self, shard: int, version: str = "") -> str:
        """The server's version of a shard that is pinned; pins it to `version` if none is. Empty if none is."""
        path = self._version / f"{shard}.pin"
        with contextlib.suppress(FileNotFoundError):
            return path.read_text()
        if version:
            aside = path.with_name(f"{shard}.{os.getpid()}.{threading.get_ident()}.tmp")
            with open_own(aside, "w") as file:
                file.write(version)
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(aside)  # the first of several processes wins
            aside.unlink()
            return path.read_text()
        return ""

    def forget(self, shard: int) -> None:
        """Drops what is here of a shard, which is another now, and its pin."""
        (self._version / f"{shard}.pin").unlink(missing_ok=True)
        fd = self.open(shard)
        try:
            self.evict(shard, fd, wanted=True)
        finally:
            os.close(fd)

    def shard_of(self, row: int) -> int:
        """The number of a row's shard."""
        return int(np.searchsorted(self.firsts, row, side="right")) - 1

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each row's shard."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """The first byte of a row, and the byte after row `stop - 1` of the same shard."""
        return self.layout.extent(row, stop)

    def missing(self, row: int, stop: int) -> list[tuple[int, int]]:
        """The runs of rows from `row` to `stop - 1` that are not present."""
        return runs(row + np.flatnonzero(self.present[row:stop] & 1 == 0))

    def all_present(self, shards: NDArray[np.int64]) -> bool:
        """Whether every row of these shards is present."""
        absent = np.append(np.cumsum(self.present & 1 == 0), 0)  # absent[i]: in the rows up to i; absent[-1]: 0
        return bool((absent[self.firsts[shards + 1] - 1] == absent[self.firsts[shards] - 1]).all())

    def touch(self, rows: NDArray[np.int64]) -> None:
        """Records that the shards of these rows are in use."""
        self.touched[self.shards_of(rows)] = time.time()

    def open(self, shard: int) -> int:
        """A new descriptor of a shard's file, of its full size; a file that had another size is emptied first."""
        fd = own_file(self.path(shard), os.O_RDWR | os.O_CREAT)
        size = int(self.shards.sizes[shard])
        found = os.fstat(fd).st_size
        if found != size:
            if found or len(self._present_rows(shard)):
                self._empty(shard, fd, size)
            os.ftruncate(fd, size)
        return fd

    def _present_rows(self, shard: int) -> NDArray[np.int64]:
        """The rows of a shard that are present."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        return first + np.flatnonzero(self.present[first:end] & 1)

    def _empty(self, shard: int, fd: int, size: int) -> None:
        """Marks all rows of a shard as evicted: its file was deleted, cut or lengthened by somebody."""
        with locked(fd, 0, size):
            if os.fstat(fd).st_size != size:  # else another process has done it
                for row, stop in runs(self._present_rows(shard)):
                    self._mark_evicted(shard, slice(row, stop))
                os.ftruncate(fd, 0)

    def mark_present(self, row: int, stop: int) -> None:
        """Marks rows that were absent and have been written as present; the caller holds the lock on their bytes."""
        self.used[row:stop] = WANTED
        self.touched[self.shard_of(row)] = time.time()
        self.present[row:stop] += 1

    def sync_if_complete(self, shard: int, fd: int) -> None:
        """Syncs a shard that is complete to the disk, once, so that it survives a crash of the machine."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        if not self.synced[shard] and (self.present[first:end] & 1).all():
            os.fdatasync(fd)
            self.synced[shard] = 1

    def evict(self, shard: int, fd: int, *, wanted: bool) -> None:
        """Evicts the used rows of a shard, or with `wanted` all; rows that are being written stay."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        drop = self.present[first:end] & 1 == 1
        if not wanted:
            drop &= self.used[first:end] == USED
        for row, stop in runs(first + np.flatnonzero(drop)):
            around = self._rows_around(shard, row, stop)
            with contextlib.suppress(BlockingIOError), locked(fd, *self.extent(*around), wait=False):
                if not self.missing(row, stop):
                    self._mark_evicted(shard, slice(row, stop))
                    punch_hole(fd, *self._hole(row, stop, *around))

    def _mark_evicted(self, shard: int, rows: slice) -> None:
        """Marks rows as not present, then counts an eviction; the caller holds the lock on their bytes."""
        self.synced[shard] = 0
        self.present[rows] += 1
        with open_own(self.folder / "flags", "r+b") as file, locked(file.fileno(), _BOOT, _HEAD):  # one at a time
            self.evictions[0] += 1

    def forget_holes(self, shard: int, fd: int) -> None:
        """Marks rows as evicted that should be present and lie in holes of the file: somebody has emptied it.

        Only whole blocks are holes: a small sample that is gone in part is not noticed.
        """
        here = self._present_rows(shard)
        if not len(here):
            return
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        lost, behind = np.zeros(end - first, dtype=bool), self.extent(end - 1, end)[1]
        for begin, past in holes(fd):
            if begin < behind:
                low = max(self.layout.row_from(shard, begin + 1) - 1 - first, 0)
                lost[low : self.layout.row_from(shard, past) - first] = True
        for row, stop in runs(here[lost[here - first]]):
            with contextlib.suppress(BlockingIOError), locked(fd, *self.extent(row, stop), wait=False):
                if not self.missing(row, stop):
                    log.warning("%s: samples are gone from the file, and are downloaded again", self.path(shard))
                    self._mark_evicted(shard, slice(row, stop))

    def _rows_around(self, shard: int, row: int, stop: int) -> tuple[int, int]:
        """The rows that share a block of the disk with rows `row` to `stop - 1`, those included."""
        (start, past), first = self.extent(row, stop), int(self.firsts[shard])
        low = self.layout.row_from(shard, start // _BLOCK * _BLOCK + 1) - 1
        high = self.layout.row_from(shard, -(-past // _BLOCK) * _BLOCK)
        return min(max(low, first), row), max(high, stop)

    def _hole(self, row: int, stop: int, low: int, high: int) -> tuple[int, int]:
        """The bytes of evicted rows, extended to whole blocks of the disk if the neighbouring rows are absent too.

        (Otherwise a block that two rows share would stay when both are gone.)
        """
        start, past = self.extent(row, stop)
        if not (self.present[low:row] & 1).any():
            start = start // _BLOCK * _BLOCK
        if not (self.present[stop:high] & 1).any():
            past = -(-past // _BLOCK) * _BLOCK
        return start, past


def create_flags(folder: Path) -> None:
    """Makes the flags of a version, or after a restart of the machine drops shards that may not have reached the disk.

    Flags of a wrong size are made anew, and all shards dropped. Raises `ShardError` if a process uses such flags.
    """
    path, boot = folder / "flags", boot_id()
    layout = open_layout(folder)
    if not path.exists() or path.stat().st_size != flags_bytes(layout):
        _drop_damaged(folder)
        with replacing(path) as file:
            file.write(boot)
            _allocate(file, flags_bytes(layout))
        return
    with open_own(path, "r+b") as file:
        if file.read(_BOOT) == boot:
            return
    cached = ShardCache(folder)
    unknown = set() if layout.parts is None else set(layout.parts.check())
    for shard in range(len(layout.shards)):
        if not cached.synced[shard] or shard in unknown:
            cached.present[int(cached.firsts[shard]) : int(cached.firsts[shard + 1])] = 0
            cached.path(shard).unlink(missing_ok=True)
    with open_own(path, "r+b") as file:
        file.write(boot)


def _allocate(file: BinaryIO, size: int) -> None:
    """Gives a file of flags its bytes on the disk: a hole that cannot be filled would end who writes to its map.

    Raises `RemoteError` if the disk is full.
    """
    try:
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        Path(file.name).unlink(missing_ok=True)
        raise RemoteError(
            f"the cache of remote shards: {error}; see that its disk has room and can be written, or give another "
            "folder as cache= or SAVABLE_CACHE"
        ) from error


def flags_bytes(layout: CacheLayout) -> int:
    """The size of the flags file of a version, in bytes."""
    return _HEAD + 9 * len(layout.shards) + 2 * int(layout.firsts[-1])


def _drop_damaged(folder: Path) -> None:
    """Deletes the shards of a version whose flags are damaged or gone: nothing tells what is in them."""
    with contextlib.suppress(FileNotFoundError), open_own(folder / "flags", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardError(
                f"{folder}: this cache is damaged; end the runs that read from it, and remove it"
            ) from None
    for shard in cached_files(folder):
        shard.unlink()


def cached_files(folder: Path) -> Iterator[Path]:
    """The files below a folder of the cache that hold bytes of shards."""
    yield from folder.rglob("*.tar")
    yield from folder.rglob("*.bytes")


def boot_id() -> bytes:
    """The identity of this machine's present boot: 56 bytes."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return (path.read_bytes().strip() if path.exists() else b"unknown").ljust(_BOOT, b"\0")


def runs(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The runs of consecutive numbers among ascending ones: first, and the one after the last."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1)
    first = rows[np.r_[0, breaks + 1]]
    last = rows[np.r_[breaks, len(rows) - 1]] + 1
    return list(zip(first.tolist(), last.tolist(), strict=True))
