"""The local cache of remote shards: files with holes, shared by all processes of a node.

    CACHE/room                      see `cache_room`
    CACHE/DATASET/lock              held while an index is fetched or made
    CACHE/DATASET/scan/…            shards that are being indexed
    CACHE/DATASET/VERSION/index     the dataset's index; VERSION is its checksum
    CACHE/DATASET/VERSION/flags     boot id 56 │ evictions u64 │ touched f64 (shards,) │ present u8 (rows,)
                                    │ used u8 (rows,) │ synced u8 (shards,)
    CACHE/DATASET/VERSION/N.tar     shard number N of the index: only the samples that were needed, the rest are holes

A row is a sample of the index. Its bytes are written first, and then its `present` becomes odd; when it is evicted
`present` becomes even first, and then its bytes become a hole. So whoever reads it and finds the same odd number
before and after has read the right bytes; no one reads a part. `evictions` counts up between the two steps of an
eviction: whoever finds it, then all rows present, and after reading any of them the same count again, needs to look at
no row. Both changes are made under a lock on these very bytes
of the shard's file, which dies with the process that holds it. `used` says whether a plan still needs the row: WANTED,
USED, or LEFT_OUT when it was announced and there was no room for it. `touched` is when a shard was last in use, in
seconds since 1970: files have such a time too, but setting it takes a disk milliseconds.

A machine that goes down may lose what it had not written to disk: after a start (another boot id) only the shards
stay that were complete and had been synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.errors import ShardError
from savable_pipeline.shard_index import ShardIndex
from savable_pipeline.sparse_file import holes, locked, punch_hole
from savable_pipeline.tar import padded

log = logging.getLogger(__name__)

WANTED, USED, LEFT_OUT = 0, 1, 2
_BOOT, _HEAD = 56, 64
_BLOCK = 4096  # what disks give and take

Flags = NDArray[np.uint8]


class CachedShards:
    """What the cache holds of one version of a dataset: its index, its flags and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = ShardIndex(folder / "index")
        self.rows = len(self.index.starts)
        self.firsts = np.cumsum([0, *(entry.samples for entry in self.index.shards)])  # int64 (shards + 1,)
        self._file = (folder / "flags").open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        if len(self._map) != flags_bytes(self.index):
            raise ValueError(f"{folder}/flags: {len(self._map)} bytes, which do not fit its index")
        shards = len(self.index.shards)
        self.touched: NDArray[np.float64] = np.frombuffer(self._map, np.float64, shards, offset=_HEAD)
        flags = np.frombuffer(self._map, np.uint8, offset=_HEAD + 8 * shards)
        self.evictions = memoryview(self._map)[_BOOT:_HEAD].cast("Q")  # uint64 (1,)
        self.present: Flags = flags[: self.rows]
        self.used: Flags = flags[self.rows : 2 * self.rows]
        self.synced: Flags = flags[2 * self.rows :]

    def hold(self) -> None:
        """Say that a reader needs what it has announced here, until this process and those forked from it are gone."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def is_current(self) -> bool:
        """Whether the flags are still those in the folder. Raises OSError if none are there."""
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
        return self.folder / f"{shard}.tar"

    def shard_of(self, row: int) -> int:
        """The number of the shard that holds a row."""
        return int(np.searchsorted(self.firsts, row, side="right")) - 1

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the shards that hold some rows."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """The first byte of a row, and the one after row `stop - 1` of the same shard."""
        index, last = self.index, stop - 1
        if stop < self.rows and stop < self.firsts[self.shard_of(row) + 1]:
            return index.starts[row], index.starts[stop]
        layout = index.layout(last)
        offset, size = index.place(last, len(layout.gaps) - 1, layout)
        return index.starts[row], offset + padded(size)

    def missing(self, row: int, stop: int) -> list[tuple[int, int]]:
        """The runs of rows from `row` to `stop - 1` that are not here."""
        return runs(row + np.flatnonzero(self.present[row:stop] & 1 == 0))

    def all_present(self, shards: NDArray[np.int64]) -> bool:
        """Whether every row of these shards is here."""
        absent = np.append(np.cumsum(self.present & 1 == 0), 0)  # absent[i]: in the rows up to i; absent[-1]: 0
        return bool((absent[self.firsts[shards + 1] - 1] == absent[self.firsts[shards] - 1]).all())

    def touch(self, rows: NDArray[np.int64]) -> None:
        """Take note that the shards of some rows are in use."""
        self.touched[self.shards_of(rows)] = time.time()

    def open(self, shard: int) -> int:
        """A descriptor of a shard's file, of its full size; empty if it was not there, or of another size."""
        fd = os.open(self.path(shard), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        size = self.index.shards[shard].size
        found = os.fstat(fd).st_size
        if found != size:
            if found or len(self._here(shard)):
                self._empty(shard, fd, size)
            os.ftruncate(fd, size)
        return fd

    def _here(self, shard: int) -> NDArray[np.int64]:
        """The rows of a shard that are here."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        return first + np.flatnonzero(self.present[first:end] & 1)

    def _empty(self, shard: int, fd: int, size: int) -> None:
        """Take away all rows of a shard whose file someone has deleted, cut or lengthened."""
        with locked(fd, 0, size):
            if os.fstat(fd).st_size != size:  # else another has done it
                for row, stop in runs(self._here(shard)):
                    self._gone(shard, slice(row, stop))
                os.ftruncate(fd, 0)

    def arrived(self, row: int, stop: int) -> None:
        """Take note that these rows were absent and have been written; the caller holds the lock on their bytes."""
        self.used[row:stop] = WANTED
        self.touched[self.shard_of(row)] = time.time()
        self.present[row:stop] += 1

    def sync_if_complete(self, shard: int, fd: int) -> None:
        """Bring a shard that is complete to the disk, once, so that it outlives a crash of the machine."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        if not self.synced[shard] and (self.present[first:end] & 1).all():
            os.fdatasync(fd)
            self.synced[shard] = 1

    def evict(self, shard: int, fd: int, *, wanted: bool) -> None:
        """Drop the rows of a shard that were used, or with `wanted` all; those that are being written stay."""
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        drop = self.present[first:end] & 1 == 1
        if not wanted:
            drop &= self.used[first:end] == USED
        for row, stop in runs(first + np.flatnonzero(drop)):
            around = self._rows_around(shard, row, stop)
            with contextlib.suppress(BlockingIOError), locked(fd, *self.extent(*around), wait=False):
                if not self.missing(row, stop):
                    self._gone(shard, slice(row, stop))
                    punch_hole(fd, *self._hole(row, stop, *around))

    def _gone(self, shard: int, rows: slice) -> None:
        """Take note, in this order, that some rows are not here any more; the caller holds the lock on their bytes."""
        self.synced[shard] = 0
        self.present[rows] += 1
        with (self.folder / "flags").open("r+b") as file, locked(file.fileno(), _BOOT, _HEAD):  # one at a time
            self.evictions[0] += 1

    def forget_holes(self, shard: int, fd: int) -> None:
        """Take away the rows that should be here and lie in holes of the file, which someone has emptied.

        Only whole blocks are holes: a small sample of which a part is gone is not noticed.
        """
        here = self._here(shard)
        if not len(here):
            return
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        starts = np.frombuffer(self.index.starts, np.uint64)[first:end].astype(np.int64)
        lost, behind = np.zeros(end - first, dtype=bool), self.extent(end - 1, end)[1]
        for begin, past in holes(fd):
            if begin < behind:
                low = max(int(np.searchsorted(starts, begin, side="right")) - 1, 0)
                lost[low : np.searchsorted(starts, past)] = True
        for row, stop in runs(here[lost[here - first]]):
            with contextlib.suppress(BlockingIOError), locked(fd, *self.extent(row, stop), wait=False):
                if not self.missing(row, stop):
                    log.warning("%s: samples are not there any more, and are fetched again", self.path(shard))
                    self._gone(shard, slice(row, stop))

    def _rows_around(self, shard: int, row: int, stop: int) -> tuple[int, int]:
        """The rows that share a block of the disk with rows `row` to `stop - 1`, those included."""
        (start, past), first = self.extent(row, stop), int(self.firsts[shard])
        starts = np.frombuffer(self.index.starts, np.uint64)[first : self.firsts[shard + 1]]
        low = np.searchsorted(starts, np.uint64(start // _BLOCK * _BLOCK), side="right") - 1
        high = np.searchsorted(starts, np.uint64(-(-past // _BLOCK) * _BLOCK), side="left")
        return min(first + max(int(low), 0), row), max(first + int(high), stop)

    def _hole(self, row: int, stop: int, low: int, high: int) -> tuple[int, int]:
        """The bytes of rows that were evicted, and the rest of the disk's blocks at both ends if nothing is there.

        Without that the block that two rows share would stay when both are gone.
        """
        start, past = self.extent(row, stop)
        if not (self.present[low:row] & 1).any():
            start = start // _BLOCK * _BLOCK
        if not (self.present[stop:high] & 1).any():
            past = -(-past // _BLOCK) * _BLOCK
        return start, past


def create_flags(folder: Path) -> None:
    """Make the flags of a version, or after a start of the machine drop what may not have reached the disk.

    Flags that are not of the right size are made anew, and what they told of is dropped. Raises `ShardError` if a
    process reads by them.
    """
    path, boot = folder / "flags", boot_id()
    index = ShardIndex(folder / "index")
    shards = len(index.shards)
    if not path.exists() or path.stat().st_size != flags_bytes(index):
        _drop_damaged(folder)
        aside = path.with_name("flags.tmp")
        with aside.open("wb") as file:
            file.write(boot)
            file.truncate(flags_bytes(index))
        aside.replace(path)
        return
    with path.open("r+b") as file:
        if file.read(_BOOT) == boot:
            return
    cached = CachedShards(folder)
    for shard in range(shards):
        if not cached.synced[shard]:
            cached.present[int(cached.firsts[shard]) : int(cached.firsts[shard + 1])] = 0
            cached.path(shard).unlink(missing_ok=True)
    with path.open("r+b") as file:
        file.write(boot)


def flags_bytes(index: ShardIndex) -> int:
    """How large the flags of an index's rows and shards are."""
    return _HEAD + 9 * len(index.shards) + 2 * len(index.starts)


def _drop_damaged(folder: Path) -> None:
    """Delete the shards of a version whose flags are damaged or gone: no one knows any more what is in them."""
    with contextlib.suppress(FileNotFoundError), (folder / "flags").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardError(
                f"{folder}: this cache is damaged; end the runs that read from it, and remove it"
            ) from None
    for shard in folder.glob("*.tar"):
        shard.unlink()


def boot_id() -> bytes:
    """What names the running of this machine since it was started: 56 bytes."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return (path.read_bytes().strip() if path.exists() else b"unknown").ljust(_BOOT, b"\0")


def runs(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending numbers as runs: first, and the one after the last."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1)
    first = rows[np.r_[0, breaks + 1]]
    last = rows[np.r_[breaks, len(rows) - 1]] + 1
    return list(zip(first.tolist(), last.tolist(), strict=True))
