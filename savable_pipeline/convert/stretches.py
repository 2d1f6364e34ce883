"""A stretch of a file, or of its decompressed content, read when it is asked for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.convert.compressed import DamagedError, inflated
from savable_pipeline.convert.file_reader import changed


class RecordError(Exception):
    """Why a record cannot be converted: `reason: detail`."""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of records as it was when the conversion was planned; `packed` is its compression: gz, bz2, xz, zst."""

    path: str
    size: int
    modified_ns: int
    packed: str = ""

    @classmethod
    def at(cls, path: Path, packed: str = "") -> RecordFile:
        """The file as it is now. Raises OSError."""
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns, packed)

    def content(self) -> Stretch:
        """All of it. Raises `SavableError` if it is not what it was, ValueError for damaged compression."""
        source = _open(self)
        return Stretch(source, 0, len(source) if isinstance(source, bytes) else self.size, self.path)


class _Descriptor:
    """An open file, closed when nobody uses it any more."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def close_files() -> None:
    """Close the files that this process read last."""
    _open.cache_clear()


@functools.lru_cache(maxsize=2)
def _open(file: RecordFile) -> bytes | _Descriptor:
    opened = _Descriptor(file.path)
    stat = os.fstat(opened.fd)
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.modified_ns):
        raise changed(Path(file.path), f"{file.size} bytes when planned, {stat.st_size} now, written since")
    if not file.packed:
        return opened
    try:
        return inflated(Path(file.path).read_bytes(), file.packed)
    except DamagedError as error:
        raise ValueError(f"{file.path}: damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class Stretch:
    """`size` bytes from `offset` on."""

    source: bytes | _Descriptor
    offset: int
    size: int
    path: str

    def part(self, offset: int, size: int) -> Stretch:
        """A stretch of this one. Raises `RecordError` if it would not lie in it."""
        if min(offset, size) < 0 or offset + size > self.size:
            raise RecordError(f"damaged record: {size} bytes from {offset} on, in {self.size}")
        return Stretch(self.source, self.offset + offset, size, self.path)

    def rest(self, offset: int) -> Stretch:
        """What follows `offset`."""
        return self.part(offset, self.size - offset)

    def read(self) -> bytes:
        """Its bytes. Raises `SavableError` if the file became shorter."""
        if isinstance(self.source, bytes):
            return self.source[self.offset : self.offset + self.size]
        data = os.pread(self.source.fd, self.size, self.offset)
        while 0 < len(data) < self.size and (
            more := os.pread(self.source.fd, self.size - len(data), self.offset + len(data))
        ):
            data += more
        if len(data) != self.size:
            raise changed(Path(self.path), f"expected {self.size} bytes at {self.offset}, found {len(data)}")
        return data

    def head(self, size: int) -> bytes:
        """Its first bytes, at most `size`."""
        return self.part(0, min(size, self.size)).read()

    def uint32s(self, offset: int, count: int) -> list[int]:
        """Little-endian numbers of 32 bits, as the formats of records have them."""
        raw = self.part(offset, 4 * count).read()
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, 4 * count, 4)]
