"""Files of the node's cache, which must belong to this user and be no links.

Otherwise another user could make this process write to a file outside the cache.

    CACHE/UID/…               CACHE may be a link, and open to all. UID is private to its user (0700)
    VERSION/N.pin             the ETag of the rows of shard number N, with a checksum
    scan/…, beside/…, …       NAME.pin next to NAME, a complete file. Its checksum covers the bytes of NAME too

Sparse files are written by several processes at once, under locks on byte ranges.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import pwd
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from xxhash import xxh3_64

from savable_pipeline.core.file_locks import requiring_locks
from savable_pipeline.core.files import replace_file
from savable_pipeline.errors import RemoteError

PIECE = 8 << 20  # most bytes of one request to a server, or of one read of a file
_OTHER_FOLDER = "Give a folder on a disk of this machine as cache= or SAVABLE_CACHE, or mount Lustre with -o flock"
_DIGITS = 16  # hexadecimal digits of the checksum, before the version
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def private_folder(path: Path) -> Path:
    """Create a folder of this user if it does not exist.

    Raises `RemoteError` for a link, and for a folder of another user.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        _check_owner(path, found, stat.S_ISDIR(found.st_mode))
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise RemoteError(
            f"{path}: {error.strerror}. Set another folder for the cache of remote shards by cache= or SAVABLE_CACHE"
        ) from error
    return path


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file of this user, as `path.open(mode)`.

    Raises OSError, and `RemoteError` as `private_folder` does.
    """
    return open(path, mode, opener=private_file)


def private_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of this user, as `os.open` does, and return its descriptor.

    See `open_private`.
    """
    path = Path(path)
    safe_flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a named pipe would block
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | safe_flags, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            _check_owner(path, path.lstat(), False)
        raise
    try:
        found = os.fstat(descriptor)
        _check_owner(path, found, stat.S_ISREG(found.st_mode))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(path: Path, found: os.stat_result, is_right_kind: bool) -> None:
    """Raise `RemoteError` unless a file is of the right kind and belongs to this user."""
    if is_right_kind and found.st_uid == os.geteuid():
        return
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "a pipe or a device")
    raise RemoteError(
        f"{path}: {kind} of {_user_name(found.st_uid)}, but the cache may only have files and folders of "
        f"{_user_name(os.geteuid())}. Remove it, or set another folder by cache= or SAVABLE_CACHE"
    )


def _user_name(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:  # a container whose user ID is not in /etc/passwd
        return f"the user number {user}"


def write_pin(path: Path, version: str) -> None:
    """Write a pin: a version on the server, with its checksum."""
    replace_file(path, [xxh3_64(version.encode()).hexdigest().encode(), version.encode()])


def read_pin(path: Path) -> str:
    """Return the version in a pin, or "" if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError), open_private(path, "rb") as file:
        digest, version = file.read(_DIGITS), file.read()
        if xxh3_64(version).hexdigest().encode() == digest:
            return str(version, "utf-8")
    return ""


def pin_whole(path: Path, version: str) -> None:
    """Pin the version of a complete file, or of one that was downloaded and removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_pin(_pin_path(path), f"{_hash(path) if path.exists() else ''} {version}")


def pinned_version(path: Path) -> str:
    """Return the pinned version of a file that may be removed, or "" if unknown."""
    return read_pin(_pin_path(path)).partition(" ")[2]


def whole_version(path: Path) -> str | None:
    """Return the pinned version of a complete file, or None if its bytes have changed."""
    digest, _, version = read_pin(_pin_path(path)).partition(" ")
    with contextlib.suppress(OSError):
        if digest and _hash(path) == digest:
            return version
    return None


def drop_whole(path: Path) -> None:
    """Remove a file and its pin."""
    _pin_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _pin_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pin")


def _hash(path: Path) -> str:
    checksum = xxh3_64()
    with open_private(path, "rb") as file:
        while part := file.read(PIECE):
            checksum.update(part)
    return checksum.hexdigest()


def flock(file: int | IO[Any], operation: int) -> None:
    """Lock a file of the cache, as `fcntl.flock` does.

    Raises `RemoteError` on a file system without locks.
    """
    with requiring_locks("the cache of remote shards", _OTHER_FOLDER, RemoteError):
        fcntl.flock(file, operation)


@contextlib.contextmanager
def range_lock(fd: int, start: int, stop: int, *, wait: bool = True) -> Iterator[None]:
    """Lock the bytes `start` to `stop - 1` of an open file.

    If another descriptor has locked some of them, it waits, or raises BlockingIOError without `wait`. The lock belongs
    to the descriptor, and ends when the process dies. Each thread needs a descriptor of its own.
    """
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    with requiring_locks("the cache of remote shards", _OTHER_FOLDER, RemoteError):
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0))
    try:
        yield
    finally:
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, start, stop - start, 0))


def punch_hole(fd: int, start: int, stop: int) -> None:
    """Free the disk space of these bytes of a file.

    Raises OSError if the file system cannot punch holes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _PUNCH, ctypes.c_long(start), ctypes.c_long(stop - start)):
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: the cache needs a file system that can punch holes, such as ext4")
