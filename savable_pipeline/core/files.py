"""Files that are replaced whole, and the descriptors that a process keeps open for its datasets.

A file is replaced atomically: a reader sees the old one or the whole new one, never a part.

Half of the descriptors that the system permits a process (`ulimit -n`) is for all its datasets, limited together and
closed when none is left; the other half is for its encoders and workers and for other uses. A process that has run out
of descriptors has a fault of its environment, never of its data: no policy skips a sample because of it.

Any thread may close the descriptors of any dataset, so Python's reference counts own them: a keeper only drops its
reference, and the last reference closes the file. A thread that reads has one of its own for as long as the read takes,
so the number cannot be reused under it, and a read needs no lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from savable_pipeline.errors import SavableError

T = TypeVar("T")


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` when the block ends without an error.

    `sync` is for a file that one process writes and that must survive a crash of the machine: its bytes are on the disk
    before it takes its place. The next attempt overwrites the temporary file that a crash has left.
    """
    aside = path.with_name(f"{path.name}.tmp" if sync else f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb", opener=_no_link) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)  # else what a link of this name leads to would be overwritten


def replace_file(path: Path, parts: Iterable[bytes], *, sync: bool = False) -> None:
    """Write a whole file; see `replacing`."""
    with replacing(path, sync=sync) as file:
        file.writelines(parts)


def regular_file(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of a regular file: an `opener` of `open`. Raises OSError for a pipe, a device, a folder."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file but a folder, pipe or device", os.fspath(path))


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file. Raises OSError, also for one of more than `most`."""
    with open(path, "rb", opener=regular_file) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, more than the limit of {most}", str(path))
        return file.read()


def user_cache() -> Path | None:
    """The user's folder for caches: `XDG_CACHE_HOME` or `~/.cache`; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given) if given else Path.home() / ".cache"
    except RuntimeError:  # no HOME, and no entry in the system's list of users: a container under another number
        return None


class Descriptor(int):
    """An open descriptor, which is closed when the last reference to it is gone."""

    __slots__ = ()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, `os` may be gone first
        close(self)


class Keeper(Protocol):
    """Keeps descriptors open, and can open each again. Any thread may call its methods."""

    def __len__(self) -> int: ...
    def close_oldest(self) -> None:
        """Drop the descriptor that has been open for longest, if there is one."""


_keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()  # by `id`: not all have a hash


def register(keeper: Keeper) -> None:
    """Count the descriptors of `keeper`, as long as it exists, among those of the process."""
    _keepers[id(keeper)] = keeper


def _all_keepers() -> list[Keeper]:
    # `valuerefs` is a copy, while another thread may register a keeper during an iteration over `values`
    return [keeper for known in _keepers.valuerefs() if (keeper := known()) is not None]


def most_kept() -> int:
    """How many descriptors all datasets of this process may keep open together."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def keep_below(limit: int) -> None:
    """Close descriptors, of the keeper that has the most, until all together keep at most `limit`."""
    keepers = _all_keepers()
    excess = sum(map(len, keepers)) - limit
    for _ in range(excess):
        max(keepers, key=len).close_oldest()


def is_out_of_handles(error: BaseException) -> bool:
    """Whether an error says that this process, or the system, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def with_handles(act: Callable[[], T]) -> T:
    """Return what `act` returns; if it runs out of descriptors, close those of datasets and try again.

    Raises `SavableError` if that fails although there is none to close, and what `act` raises.
    """
    kept = True
    while True:
        try:
            return act()
        except OSError as error:
            if not is_out_of_handles(error):
                raise
            if not kept:
                raise _none_left(error) from error
        # Try again even if there are none: another thread may have just closed them.
        kept = any(map(len, _all_keepers()))
        keep_below(0)


def _none_left(error: OSError) -> SavableError:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SavableError(
        f"{error.filename or 'a file'}: {error.strerror} (limit {soft}). Close files, or raise `ulimit -n`"
    )
