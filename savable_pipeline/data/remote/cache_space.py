"""`CacheSpace`: keeps the node's cache of remote shards below its limit.

The file `CACHE/room` has the number of bytes in use, counted before they are written, and its checksum. It is locked
during evictions, and each eviction measures the bytes in use again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from xxhash import xxh3_64_digest

from savable_pipeline.core.files import user_cache
from savable_pipeline.data.remote.cache_files import flock, open_private, private_file, private_folder
from savable_pipeline.data.remote.shard_cache import ShardCache, cached_files, is_protected
from savable_pipeline.errors import ShardError

DEFAULT_BYTES = 256 << 30
_FREE_FRACTION = 0.8  # default limit, as a fraction of the disk's free space
PREFETCH_FRACTION = 0.75  # of the cache, at most, for samples requested in advance; the rest is for those needed now
_PAUSE_S = 0.2  # between two evictions for samples requested in advance
_LOW_WATER = 0.9  # an eviction frees more than requested, to this fraction of the goal, so that evictions are rare


def cache_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Create this user's own folder in the cache; see cache_files.py.

    The cache is `folder`, or `SAVABLE_CACHE`, or `savable_pipeline/shards` in the user's cache. Raises `RemoteError`.
    """
    chosen = folder or os.environ.get("SAVABLE_CACHE")
    if chosen:
        return private_folder(Path(chosen).absolute() / str(os.geteuid()))
    if (cache := user_cache()) is None:
        raise ValueError("this user has no home folder for a cache of remote shards. Pass cache=, or set SAVABLE_CACHE")
    return private_folder((cache / "savable_pipeline" / "shards").absolute() / str(os.geteuid()))


def cache_bytes(limit: int | None, folder: Path) -> int:
    """Return the limit of the cache in bytes.

    It is `limit`, or `SAVABLE_CACHE_BYTES`, or 256 GiB but at most 80 % of the free space.
    """
    from_environment = os.environ.get("SAVABLE_CACHE_BYTES")
    if limit is None and from_environment:
        if not from_environment.isdecimal():
            raise ValueError(f"SAVABLE_CACHE_BYTES must be a number of bytes, not {from_environment!r}")
        limit = int(from_environment)
    if limit is not None:
        if limit < 1:
            raise ValueError(f"cache_bytes must be at least 1, not {limit}")
        return limit
    return min(DEFAULT_BYTES, int((shutil.disk_usage(folder).free + bytes_in_use(folder)) * _FREE_FRACTION))


