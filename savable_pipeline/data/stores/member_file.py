"""`SpanFile`: a part of a sample as a seekable, read-only file, without a descriptor or a copy of its bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import BinaryIO

_BUFFER = 1 << 16  # bytes that small reads share; longer ones pass it by


class SpanFile(io.RawIOBase):
    """`size` bytes of a shard from `begin` on, which `read(offset, size)` reads whole or raises, at any time."""

    def __init__(self, read: Callable[[int, int], bytes], begin: int, size: int) -> None:
        super().__init__()
        self._read, self._begin, self._size = read, begin, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self._position, self._size)[whence]
        if position < 0:
            raise ValueError(f"byte {position} of a part: a file begins at byte 0")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes from here on. Raises `ShardError`, also where the shard ends before the part does."""
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        data = self._read(self._begin + self._position, wanted) if wanted else b""
        self._position += wanted
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, uint8 (bytes,); gives how many bytes came."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def opened_member(read: Callable[[int, int], bytes], begin: int, size: int) -> BinaryIO:
    """The file of a part. (Buffered: Pillow and others read a few bytes at a time.)"""
    return io.BufferedReader(SpanFile(read, begin, size), _BUFFER)


class RangeFile(io.BufferedReader):
    """A whole file, of which `begin_s` to `end_s` belong to a sample."""

    def __init__(self, file: SpanFile, begin_s: float, end_s: float | None) -> None:
        super().__init__(file, _BUFFER)
        self.begin_s, self.end_s = begin_s, end_s


def seconds_of(file: BinaryIO) -> tuple[float, float | None]:
    """From where to where an opened part belongs to its sample, in seconds; None: to its end."""
    return (file.begin_s, file.end_s) if isinstance(file, RangeFile) else (0.0, None)
