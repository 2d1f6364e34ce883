"""Files with holes, written by several processes at once: locks on ranges of bytes; making holes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator

_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


@contextlib.contextmanager
def locked(fd: int, start: int, stop: int, *, wait: bool = True) -> Iterator[None]:
    """Locks the bytes `start` to `stop - 1` of an open file. If they are locked: waits, or raises BlockingIOError.

    The lock belongs to the descriptor, and ends when the process dies. Each thread needs a descriptor of its own.
    """
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0))
    try:
        yield
    finally:
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, start, stop - start, 0))


def punch_hole(fd: int, start: int, stop: int) -> None:
    """Makes a hole: returns these bytes of a file to the disk. Raises OSError if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _PUNCH, ctypes.c_long(start), ctypes.c_long(stop - start)):
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: the cache needs a file system that can punch holes, such as ext4")
