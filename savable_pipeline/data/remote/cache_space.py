"""`CacheSpace`: keeps the node's cache of remote shards below its limit; and where the cache lies, and its limit.

The file `CACHE/room` holds the number of bytes in use, counted before they are written, and its checksum. It is locked
while samples are evicted; each time the bytes in use are measured anew.
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
from savable_pipeline.data.remote.cache_files import flock, open_own, own_file, own_folder
from savable_pipeline.data.remote.shard_cache import ShardCache, cached_files, is_held
from savable_pipeline.errors import ShardError

DEFAULT_BYTES = 256 << 30
_FREE_SHARE = 0.8  # of the disk's free space, at most, unless a limit is given
PREFETCH_SHARE = 0.75  # of the cache, at most, for samples that are only announced; the rest is for those needed now
_PAUSE_S = 0.2  # between two evictions for samples that are only announced
_LOW_WATER = 0.9  # of the goal: more is evicted than is asked, so that evictions are few


def cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """This user's own folder in the cache, made if it is not there: see cache_files.py. Raises `RemoteError`.

    The cache: as given, or `SAVABLE_CACHE`, or `savable_pipeline/shards` in the user's cache.
    """
    chosen = given or os.environ.get("SAVABLE_CACHE")
    if chosen:
        return own_folder(Path(chosen).absolute() / str(os.geteuid()))
    cache = user_cache()
    if cache is None:
        raise ValueError(
            "this user has no home folder for the cache of remote shards. Pass cache=, or set SAVABLE_CACHE"
        )
    return own_folder((cache / "savable_pipeline" / "shards").absolute() / str(os.geteuid()))


def cache_bytes(given: int | None, folder: Path) -> int:
    """The cache's limit: as given, or `SAVABLE_CACHE_BYTES`, or 256 GiB but at most 80 % of the free space."""
    from_environment = os.environ.get("SAVABLE_CACHE_BYTES")
    if given is None and from_environment:
        if not from_environment.isdecimal():
            raise ValueError(f"SAVABLE_CACHE_BYTES must be a number of bytes, not {from_environment!r}")
        given = int(from_environment)
    if given is not None:
        if given < 1:
            raise ValueError(f"cache_bytes must be at least 1, not {given}")
        return given
    return min(DEFAULT_BYTES, int((shutil.disk_usage(folder).free + bytes_in_use(folder)) * _FREE_SHARE))


class CacheSpace:
    """Keeps the cache's files below `limit` bytes of disk. Used samples are evicted first, by shard, oldest use first.

    Samples that a reader has announced are evicted only for samples that are needed now, or once no reader is left.
    Bytes that several processes write at the same moment may exceed the limit.
    """

    def __init__(self, cache: Path, limit: int) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self._cache = cache
        self._limit = limit
        self._fd = own_file(cache / "room", os.O_RDWR | os.O_CREAT)
        self._threads = threading.Lock()  # all threads share the file's lock
        self._known: dict[Path, ShardCache] = {}
        self._full_until = 0.0
        self._pending = 0  # bytes that threads of this process have reserved, and may not have written yet
        with self._locked():
            self._set_in_use(self._in_use())

    def reserve(self, size: int) -> None:
        """Counts `size` bytes, which are needed now, as in use, after evicting what is in the way."""
        with self._locked():
            in_use = self._in_use()
            if in_use + size > self._limit:
                in_use = self._evict_to(self._limit - size, needed=True)
            self._set_in_use(in_use + size)
            self._pending += size

    def try_reserve(self, size: int) -> bool:
        """Counts `size` bytes as in use if there is space, or only used samples are in the way; else returns False."""
        limit = int(self._limit * PREFETCH_SHARE) - size
        with self._locked():
            in_use = self._in_use()
            if in_use > limit and time.monotonic() >= self._full_until:
                in_use = self._evict_to(limit, needed=False)
                self._full_until = time.monotonic() + (_PAUSE_S if in_use > limit else 0.0)
            fits = in_use <= limit
            self._set_in_use(in_use + size if fits else in_use)
            self._pending += size if fits else 0
            return fits

    def written(self, size: int) -> None:
        """Takes `size` reserved bytes for written, or given up: to be called once for each that were reserved."""
        with self._threads:
            self._pending -= size

    def release(self, size: int) -> bool:
        """Evicts `size` bytes from a disk that is full; False if nothing could be evicted."""
        with self._locked():
            before = bytes_in_use(self._cache)
            self._set_in_use(self._evict_to(before - size, needed=True))
            return bytes_in_use(self._cache) < before

    def _in_use(self) -> int:
        raw = os.pread(self._fd, 16, 0)
        return int.from_bytes(raw[:8], "little") if raw[8:] == xxh3_64_digest(raw[:8]) else bytes_in_use(self._cache)

    def _set_in_use(self, in_use: int) -> None:
        raw = in_use.to_bytes(8, "little")
        os.pwrite(self._fd, raw + xxh3_64_digest(raw), 0)

    def _evict_to(self, goal: int, needed: bool) -> int:
        """Evicts until the files take `goal` bytes; returns the bytes that they take then."""
        files = sorted(_files(self._cache), key=lambda one: self._last_use(*one))
        used = {path: stat.st_blocks for path, stat in files}
        in_use = self._evict(used, goal, int(goal * _LOW_WATER), wanted=False)
        return self._evict(used, goal, goal, wanted=True) if needed else in_use

    def _evict(self, used: dict[Path, int], above: int, goal: int, *, wanted: bool) -> int:
        """If the files take more than `above` bytes, evicts until they take `goal`; returns the bytes in use.

        `used` holds each file's blocks of 512 bytes. It is updated, since other processes write meanwhile.
        """
        in_use = 512 * sum(used.values()) + self._pending
        if in_use <= above:
            return in_use
        for path in used:
            if in_use <= goal:
                break
            cached, left = self._cached(path.parent), used[path]
            if cached is not None:
                with contextlib.suppress(FileNotFoundError), open_own(path, "r+b") as file:
                    cached.evict(int(path.stem), file.fileno(), wanted=wanted or not is_held(path.parent))
                    left = os.fstat(file.fileno()).st_blocks
            elif (path.parent / "flags").exists() and not is_held(path.parent):  # damaged, or of another release
                path.unlink(missing_ok=True)
                left = 0
            in_use += 512 * (left - used[path])
            used[path] = left
        return in_use

    def _last_use(self, path: Path, stat: os.stat_result) -> float:
        """The time of a file's last use, in seconds since 1970."""
        cached = self._cached(path.parent)
        return stat.st_mtime if cached is None else float(cached.touched[int(path.stem)])

    def _cached(self, folder: Path) -> ShardCache | None:
        """The cached version of a dataset in this folder; None if there is none, or if it is damaged."""
        try:
            if folder not in self._known or not self._known[folder].is_current():
                self._known[folder] = ShardCache(folder)
            return self._known[folder]
        except (OSError, ValueError, ShardError):
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                flock(self._fd, fcntl.LOCK_UN)


def write_at(fd: int, data: memoryview, offset: int, release: Callable[[int], bool]) -> None:
    """Writes all of `data`; on a full disk `release` is called for space as long as it finds some. Raises OSError."""
    while data:
        try:
            done = os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not release(len(data)):
                raise
            continue
        data, offset = data[done:], offset + done


def _files(cache: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in cached_files(cache):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def bytes_in_use(cache: Path) -> int:
    """The bytes that the cache's files take on the disk."""
    return sum(512 * stat.st_blocks for _, stat in _files(cache))
