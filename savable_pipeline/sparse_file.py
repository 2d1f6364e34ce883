"""Files with holes that several processes write at once: locks on some of their bytes, and finding and making holes."""

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
    """Hold the bytes `start` to `stop - 1` of an open file; other descriptors wait, or get BlockingIOError.

    The lock is the descriptor's: it goes when the process dies. Each thread needs a descriptor of its own.
    """
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0))
    try:
        yield
    finally:
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, start, stop - start, 0))


def holes(fd: int) -> Iterator[tuple[int, int]]:
    """The holes of a file, first byte and the one after the last; that at its end is none."""
    size = os.fstat(fd).st_size
    begin = os.lseek(fd, 0, os.SEEK_HOLE) if size else 0
    while begin < size:
        try:
            past = os.lseek(fd, begin, os.SEEK_DATA)
        except OSError:  # there is no more
            past = size
        yield begin, past
        begin = os.lseek(fd, past, os.SEEK_HOLE) if past < size else size


def punch_hole(fd: int, start: int, stop: int) -> None:
    """Give the bytes of a file back to the disk. Raises OSError where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _PUNCH, ctypes.c_long(start), ctypes.c_long(stop - start)):
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: the cache needs a file system that can punch holes, such as ext4")
