"""A stretch of a file, or of its decompressed content, read when it is asked for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.compressed import DamagedError, inflated
from savable_pipeline.tools.convert.remote_folder import RemoteFolder

_ARROW_CODECS = {"br": "brotli", "snappy": "snappy"}  # kinds of compression that pyarrow reads, by its names


class RecordError(Exception):
    """Why a record cannot be converted: `reason: detail`."""


def changed(path: Path | str, found: str) -> SavableError:
    """The error for a file that is not what the plan was made from."""
    return SavableError(
        f"{path}: {found}: it changed while it was converted; leave the input as it is while converting, and convert "
        "into another folder"
    )


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of records as it was when the conversion was planned.

    `packed` is its compression, gz, bz2, xz, zst, br or snappy, and `content_size` the bytes that it holds then. One
    `behind` a URL has its whole URL as path, and no date: its folder has its stamp.
    """

    path: str
    size: int
    modified_ns: int
    packed: str = ""
    content_size: int | None = None  # None: not known; br and snappy need it
    behind: RemoteFolder | None = None

    @classmethod
    def at(cls, path: Path, packed: str = "", content_size: int | None = None) -> RecordFile:
        """The file as it is now. Raises OSError."""
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns, packed, content_size)

    def expect(self) -> None:
        """Announces that all of it is read soon; a disk needs no word of it."""
        if self.behind is not None:
            self.behind.expect(self.path)

    def content(self) -> Stretch:
        """All of it. Raises `SavableError` if it is not what it was, ValueError for damaged compression."""
        source = _open(self)
        if isinstance(source, bytes):
            return Stretch(source, 0, len(source), self.path)
        if isinstance(source, _Descriptor):
            self.check(os.fstat(source.fd))  # each time: it may be overwritten while it is open
        return Stretch(source, 0, self.size, self.path)

    def check(self, stat: os.stat_result) -> None:
        """Raises `SavableError` unless this is the file as it was."""
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.modified_ns):
            raise changed(Path(self.path), f"{self.size} bytes when planned, {stat.st_size} now, written since")


class _Opened(Protocol):
    """An open file."""

    def read(self, offset: int, size: int, /) -> bytes:
        """`size` bytes from `offset` on; fewer where the file ends."""


class _Descriptor:
    """An open file on a disk, closed when nobody uses it any more."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        """See `_Opened.read`."""
        data = os.pread(self.fd, size, offset)
        while 0 < len(data) < size and (more := os.pread(self.fd, size - len(data), offset + len(data))):
            data += more
        return data

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def close_files() -> None:
    """Close the files that this process read last."""
    _open.cache_clear()


@functools.lru_cache(maxsize=2)
def _open(file: RecordFile) -> bytes | _Opened:
    opened: _Opened
    if file.behind is not None:
        opened = file.behind.open(file.path)
    else:
        opened = disk = _Descriptor(file.path)
        file.check(os.fstat(disk.fd))
    if not file.packed:
        return opened
    try:
        return _unpacked(opened.read(0, file.size), file.packed, file.content_size)
    except DamagedError as error:
        raise ValueError(f"{file.path}: damaged: {error}") from error


def _unpacked(data: bytes, kind: str, size: int | None) -> bytes:
    """Decompressed data, of this size if it is known. Raises `DamagedError`, and ValueError without the library."""
    if kind in _ARROW_CODECS and size is not None:
        content = _by_arrow(data, _ARROW_CODECS[kind], size)
    else:
        content = inflated(data, kind)
    if size is not None and len(content) != size:
        raise DamagedError(f"{len(content)} bytes when decompressed, expected {size}")
    return content


def _by_arrow(data: bytes, codec: str, size: int) -> bytes:
    try:
        import pyarrow as pa  # imported here: it is needed for these compressions alone
    except ImportError:
        raise ValueError(
            f'reading {codec} needs the package pyarrow: pip install "savable_pipeline[parquet]"'
        ) from None
    try:
        content: bytes = pa.decompress(data, size, codec, asbytes=True)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise DamagedError(f"no {codec} of {size} bytes: {error}") from error
    return content


@dataclass(frozen=True, slots=True)
class Stretch:
    """`size` bytes from `offset` on."""

    source: bytes | _Opened
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
        data = self.source.read(self.offset, self.size)
        if len(data) != self.size:
            raise changed(self.path, f"expected {self.size} bytes at {self.offset}, found {len(data)}")
        return data

    def inflated(self, kind: str, size: int | None = None) -> Stretch:
        """Its content decompressed, of `size` bytes if that is known. Raises `RecordError` for damage."""
        try:
            return stretch_of(_unpacked(self.read(), kind, size), self.path)
        except DamagedError as error:
            raise RecordError(f"damaged record: {error}") from error

    def head(self, size: int) -> bytes:
        """Its first bytes, at most `size`."""
        return self.part(0, min(size, self.size)).read()

    def tail(self, size: int) -> bytes:
        """Its last bytes, at most `size`."""
        return self.rest(max(0, self.size - size)).read()

    def uint32s(self, offset: int, count: int) -> list[int]:
        """Little-endian numbers of 32 bits, as the formats of records have them."""
        raw = self.part(offset, 4 * count).read()
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, 4 * count, 4)]


def stretch_of(data: bytes, path: str) -> Stretch:
    """Bytes that were made of what is in the file at `path`."""
    return Stretch(data, 0, len(data), path)
