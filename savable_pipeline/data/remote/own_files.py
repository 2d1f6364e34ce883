"""Files and folders of the node's cache: this user's own, and no links, so that nobody has others written through them.

CACHE/UID/…   CACHE, which a user names, may be a link, and open to all; UID is made for its user alone (0700)
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from pathlib import Path
from typing import IO, Any

from savable_pipeline.errors import RemoteError


def own_folder(path: Path) -> Path:
    """A folder of this user's own, made if it is not there. Raises `RemoteError` for a link, and for another's."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        _check(path, found, stat.S_ISDIR(found.st_mode))
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise RemoteError(
            f"{path}: {error.strerror}; the cache of remote shards cannot be there: give another folder as cache= or "
            "SAVABLE_CACHE"
        ) from error
    return path


def open_own(path: Path, mode: str) -> IO[Any]:
    """`path.open(mode)`, of a file of this user's own. Raises OSError, `RemoteError` as `own_folder` does."""
    return open(path, mode, opener=own_file)


def own_file(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of a file of this user's own: see `open_own`. Raises the same."""
    path, safely = Path(path), os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a named pipe would have it wait
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | safely, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            _check(path, path.lstat(), False)
        raise
    try:
        found = os.fstat(descriptor)
        _check(path, found, stat.S_ISREG(found.st_mode))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, found: os.stat_result, is_right: bool) -> None:
    if is_right and found.st_uid == os.geteuid():
        return
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "a pipe or a device")
    raise RemoteError(
        f"{path}: {kind} of {_name(found.st_uid)}, where the cache of remote shards has nothing but files and folders "
        f"of {_name(os.geteuid())}: see who put it there and remove it, or give another folder as cache= or "
        "SAVABLE_CACHE"
    )


def _name(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:  # a container under a number that no list has
        return f"the user number {user}"
