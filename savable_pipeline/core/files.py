"""Atomic replacement of files, retries, and the limit on open descriptors.

A reader of a file that is being replaced gets the old or the new contents, never a mixture.

All datasets of a process share half of its descriptor limit (`ulimit -n`). The other half is for encoders, workers and
other uses. If a process runs out of descriptors, that is an error of its environment, never of its data, so no policy
skips a sample because of it.

Errors that may pass are retried, those of files by `with_retries`:

    ESTALE, ETIMEDOUT     errors of network disks only
    EIO                   an unreachable network disk, or a bad sector of a local one, which is tried once more

Any thread may close the descriptors of any dataset. To close one, a cache only drops its reference to the `Descriptor`,
and the last reference closes the file. A reading thread has a reference of its own during the read. So no other file
gets the descriptor's number meanwhile, and a read needs no lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from savable_pipeline.errors import RemoteError, SavableError

T = TypeVar("T")
NETWORK_ERRORS = (errno.ESTALE, errno.ETIMEDOUT)
_TRANSIENT = (*NETWORK_ERRORS, errno.EIO)
_RETRY_S = 120.0  # default of `retry_s`
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 15.0  # between two tries
_NETWORK_TYPES = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "wekafs", "virtiofs")


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` if the block ends without an error.

    Pass `sync` for a file that one process writes and that must survive a crash of the machine: its bytes are flushed
    to the disk before it replaces `path`. If a crash left its temporary file, the next attempt overwrites that.
    """
    temporary = path.with_name(f"{path.name}.tmp" if sync else f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=_open_unless_link) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _open_unless_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)  # a link could make this overwrite another file


def replace_file(path: Path, parts: Iterable[bytes], *, sync: bool = False) -> None:
    """Write a whole file atomically, as `replacing` does."""
    with replacing(path, sync=sync) as file:
        file.writelines(parts)


def regular_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and return its descriptor, as an `opener` of `open` does.

    Raises OSError for a folder, pipe or device.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file but a folder, pipe or device", os.fspath(path))


def read_regular(path: Path, most: int) -> bytes:
    """Return the contents of a regular file.

    Raises OSError, also for a file of more than `most` bytes.
    """
    with open(path, "rb", opener=regular_file) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, more than the limit of {most}", str(path))
        return file.read()


def user_cache() -> Path | None:
    """Return the user's folder for caches, `XDG_CACHE_HOME` or `~/.cache`.

    The result is None for a user without a home.
    """
    configured = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(configured) if configured else Path.home() / ".cache"
    except RuntimeError:  # a container with another user ID has no HOME and no entry in /etc/passwd
        return None


class Descriptor(int):
    """Open descriptor that is closed when the last reference to it is gone."""

    __slots__ = ()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, `os` may be gone first
        close(self)


class DescriptorCache(Protocol):
    """Object that stores open descriptors, and reopens their files, in any thread."""

    def __len__(self) -> int: ...
    def close_oldest(self) -> None:
        """Drop the descriptor that has been open for longest, if there is one."""


# The keys are `id`s, because some caches have no hash.
_caches: weakref.WeakValueDictionary[int, DescriptorCache] = weakref.WeakValueDictionary()


def register(cache: DescriptorCache) -> None:
    """Count the descriptors of `cache` among those of all datasets."""
    _caches[id(cache)] = cache


def _all_caches() -> list[DescriptorCache]:
    # `valuerefs` is a copy. Another thread may register a cache during an iteration over `values`.
    return [cache for known in _caches.valuerefs() if (cache := known()) is not None]


def evict() -> None:
    """Close descriptors of datasets until one more can be opened within their limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        close_down_to(max(1, soft // 2) - 1)


def close_down_to(limit: int) -> None:
    """Close descriptors of the largest caches until at most `limit` are open."""
    caches = _all_caches()
    excess = sum(map(len, caches)) - limit
    for _ in range(excess):
        max(caches, key=len).close_oldest()


def lacks_handles(error: BaseException) -> bool:
    """Return whether this process or the system has run out of descriptors."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def with_handles(act: Callable[[], T]) -> T:
    """Return what `act` returns.

    If it lacks descriptors, close those of datasets and call it again. Raises `SavableError` if descriptors still run
    out when there is nothing to close, and other errors of `act`.
    """
    may_close = True
    while True:
        try:
            return act()
        except OSError as error:
            if not lacks_handles(error):
                raise
            if not may_close:
                raise _no_descriptor_error(error) from error
        # Call `act` again even if no cache has descriptors: another thread may have just closed them.
        may_close = any(map(len, _all_caches()))
        close_down_to(0)


def _no_descriptor_error(error: OSError) -> SavableError:
    """Return an error that says how to raise the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    file = error.filename or "a file"
    return SavableError(f"{file}: {error.strerror} (limit {soft}). Close files, or raise `ulimit -n`")


def retry_s() -> float:
    """Return how long a failing request is retried: `SAVABLE_RETRY_S`, or 120 s.

    Raises ValueError if `SAVABLE_RETRY_S` is not a number of at least 0.
    """
    configured = os.environ.get("SAVABLE_RETRY_S", "")
    try:
        seconds = float(configured) if configured else _RETRY_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"SAVABLE_RETRY_S must be a number of seconds, not {configured!r}")
    return seconds


def with_retries(path: Path, act: Callable[[], T]) -> T:
    """Return what `act` returns, with `retry` after an OSError."""
    try:
        return act()
    except OSError as error:
        return retry(path, error, act)


def retry(path: Path, error: OSError, act: Callable[[], T]) -> T:
    """Call `act` again after its `error`, and return what it returns.

    An error that may pass is retried for `retry_s()` seconds on a network disk, and once on a local one. Raises
    `RemoteError` if retries on a network disk do not help, and other errors as they are.
    """
    started, wait_s = time.monotonic(), _FIRST_WAIT_S
    while error.errno in _TRANSIENT:
        on_network = error.errno in NETWORK_ERRORS or _is_on_network_disk(path)
        try:
            return act()
        except OSError as last:
            error = last
        if not on_network:
            break
        if time.monotonic() + wait_s > started + retry_s():
            failed = f"{path}: {error.strerror} for {time.monotonic() - started:.1f} s"
            raise RemoteError(f"{failed}. Check that its server is reachable, or raise SAVABLE_RETRY_S") from error
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    raise error


def _is_on_network_disk(path: Path) -> bool:
    """Return whether a file is on a network disk, by Linux's list of mounts. If unknown, return False."""
    try:
        device = path.stat().st_dev
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError as error:
        return error.errno in _TRANSIENT
    # A line is "36 35 0:42 / /data rw shared:1 - nfs4 server:/data rw": device 0:42, and the type after the dash.
    types = {fields[2]: fields[fields.index("-") + 1] for fields in mounts}
    return types.get(f"{os.major(device)}:{os.minor(device)}", "").startswith(_NETWORK_TYPES)
