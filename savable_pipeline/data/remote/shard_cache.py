"""Local cache of remote shards, shared by all processes of a node.

    CACHE/UID/
      room              bytes in use, see `cache_space`
      DATASET/
        *.json          the VERSION with the index, downloaded or built here
        scan            shards that are being indexed
        metadata        complete metadata files
        VERSION/
          index         index of the shards, see `IndexParts`
          N.tar, .bytes rows of shard N, a sparse file
          N.pin         ETag of shard N
          flags         format 56 │ evictions u64 │ touched f64 (shards,)
                        │ checksum u32 (rows,) │ present u8 (rows,)
                        │ used u8 (rows,) │ changed u8 (shards,)
          long          large samples of tars, see `LongSamples`
          beside        complete sidecar files

A row is a sample of a tar or a block of another file. Rows that are not cached are holes in the sparse file. The rows
from `row` to `stop - 1` have the bytes from `begin_byte` to `end_byte - 1` of their shard.

`present` is a sequence lock. A download locks the bytes of a row, writes them and the checksum, and makes `present`
odd. An eviction makes it even and punches a hole. A read is valid if it sees the same odd number before and after and
the checksum matches. Each process compares the checksum once per number.

Disk writes need no order. A row damaged by a crash, a kill or a bad disk fails its checksum and is downloaded again. So
does a row of another version, because the checksum covers the ETag.

`used` says whether a row was read since it was requested in advance. `touched` is the shard's last use, in seconds
since 1970. `changed` says that a shard differs from its index. The next start indexes such a shard again.

A remote index may be fetched in parts: its head at once, the rows of a shard before use.

    VERSION/index        the head and, after it, the rows that are cached; the rest is a hole
    VERSION/parts        uint8 (shards,): 1 if the rows of the shard are cached. Without this file, all are
    VERSION/parts.pin    the ETag of the index

Rows of another version are rejected. Rows of a shard are compared with the checksum in the head before they are
written. So processes that fetch the same rows at the same time write the same bytes.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.files import replace_file, replacing
from savable_pipeline.data.remote.cache_files import (
    PIECE,
    flock,
    open_private,
    private_file,
    private_folder,
    punch_hole,
    range_lock,
    read_pin,
    write_pin,
)
from savable_pipeline.data.shards.index import PARTS, ShardIndex, index_name
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar import padded
from savable_pipeline.data.shards.tar_format import TarIndex, open_tar_index
from savable_pipeline.errors import RemoteError, SavableError, ShardError

log = logging.getLogger(__name__)

WANTED, USED, NO_SPACE = 0, 1, 2  # flags of rows: those with NO_SPACE were requested in advance, but there was no space
_FORMAT = b"savable_pipeline cache 3".ljust(56, b"\0")
_HEAD = 64  # bytes of the flags before `touched`
DISK_BLOCK = 4096  # bytes

Flags = NDArray[np.uint8]


class ShardCache:
    """One version of a dataset in the cache: its rows, flags and files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version = folder.parent if folder.name == LONG_FOLDER else folder  # the folder with the pins
        self.dataset = self._version.parent
        self.layout = open_layout(folder)
        self.shards, self.firsts, self.extent = self.layout.shards, self.layout.firsts, self.layout.extent
        self.rows = int(self.firsts[-1])
        for each in (self.dataset, self._version, folder):
            private_folder(each)
        self._file = open_private(folder / "flags", "r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        if len(self._map) != flags_bytes(self.layout) or self._map[: len(_FORMAT)] != _FORMAT:
            raise ValueError(f"{folder}/flags: damaged, or of another release")
        shards, rows = len(self.shards), self.rows
        self.evictions = memoryview(self._map)[len(_FORMAT) : _HEAD].cast("Q")  # uint64 (1,)
        self.touched: NDArray[np.float64] = np.frombuffer(self._map, np.float64, shards, offset=_HEAD)
        self._checksums: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32, rows, offset=_HEAD + 8 * shards)
        flags = np.frombuffer(self._map, np.uint8, offset=_HEAD + 8 * shards + 4 * rows)
        self.present: Flags = flags[:rows]
        self.used: Flags = flags[rows : 2 * rows]
        self.changed: Flags = flags[2 * rows :]
        self.verified: Flags = np.zeros(rows, np.uint8)  # the `present` at which this process compared the checksum
        # Reading one number is faster with these.
        self._views = self.present.data, self._checksums.data, self.verified.data
        self._seeds: dict[int, int] = {}  # seeds of checksums, by shard
        self._dropped: set[int] = set()  # shards that were found to be damaged

    def protect(self) -> None:
        """Protect rows requested in advance from eviction, until this process ends.

        The same holds for its forks.
        """
        flock(self._file, fcntl.LOCK_SH)

    def is_current(self) -> bool:
        """Return whether the folder still has these flags, and not new ones."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), (self.folder / "flags").stat())
        except FileNotFoundError:
            return False

    def path(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{shard}{self.layout.suffix}"

    def pin(self, shard: int, version: str = "") -> str:
        """Return the pinned version of a shard on the server, or "".

        If none is pinned, pin `version`.
        """
        path = self._version / f"{shard}.pin"
        if not (found := read_pin(path)) and version:
            temporary = path.with_name(f"{shard}.{os.getpid()}.{threading.get_ident()}.tmp")
            write_pin(temporary, version)
            try:
                path.hardlink_to(temporary)  # the first of several processes wins
            except FileExistsError:
                if not read_pin(path):  # the existing pin is damaged
                    temporary.replace(path)
            temporary.unlink(missing_ok=True)
            found = read_pin(path)
        return found

    def forget(self, shard: int) -> None:
        """Drop the cached rows and the pin of a shard that has changed."""
        (self._version / f"{shard}.pin").unlink(missing_ok=True)
        fd = self.open(shard)
        try:
            self.evict(shard, fd, also_unused=True)
        finally:
            os.close(fd)

    def forget_changed(self) -> None:
        """Drop the cached rows, pins and `changed` flags of all changed shards."""
        for shard in np.flatnonzero(self.changed).tolist():
            self.forget(shard)
            self.changed[shard] = 0

    def note_changed(self, shard: int) -> None:
        """Record that a shard differs from its index, so that the next start indexes it."""
        with open_private(self._version / "flags", "r+b") as file:
            os.pwrite(file.fileno(), b"\1", os.fstat(file.fileno()).st_size - len(self.shards) + shard)

    def shard_of(self, row: int) -> int:
        """Return the number of a row's shard."""
        return bisect.bisect_right(self.firsts.data, row) - 1

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each row's shard."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def missing(self, row: int, stop: int) -> list[tuple[int, int]]:
        """Return the absent rows from `row` to `stop - 1`, as runs (first, last + 1)."""
        return runs(row + np.flatnonzero(self.present[row:stop] & 1 == 0))

    def all_present(self, shards: NDArray[np.int64]) -> bool:
        """Return whether every row of these shards is present."""
        # absent[i] is the number of absent rows up to i, which is included. absent[-1] is 0.
        absent = np.append(np.cumsum(self.present & 1 == 0), 0)
        return bool((absent[self.firsts[shards + 1] - 1] == absent[self.firsts[shards] - 1]).all())

    def open(self, shard: int) -> int:
        """Return a new descriptor of a shard's file, extended to its full size."""
        fd = private_file(self.path(shard), os.O_RDWR | os.O_CREAT)
        size = int(self.shards.sizes[shard])
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
        return fd

    def mark_present(self, shard: int, fd: int, row: int, stop: int) -> None:
        """Mark rows of a shard as present after writing them.

        They were absent before. The caller has locked their bytes and pinned the shard.
        """
        seed = self._seed(shard)
        self._checksums[row:stop] = [self._checksum(fd, each, seed) for each in range(row, stop)]
        self.used[row:stop] = WANTED
        self.touched[shard] = time.time()
        self.present[row:stop] |= 1

    def is_valid(self, shard: int, fd: int, row: int, stop: int) -> bool:
        """Return whether rows of a shard, in an open file, are present and undamaged.

        Damaged rows are marked as evicted. The first one of each file causes a warning.
        """
        present, checksums, verified = self._views
        valid, seed = True, self._seeds.get(shard, 0)
        for each in range(row, stop):
            sequence_number = present[each]
            is_present = sequence_number & 1
            matches = is_present and self._checksum(fd, each, seed) == checksums[each]
            if matches or (is_present and self._matches_checksum(shard, fd, each)):
                verified[each] = sequence_number
                continue
            valid = False
            if is_present:
                self._drop_damaged(shard, each)
        return valid

    def _matches_checksum(self, shard: int, fd: int, row: int) -> bool:
        """Return whether a row matches its checksum, by the current pin of its shard."""
        seed = self._seeds[shard] = self._seed(shard)  # the shard may be pinned to another version by now
        return self._checksum(fd, row, seed) == int(self._checksums[row])

    def _seed(self, shard: int) -> int:
        """Return the seed of a shard's checksums, which covers its pinned version."""
        return xxh3_64_intdigest(self.pin(shard).encode())

    def _checksum(self, fd: int, row: int, seed: int) -> int:
        begin_byte, end_byte = self.extent(row, row + 1)
        if end_byte - begin_byte <= PIECE:
            return xxh3_64_intdigest(os.pread(fd, end_byte - begin_byte, begin_byte), seed) & 0xFFFFFFFF
        summed = xxh3_64(seed=seed)
        for offset in range(begin_byte, end_byte, PIECE):
            summed.update(os.pread(fd, min(PIECE, end_byte - offset), offset))
        return summed.intdigest() & 0xFFFFFFFF

    def _drop_damaged(self, shard: int, row: int) -> None:
        """Mark a row as evicted if it is present and damaged.

        The first call for a shard checks all rows of the shard. Rows that another process is reading or writing are
        skipped.
        """
        rows = range(int(self.firsts[shard]), int(self.firsts[shard + 1])) if shard not in self._dropped else [row]
        fd = self.open(shard)
        try:
            for each in rows:
                if self.present[each] & 1 and not self._matches_checksum(shard, fd, each):
                    extent = self.extent(each, each + 1)
                    with contextlib.suppress(BlockingIOError), range_lock(fd, *extent, wait=False):
                        if self.present[each] & 1 and not self._matches_checksum(shard, fd, each):
                            self._warn_of_damage(shard, *extent)
                            self._mark_evicted(slice(each, each + 1))
        finally:
            os.close(fd)

    def _warn_of_damage(self, shard: int, begin_byte: int, end_byte: int) -> None:
        if shard not in self._dropped:
            self._dropped.add(shard)
            log.warning(
                "%s: bytes %d to %d were changed by a crash, the disk or a program. They are downloaded again",
                self.path(shard),
                begin_byte,
                end_byte - 1,
            )

    def evict(self, shard: int, fd: int, *, also_unused: bool) -> None:
        """Evict the used rows of a shard.

        With `also_unused`, rows that were requested in advance and not used yet are evicted too. Then remains of killed
        downloads are removed too. Rows that are being written stay.
        """
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        if first == end or (also_unused and self._evict(shard, fd, first, end)):
            return
        drop = self.present[first:end] & 1 == 1
        if not also_unused:
            drop &= self.used[first:end] == USED
        for row, stop in runs(first + np.flatnonzero(drop)):
            self._evict(shard, fd, row, stop)

    def _evict(self, shard: int, fd: int, row: int, stop: int) -> bool:
        """Evict rows. Return False if one of them or its neighbours is being written."""
        around = self._rows_around(shard, row, stop)
        with contextlib.suppress(BlockingIOError), range_lock(fd, *self.extent(*around), wait=False):
            self._mark_evicted(slice(row, stop))
            punch_hole(fd, *self._hole(row, stop, *around))
            return True
        return False

    def _mark_evicted(self, rows: slice) -> None:
        """Mark rows as absent and count an eviction. The caller has locked their bytes."""
        self.present[rows] += self.present[rows] & 1
        self.evictions[0] += 1

    def _rows_around(self, shard: int, row: int, stop: int) -> tuple[int, int]:
        """Return the range of rows that share a disk block with rows `row` to `stop - 1`, which it includes."""
        (begin_byte, end_byte), first = self.extent(row, stop), int(self.firsts[shard])
        low = self.layout.row_from(shard, begin_byte // DISK_BLOCK * DISK_BLOCK + 1) - 1
        high = self.layout.row_from(shard, -(-end_byte // DISK_BLOCK) * DISK_BLOCK)
        return min(max(low, first), row), max(high, stop)

    def _hole(self, row: int, stop: int, low: int, high: int) -> tuple[int, int]:
        """Return the bytes of evicted rows, extended to whole disk blocks on each side where the neighbors are absent.

        `low` and `high` are those of `_rows_around`. Without the extension, a block that two rows share would remain
        after both are evicted.
        """
        begin_byte, end_byte = self.extent(row, stop)
        if not (self.present[low:row] & 1).any():
            begin_byte = begin_byte // DISK_BLOCK * DISK_BLOCK
        if not (self.present[stop:high] & 1).any():
            end_byte = -(-end_byte // DISK_BLOCK) * DISK_BLOCK
        return begin_byte, end_byte


def create_flags(folder: Path) -> None:
    """Create the flags of a version.

    Flags that are damaged or of another release are replaced, and all shards dropped. Raises `ShardError` if a process
    uses such flags.
    """
    path, size = folder / "flags", flags_bytes(open_layout(folder))
    with contextlib.suppress(FileNotFoundError), open_private(path, "rb") as file:
        if file.read(len(_FORMAT)) == _FORMAT and os.fstat(file.fileno()).st_size == size:
            return
        if is_protected(folder):
            raise ShardError(
                f"{folder}: the cache is damaged or of another release. End the runs that use it, and remove it"
            )
        log.warning("%s: the cache is damaged or of another release. Its files are downloaded again", folder)
    for shard in cached_files(folder):  # without flags their contents are unknown
        shard.unlink()
    with replacing(path) as new:
        new.write(_FORMAT)
        _allocate(new, size)


def _allocate(file: BinaryIO, size: int) -> None:
    """Allocate the bytes of a flags file on the disk.

    Writing to a mapped hole of a full disk would kill the process. Raises `RemoteError` if the disk is full.
    """
    try:
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        Path(file.name).unlink(missing_ok=True)
        raise disk_error(error) from error


def disk_error(error: OSError) -> RemoteError:
    """Return the error for a cache that cannot be written."""
    return RemoteError(
        f"the cache of remote shards: {error}. Free space there, or set another folder by cache= or SAVABLE_CACHE"
    )


def flags_bytes(layout: CacheLayout) -> int:
    """Return the size of the flags file of a version."""
    return _HEAD + 9 * len(layout.shards) + 6 * int(layout.firsts[-1])


def is_protected(folder: Path) -> bool:
    """Return whether a reader uses the version in this folder."""
    with open_private(folder / "flags", "rb") as file:
        try:
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cached_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder of the cache that have bytes of shards."""
    yield from folder.rglob("*.tar")
    yield from folder.rglob("*.bytes")


def changed_shards(version: Path) -> set[str]:
    """Return the names of the shards of a version that differ from its index."""
    with contextlib.suppress(OSError, ValueError, SavableError):
        cached = ShardCache(version)
        return {cached.shards.names[number] for number in np.flatnonzero(cached.changed).tolist()}
    return set()


def runs(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the runs of consecutive integers in `rows`, as (first, last + 1)."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1)
    first = rows[np.r_[0, breaks + 1]]
    last = rows[np.r_[breaks, len(rows) - 1]] + 1
    return list(zip(first.tolist(), last.tolist(), strict=True))


Get: TypeAlias = Callable[[int, int], bytes]  # (start, stop): bytes `start` to `stop - 1` of the index on the server
WriteAt: TypeAlias = Callable[[int, bytes, int], None]  # (descriptor, bytes, offset)

WHOLE_BYTES = 256 << 20  # largest index that is fetched at once
_REQUEST_ROWS = 1 << 19  # most rows that one request fetches, unless a shard has more
_REQUESTS = 32  # requests for rows at a time, which are small and bound by latency
_FAULTS = {"changed shard": "it has another size or version than before", "missing shard": "it is gone"}
LONG_FOLDER = "long"
_LEAST_BLOCK = 4096  # bytes
_LONG_BLOCK = 1 << 18  # block size of long samples, which are read sequentially
_MOST_BLOCK = 1 << 20  # divides a piece
_MANY_BLOCKS = 1 << 26  # with more blocks than this, blocks are larger, because each takes bytes of flags


class IndexParts:
    """Rows of a partly cached index in the folder of a version.

    Raises OSError if the index is not stored in parts.
    """

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        with open_private(folder / PARTS, "r+b") as file:
            self._present = np.frombuffer(mmap.mmap(file.fileno(), len(index.shards)), np.uint8)
        # the file that `index` has mapped, even if the name is reused
        self._file = open_private(folder / "index", "r+b")
        self._index, self.name = index, index_name(index.header.kind)
        self.bytes = os.fstat(self._file.fileno()).st_size
        self.pin = read_pin(folder / "parts.pin")

    def absent(self, shards: Rows) -> Rows:
        """Return which of these shards have rows that are not cached."""
        absent: Rows = shards[self._present[shards] == 0]
        return absent

    def all_absent(self) -> Rows:
        """Return the numbers of all shards whose rows are not cached."""
        return np.flatnonzero(self._present == 0)

    def fetch(self, root: str, shards: Iterable[int], get: Get, write: WriteAt) -> None:
        """Fetch the rows of these shards in order, by several requests at a time.

        Raises `RemoteError`.
        """
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for _ in pool.map(partial(self._fetch, root, get, write), self._runs(shards)):
                pass

    def check(self, shards: Rows) -> None:
        """Forget the cached rows of these shards that are damaged."""
        present = shards[self._present[shards] == 1].tolist()
        self._present[[shard for shard in present if not self._index.is_whole(shard)]] = 0

    def _runs(self, shards: Iterable[int]) -> Iterator[range]:
        """Yield runs of consecutive shards, of at most `_REQUEST_ROWS` rows or one shard."""
        first = end = -1
        rows = self._index.shard_rows
        for shard in shards:
            if shard != end or rows[shard + 1] - rows[first] > _REQUEST_ROWS:
                if end > first:
                    yield range(first, end)
                first = shard
            end = shard + 1
        if end > first:
            yield range(first, end)

    def _fetch(self, root: str, get: Get, write: WriteAt, shards: range) -> None:
        try:
            rows = self._index.rows_from(get, shards)
        except ShardError as error:
            raise RemoteError(
                f"{root}/{self.name}: {_FAULTS.get(error.reason, error)}. The index is damaged or was replaced in the "
                "run. The loader's state is whole: save it and start again with the new index"
            ) from error
        for offset, raw in rows:
            write(self._file.fileno(), raw, offset)
        self._present[shards.start : shards.stop] = 1


def open_parts(folder: Path, index: ShardIndex) -> IndexParts | None:
    """Return the parts of the index in a version's folder, or None.

    It is None if all of the index is cached.
    """
    parts = folder / PARTS
    if not parts.exists():
        return None
    if parts.stat().st_size != len(index.shards):  # a crash of the machine has truncated it
        create_parts(folder, len(index.shards))
    return IndexParts(folder, index)


def create_parts(folder: Path, shards: int) -> None:
    """Record that no rows of an index with `shards` shards are cached."""
    replace_file(folder / PARTS, [bytes(shards)])


class TarLayout:
    """Samples of an index of tars as rows, numbered through all shards.

    `firsts` has the first row of each shard, then the number of all: int64 (shards + 1,). `suffix` is that of the
    shards' files in the cache. `parts` says which rows of the index are cached; None: all.
    """

    suffix = ".tar"

    def __init__(self, index: TarIndex, parts: IndexParts | None) -> None:
        self._tars = index
        self.index: ShardIndex = index
        self.parts, self.shards, self.firsts = parts, index.shards, index.shard_rows
        self._starts, self._ends = np.asarray(index.starts), np.ascontiguousarray(self.firsts, np.int64).data

    def offsets(self, rows: Rows) -> Rows:
        """Return the offset of each row in its shard: int64 of the same shape."""
        return self._starts[rows].astype(np.int64)

    def row_from(self, shard: int, offset: int) -> int:
        """Return the first row of a shard that starts at this byte or later.

        It is the next shard's first row if there is none.
        """
        first, end = int(self.firsts[shard]), int(self.firsts[shard + 1])
        return first + int(np.searchsorted(self._starts[first:end], np.uint64(offset)))

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """Return the range of bytes of rows `row` to `stop - 1` of one shard."""
        index = self._tars
        if stop < self._ends[bisect.bisect_right(self._ends, row)]:
            return index.starts[row], index.starts[stop]
        last_row = stop - 1  # the last of its shard, whose end is that of its last part
        layout = index.layout(last_row)
        offset, size = index.extent(last_row, len(layout.gaps) - 1, layout)
        return index.starts[row], offset + padded(size)

    def headers_match(self, shard: int, fd: int, row: int) -> bool:
        """Return whether the headers of a sample in an open file match the index."""
        return self._tars.header_matches(self.shards.names[shard], fd, row)


class BlockLayout:
    """Files of an index in blocks of at least `block` bytes. See `TarLayout`."""

    suffix = ".bytes"

    def __init__(self, index: ShardIndex, parts: IndexParts | None, block: int = _LEAST_BLOCK) -> None:
        self.index, self.parts, self.shards = index, parts, index.shards
        self.block, total = block, int(index.shards.sizes.sum())
        while total // self.block > _MANY_BLOCKS and self.block < _MOST_BLOCK:
            self.block *= 2
        self.firsts: Rows = np.concatenate([[0], np.cumsum(-(-index.shards.sizes // self.block))])

    def offsets(self, rows: Rows) -> Rows:
        """Return the offset of each of these rows. See `TarLayout.offsets`."""
        found: Rows = (rows - self.firsts[np.searchsorted(self.firsts, rows, side="right") - 1]) * self.block
        return found

    def row_from(self, shard: int, offset: int) -> int:
        """Return the first row from this byte. See `TarLayout.row_from`."""
        return min(int(self.firsts[shard]) - (-offset // self.block), int(self.firsts[shard + 1]))

    def extent(self, row: int, stop: int) -> tuple[int, int]:
        """Return the bytes of rows. See `TarLayout.extent`."""
        shard = int(np.searchsorted(self.firsts, row, side="right")) - 1
        first = int(self.firsts[shard])
        return (row - first) * self.block, min((stop - first) * self.block, int(self.shards.sizes[shard]))

    def headers_match(self, shard: int, fd: int, row: int) -> bool:
        """Return True, because blocks have no headers.

        That the file has changed is only seen by its version on the server, such as its ETag.
        """
        return True


CacheLayout: TypeAlias = TarLayout | BlockLayout


def open_layout(folder: Path) -> CacheLayout:
    """Return the layout of the version in this folder.

    Raises OSError if there is none, `ShardError` if it is damaged.
    """
    if folder.name == LONG_FOLDER:
        return BlockLayout(open_tar_index(folder.parent / "index"), None, _LONG_BLOCK)
    index = open_tar_index(folder / "index")
    parts = open_parts(folder, index)
    return TarLayout(index, parts) if isinstance(index, TarIndex) else BlockLayout(index, parts)