class CacheSpace:
    """Keeps the cache's files below `limit` bytes of disk.

    Used samples are evicted first, shard by shard, least recently used first. Samples that a reader requested in
    advance are evicted only for samples that are needed now, or once no reader is left. Bytes that several processes
    write at the same moment may exceed the limit.
    """

    def __init__(self, cache: Path, limit: int) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self._cache = cache
        self._limit = limit
        self._fd = private_file(cache / "room", os.O_RDWR | os.O_CREAT)
        self._thread_lock = threading.Lock()  # all threads share the file's lock
        self._caches: dict[Path, ShardCache] = {}
        self._full_until = 0.0  # until then, nothing is evicted for samples requested in advance
        self._pending = 0  # bytes that threads of this process have reserved and may not have written yet
        with self._locked():
            self._set_in_use(self._in_use())

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes that are needed now, evicting others if necessary."""
        with self._locked():
            in_use = self._in_use()
            if in_use + size > self._limit:
                in_use = self._evict_to(self._limit - size, also_unused=True)
            self._set_in_use(in_use + size)
            self._pending += size

    def try_reserve(self, size: int) -> bool:
        """Reserve `size` bytes for samples requested in advance, or return False.

        They get a part of the cache. To make space, this evicts samples that were used, and no others.
        """
        most_in_use = int(self._limit * PREFETCH_FRACTION) - size
        with self._locked():
            in_use = self._in_use()
            if in_use > most_in_use and time.monotonic() >= self._full_until:
                in_use = self._evict_to(most_in_use, also_unused=False)
                self._full_until = time.monotonic() + (_PAUSE_S if in_use > most_in_use else 0.0)
            fits = in_use <= most_in_use
            self._set_in_use(in_use + size if fits else in_use)
            self._pending += size if fits else 0
            return fits

    def end_reservation(self, size: int) -> None:
        """End the reservation of `size` bytes, which are written now, or never will be.

        Call it once for each reservation.
        """
        with self._thread_lock:
            self._pending -= size

    def release(self, size: int) -> bool:
        """Evict `size` bytes from a full disk. Return False if nothing could be evicted."""
        with self._locked():
            before = bytes_in_use(self._cache)
            self._set_in_use(self._evict_to(before - size, also_unused=True))
            return bytes_in_use(self._cache) < before

    def _in_use(self) -> int:
        raw = os.pread(self._fd, 16, 0)
        return int.from_bytes(raw[:8], "little") if raw[8:] == xxh3_64_digest(raw[:8]) else bytes_in_use(self._cache)

    def _set_in_use(self, in_use: int) -> None:
        raw = in_use.to_bytes(8, "little")
        os.pwrite(self._fd, raw + xxh3_64_digest(raw), 0)

    def _evict_to(self, goal: int, *, also_unused: bool) -> int:
        """Evict used samples until the files take `goal` bytes, and return the bytes in use.

        With `also_unused`, samples that were requested in advance and not used yet are evicted after them.
        """
        files = sorted(_files(self._cache), key=lambda file: self._last_use(*file))
        blocks = {path: stat.st_blocks for path, stat in files}
        in_use = self._evict(blocks, goal, int(goal * _LOW_WATER), also_unused=False)
        return self._evict(blocks, goal, goal, also_unused=True) if also_unused else in_use

    def _evict(self, blocks: dict[Path, int], above: int, goal: int, *, also_unused: bool) -> int:
        """If the files take more than `above` bytes, evict until they take `goal`.

        With `also_unused`, samples that were requested in advance and not used yet are evicted too. `blocks` has the
        number of blocks of 512 bytes of each file. It is updated here, because other processes write in the meantime.
        Returns the bytes in use.
        """
        in_use = 512 * sum(blocks.values()) + self._pending
        if in_use <= above:
            return in_use
        for path, remaining in blocks.items():
            if in_use <= goal:
                break
            if (cached := self._cached(path.parent)) is not None:
                with contextlib.suppress(FileNotFoundError), open_private(path, "r+b") as file:
                    unused_too = also_unused or not is_protected(path.parent)
                    cached.evict(int(path.stem), file.fileno(), also_unused=unused_too)
                    remaining = os.fstat(file.fileno()).st_blocks
            elif (path.parent / "flags").exists() and not is_protected(path.parent):  # damaged, or of another release
                path.unlink(missing_ok=True)
                remaining = 0
            in_use += 512 * (remaining - blocks[path])
            blocks[path] = remaining
        return in_use

    def _last_use(self, path: Path, stat: os.stat_result) -> float:
        """Return the time of a file's last use, in seconds since 1970."""
        cached = self._cached(path.parent)
        return stat.st_mtime if cached is None else float(cached.touched[int(path.stem)])

    def _cached(self, folder: Path) -> ShardCache | None:
        """Return the shard cache in this folder, or None if it is missing or damaged."""
        try:
            if folder not in self._caches or not self._caches[folder].is_current():
                self._caches[folder] = ShardCache(folder)
            return self._caches[folder]
        except (OSError, ValueError, ShardError):
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                flock(self._fd, fcntl.LOCK_UN)


def write_at(fd: int, data: memoryview, offset: int, release: Callable[[int], bool]) -> None:
    """Write all of `data`, or raise OSError.

    On a full disk, `release(bytes)` is called to free space, as long as it returns True.
    """
    while data:
        try:
            written = os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not release(len(data)):
                raise
            continue
        data, offset = data[written:], offset + written


def _files(cache: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in cached_files(cache):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def bytes_in_use(cache: Path) -> int:
    """Return the bytes that the cache's files take on the disk."""
    return sum(512 * stat.st_blocks for _, stat in _files(cache))
