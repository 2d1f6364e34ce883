"""Locks between processes, also on file systems that have none, such as Lustre mounted without `-o flock`.

There an index is locked by a file, which one process at a time makes beside the one to be locked:

    savable.index.lock          what `flock` locks, where it can
    savable.index.lock.owner    "HOST PID", touched every few seconds until its process removes it

A process that waits takes the file away once nobody has touched it for a minute: its owner was killed. Should two
processes do that in the same instant, both make the index, and the last one's replaces the other's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from savable_pipeline.errors import SavableError

log = logging.getLogger(__name__)

LOCK_ADVICE = "Write to a folder on a local disk, or mount Lustre with -o flock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_TOUCH_S = 5.0
_DEAD_S = 60.0
_LOOK_S = 0.2


@contextlib.contextmanager
def needs_locks(place: object, cure: str, kind: type[SavableError] = SavableError) -> Iterator[None]:
    """Raise an error of this `kind`, with the `cure`, for a lock in the block if the file system has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise kind(f"{place}: its file system has no file locks ({error.strerror}). {cure}") from error


@contextlib.contextmanager
def locked(path: Path, descriptor: int) -> Iterator[None]:
    """Lock `path`, whose open `descriptor` the caller closes afterwards; without file locks by a file beside it."""
    owner: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner = _owned(path.with_name(f"{path.name}.owner"))
    with owner:
        yield


@contextlib.contextmanager
def _owned(path: Path) -> Iterator[None]:
    """Own a file that only one process at a time can make."""
    _make_once_free(path)
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def _make_once_free(path: Path) -> None:
    seen, since, warned = None, time.monotonic(), False
    while True:
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}")
            return
        with contextlib.suppress(FileNotFoundError):  # it may be removed at any time
            found = path.stat()
            if (found.st_ino, found.st_mtime_ns) != seen:
                seen, since = (found.st_ino, found.st_mtime_ns), time.monotonic()
            elif time.monotonic() - since > _DEAD_S:
                path.unlink()
                continue
            if not warned:
                log.warning("%s: waiting for the process that made it (%s)", path, path.read_text())
                warned = True
        time.sleep(_LOOK_S)
