"""Where the cache of remote shards lies, how large it may be, and how room is made in it.

`CACHE/room` holds the number of bytes in use, counted before they are written, and is locked while room is made. What
is in use is measured anew each time that room is made.
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

from savable_pipeline.errors import ShardError
from savable_pipeline.shard_cache import CachedShards

DEFAULT_BYTES = 256 << 30
_FREE_SHARE = 0.8  # of the disk's free space at most, unless a size is given
AHEAD_SHARE = 0.75  # of the cache may hold what is only announced; the rest is for what is needed at once
_PAUSE_S = 0.2  # between two attempts to make room for what is only announced
_LOW_WATER = 0.9  # room is made for more than is asked, so that it is seldom made


def cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """The cache: as given, or `SAVABLE_CACHE`, or `savable_pipeline/shards` in the user's cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "savable_pipeline" / "shards"
    return Path(given or os.environ.get("SAVABLE_CACHE") or usual).absolute()


def cache_bytes(given: int | None, folder: Path) -> int:
    """The cache's bound: as given, or `SAVABLE_CACHE_BYTES`, or 256 GiB but no more than 80 % of the free space."""
    from_environment = os.environ.get("SAVABLE_CACHE_BYTES")
    if given is None and from_environment:
        if not from_environment.isdecimal():
            raise ValueError(f"SAVABLE_CACHE_BYTES must be a number of bytes, not {from_environment!r}")
        given = int(from_environment)
    if given is not None:
        if given < 1:
            raise ValueError(f"cache_bytes must be at least 1, not {given}")
        return given
    folder.mkdir(parents=True, exist_ok=True)
    return min(DEFAULT_BYTES, int((shutil.disk_usage(folder).free + bytes_in_use(folder)) * _FREE_SHARE))


class Room:
    """Keeps the cache's files below `limit` bytes of disk: what was used leaves first, by shard, oldest first.

    What a plan needs next leaves only for what is needed at this moment, or when no reader is left. What several
    processes write at the same time may pass the limit by as much.
    """

    def __init__(self, cache: Path, limit: int) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self._cache = cache
        self._limit = limit
        self._fd = os.open(cache / "room", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._threads = threading.Lock()  # the file's lock is one for all threads
        self._known: dict[Path, CachedShards] = {}
        self._full_until = 0.0
        with self._locked():
            if not os.fstat(self._fd).st_size:
                self._count(bytes_in_use(cache))

    def take(self, size: int) -> None:
        """Count `size` bytes, which are needed now, as in use once there is room."""
        with self._locked():
            in_use = self._counted()
            if in_use + size > self._limit:
                in_use = self._make(self._limit - size, needed=True)
            self._count(in_use + size)

    def take_ahead(self, size: int) -> bool:
        """Count `size` bytes as in use if there is room, or only what was used is in the way."""
        limit = int(self._limit * AHEAD_SHARE) - size
        with self._locked():
            in_use = self._counted()
            if in_use > limit and time.monotonic() >= self._full_until:
                in_use = self._make(limit, needed=False)
                self._full_until = time.monotonic() + (_PAUSE_S if in_use > limit else 0.0)
            fits = in_use <= limit
            self._count(in_use + size if fits else in_use)
            return fits

    def free(self, size: int) -> bool:
        """Make `size` bytes free on a disk that is full; False if nothing could be freed."""
        with self._locked():
            before = bytes_in_use(self._cache)
            self._count(self._make(before - size, needed=True))
            return bytes_in_use(self._cache) < before

    def _counted(self) -> int:
        return int.from_bytes(os.pread(self._fd, 8, 0), "little")

    def _count(self, in_use: int) -> None:
        os.pwrite(self._fd, in_use.to_bytes(8, "little"), 0)

    def _make(self, goal: int, needed: bool) -> int:
        """Evict until the files take `goal` bytes; gives what they take then."""
        files = sorted(_files(self._cache), key=lambda one: self._last_use(*one))
        used = {path: stat.st_blocks for path, stat in files}
        in_use = self._evict(used, goal, int(goal * _LOW_WATER), wanted=False)
        return self._evict(used, goal, goal, wanted=True) if needed else in_use

    def _evict(self, used: dict[Path, int], above: int, goal: int, *, wanted: bool) -> int:
        """If the files take more than `above` bytes, evict until they take `goal`.

        `used` has each file's blocks of 512 bytes, and is brought up to date: others write while this goes on.
        """
        in_use = 512 * sum(used.values())
        if in_use <= above:
            return in_use
        for path in used:
            if in_use <= goal:
                break
            cached = self._cached(path.parent)
            if cached is None:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                cached.evict(int(path.stem), fd, wanted=wanted or not cached.is_held())
                left = os.fstat(fd).st_blocks
            finally:
                os.close(fd)
            in_use += 512 * (left - used[path])
            used[path] = left
        return in_use

    def _last_use(self, path: Path, stat: os.stat_result) -> float:
        """When a file was used, in seconds since 1970."""
        cached = self._cached(path.parent)
        return stat.st_mtime if cached is None else float(cached.touched[int(path.stem)])

    def _cached(self, folder: Path) -> CachedShards | None:
        """A version of a dataset as it is now; None if this is another folder, or it is damaged."""
        try:
            if folder not in self._known or not self._known[folder].is_current():
                self._known[folder] = CachedShards(folder)
            return self._known[folder]
        except (OSError, ValueError, ShardError):
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


def write_at(fd: int, data: memoryview, offset: int, free: Callable[[int], bool]) -> None:
    """Write all of `data`; a full disk is given room by `free` as long as that helps. Raises OSError."""
    while data:
        try:
            done = os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not free(len(data)):
                raise
            continue
        data, offset = data[done:], offset + done


def _files(cache: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in cache.rglob("*.tar"):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def bytes_in_use(cache: Path) -> int:
    """What the cache's files take of its disk."""
    return sum(512 * stat.st_blocks for _, stat in _files(cache))
