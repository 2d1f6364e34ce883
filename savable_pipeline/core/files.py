"""Replaces files atomically: a reader sees the old file or the whole new one, never a part."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO


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
    raise OSError(errno.EINVAL, "no regular file, but a folder, a pipe or a device", os.fspath(path))


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file. Raises OSError, also for one of more than `most`."""
    with open(path, "rb", opener=regular_file) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes; at most {most} are read", str(path))
        return file.read()


def user_cache() -> Path | None:
    """The user's folder for caches: `XDG_CACHE_HOME` or `~/.cache`; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given) if given else Path.home() / ".cache"
    except RuntimeError:  # no HOME, and no entry in the system's list of users: a container under another number
        return None
