"""Locks between processes, also on file systems without `flock`, such as Lustre.

Where `flock` fails, a process locks a file by creating an owner file next to it, which only one process at a time can
do:

    savable.index.lock          locked by `flock` where that works
    savable.index.lock.owner    "HOST PID", touched every few seconds until its process removes it

A waiting process removes the owner file if nobody touched it for a minute, because its owner was killed. If two
processes remove it at the same instant, both write the index, and the later one replaces the other's.
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
_TOUCH_S = 5.0  # interval at which a process touches its owner file
_DEAD_S = 60.0  # after this time without a touch, the process counts as killed
_POLL_S = 0.2  # interval at which a waiting process looks again


@contextlib.contextmanager
def requiring_locks(path: object, advice: str, error_type: type[SavableError] = SavableError) -> Iterator[None]:
    """Raise an `error_type` that ends with `advice` if locks are not supported."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise error_type(f"{path}: its file system has no file locks ({error.strerror}). {advice}") from error


@contextlib.contextmanager
def file_lock(path: Path, descriptor: int) -> Iterator[None]:
    """Lock `path` by its open `descriptor`, or by an owner file where `flock` fails.

    The caller closes the descriptor afterwards.
    """
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
    """Lock by creating the owner file `path`, which only one process at a time can do."""
    _create_when_free(path)
    ended = threading.Event()

    def touch() -> None:
        """Update the time of the owner file until the lock is released."""
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


def _create_when_free(path: Path) -> None:
    """Create the owner file, once no other process has one or that process no longer touches it."""
    # another process' owner file as it was last seen, the time since which it is so, and whether there was a warning
    last, unchanged_since, warned = None, time.monotonic(), False
    while True:
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}")
            return
        with contextlib.suppress(FileNotFoundError):  # it may be removed at any time
            found = path.stat()
            if (found.st_ino, found.st_mtime_ns) != last:
                last, unchanged_since = (found.st_ino, found.st_mtime_ns), time.monotonic()
            elif time.monotonic() - unchanged_since > _DEAD_S:
                path.unlink()
                continue
            if not warned:
                log.warning("%s: waiting for the process that created it (%s)", path, path.read_text())
                warned = True
        time.sleep(_POLL_S)
