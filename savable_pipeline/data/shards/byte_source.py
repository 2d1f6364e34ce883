"""`ByteSource`: bytes that are read at an offset, from a disk, memory or a URL.

    LocalFile     an open local file, such as one that is being indexed
    StoreFile     a local or remote file of a store (shard_files.py)
    part          a range of a source, such as a record, which is a source itself
    SourceFile    any source as a seekable file, for Pillow, PyAV, pyarrow, csv and others

`FileVersion`: status of a local file, which differs after each change.
`WholeFile`: all bytes of a file, in memory or in a mapped private copy.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from xxhash import xxh3_64_hexdigest

from savable_pipeline.core.files import regular_file, replacing, retry, user_cache, with_handles, with_retries

IN_MEMORY_BYTES = 4 << 20  # larger files are mapped instead of read
_HEAD = 24  # first bytes of a file, which differ between versions: an index starts with its checksum
_COPY_BYTES = 1 << 18  # bytes to copy at a time
_BUFFER = 1 << 16  # bytes that small reads share; longer reads bypass this buffer


class RecordError(ValueError):
    """Error for a part of a source, such as a record, that cannot be read.

    Its text is `reason: detail`.
    """


class FileVersion(NamedTuple):
    """Version of a file, as far as its status shows."""

    inode: int
    size: int
    written_ns: int
    changed_ns: int  # change of the inode, which cannot be reset
    # mode, owner, group, number of links: if these changed, they explain a new `changed_ns`
    rights: tuple[int, int, int, int]

    @classmethod
    def of(cls, stat: os.stat_result) -> FileVersion:
        """Return the version with this status."""
        rights = stat.st_mode, stat.st_uid, stat.st_gid, stat.st_nlink
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, rights)

    @property
    def newest_ns(self) -> int:
        """Return when the file was last written or moved, whichever is later."""
        return max(self.written_ns, self.changed_ns)


class WholeFile:
    """All bytes of a file, as `view`.

    A small file is read. Of a large one, a copy in the user's cache is mapped.

    Processes of a node share the copy, and no other program writes to it, so overwriting or truncating the file changes
    no view. With `mapped`, the file itself is mapped, which is right for a file in our cache. Raises OSError, and
    ValueError for an empty file.
    """

    def __init__(self, path: Path, *, mapped: bool = False) -> None:
        with path.open("rb") as file:
            version = FileVersion.of(os.fstat(file.fileno()))
            copy = _open_copy(path, file, version) if version.size > IN_MEMORY_BYTES and not mapped else None
            self.is_mapped = mapped or copy is not None
            with copy or contextlib.nullcontext(file) as source:
                data = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) if self.is_mapped else file.read()
        self.view = memoryview(data)


def _open_copy(path: Path, file: BinaryIO, version: FileVersion) -> BinaryIO | None:
    """Return an opened copy of this version of a file, or None if the user's cache has no space for it."""
    with contextlib.suppress(OSError):
        folder = Path(user_cache() or os.devnull) / "savable_pipeline" / "indexes"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        prefix = f"{xxh3_64_hexdigest(os.fsencode(os.path.realpath(path)))}-"
        copy = folder / f"{prefix}{xxh3_64_hexdigest(os.pread(file.fileno(), _HEAD, 0) + repr(version).encode())}"
        if not copy.exists():
            with replacing(copy) as new:
                shutil.copyfileobj(file, new, _COPY_BYTES)
                if FileVersion.of(os.fstat(file.fileno())) != version:
                    raise OSError("it was written while it was copied")
            # copies of other versions, but no process's unfinished `.tmp`
            for old in set(folder.glob(f"{prefix}*[!p]")) - {copy}:
                old.unlink(missing_ok=True)
        copied = copy.open("rb")
        if os.fstat(copied.fileno()).st_size == version.size:
            return copied
        copied.close()
    file.seek(0)
    return None


class ByteSource:
    """`size` bytes from `begin` of a source with the function `read(offset, size)`.

    `name` is the last component of a file's path, and "" for other sources.

    >>> from savable_pipeline.data.shards.byte_source import ByteSource
    >>> source = ByteSource.of(b"0123456789").part(2, 5)
    >>> (source.size, source.read_at(1, 2), source.read_at(3, 9), source.open().read())
    (5, b'34', b'56', b'23456')
    """

    __slots__ = ("_begin", "_read", "name", "size")

    def __init__(self, read: Callable[[int, int], bytes], size: int, name: str = "", begin: int = 0) -> None:
        self._read, self.size, self.name, self._begin = read, size, name, begin

    @staticmethod
    def of(data: bytes) -> ByteSource:
        """Wrap bytes in memory."""
        return ByteSource(lambda offset, size: data[offset : offset + size], len(data))

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, or fewer at the end of the source.

        Raises OSError, `ShardError`, `RemoteError`.
        """
        return self._read(self._begin + offset, max(0, min(size, self.size - offset)))

    def read(self) -> bytes:
        """Return all bytes."""
        return self._read(self._begin, self.size)

    def head(self, size: int) -> bytes:
        """Return at most `size` first bytes."""
        return self._read(self._begin, min(size, self.size))

    def part(self, offset: int, size: int) -> ByteSource:
        """Return a range of the source. Raises `RecordError` if it exceeds the source."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise RecordError(f"damaged record: {size} bytes from {offset} on, in {self.size}")
        return ByteSource(self._read, size, begin=self._begin + offset)

    def rest(self, offset: int) -> ByteSource:
        """Return the range from `offset` to the end."""
        return self.part(offset, self.size - offset)

    def uint32s(self, offset: int, count: int) -> tuple[int, ...]:
        """Return `count` little-endian uint32 numbers from `offset` on.

        Raises `RecordError` if they exceed the source.
        """
        return struct.unpack(f"<{count}I", self.part(offset, 4 * count).read())

    def open(self) -> BinaryIO:
        """Return the source as a file.

        It is buffered, because Pillow and others read a few bytes at a time.
        """
        return io.BufferedReader(SourceFile(self), _BUFFER)

    def expect(self, ranges: list[tuple[int, int]]) -> None:
        """Announce reads of these ranges, each an offset and a size in bytes."""

    def sidecar(self, suffix: str, name: str = "") -> Path | None:
        """Return the path of the local sidecar of a file with this suffix, or None.

        With `name`, the path of the file relative to its dataset, `suffix` is the sidecar's path relative to the
        dataset.
        """
        return None

    def fileno(self) -> int:
        """Return the descriptor of a local file. Raises OSError for any other source."""
        raise OSError(f"{self.name}: not a file on a disk")


class LocalFile(ByteSource):
    """Open local file, usable until its descriptor is closed.

    Reads also raise `RemoteError`.
    """

    __slots__ = ("_descriptor", "_path", "_version")

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._version = FileVersion.of(os.fstat(descriptor))
        super().__init__(self._pread, self._version.size, path.name)

    def _pread(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError as error:
            return retry(self._path, error, lambda: self._pread_reopened(offset, size))

    def _pread_reopened(self, offset: int, size: int) -> bytes:
        """Read bytes with a new descriptor. Raises OSError if the file was replaced."""
        with open(self._path, "rb", opener=regular_file) as file:
            # the first three fields are inode, size and time of the last write
            if FileVersion.of(os.fstat(file.fileno()))[:3] != self._version[:3]:
                raise OSError(f"{self._path}: it was replaced while it was read. Start again")
            return os.pread(file.fileno(), size, offset)

    def sidecar(self, suffix: str, name: str = "") -> Path | None:
        """See `ByteSource.sidecar`."""
        path = self._path.parents[name.count("/")] / suffix if name else self._path.with_suffix(suffix)
        return path if path.exists() else None

    def fileno(self) -> int:
        """See `ByteSource.fileno`."""
        return self._descriptor


@contextlib.contextmanager
def opened(path: Path) -> Iterator[LocalFile]:
    """Open a local file during a `with` block. Raises OSError."""
    descriptor = with_handles(lambda: with_retries(path, lambda: regular_file(path, os.O_RDONLY)))
    try:
        yield LocalFile(path, descriptor)
    finally:
        os.close(descriptor)


class SourceFile(io.RawIOBase):
    """Seekable, read-only file over a source, without a descriptor or a copy.

    For sequential reads, the next `ahead` bytes are announced to the source (0: none).
    """

    def __init__(self, source: ByteSource, ahead: int = 0) -> None:
        super().__init__()
        self._source, self._ahead = source, ahead
        self._position = self._announced = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self._position, self._source.size)[whence]
        if position < 0:
            raise ValueError(f"byte {position} of a part: a file begins at byte 0")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Return at most `size` bytes from the current position.

        Raises `ShardError`, also if the shard is truncated.
        """
        remaining = max(0, self._source.size - self._position)
        wanted = remaining if size is None or size < 0 else min(size, remaining)
        if self._ahead:
            self._announce(min(self._position + self._ahead, self._source.size))
        data = self._source.read_at(self._position, wanted) if wanted else b""
        self._position += len(data)
        return data

    def _announce(self, end: int) -> None:
        """Announce reads up to `end`, unless most of them are announced already."""
        if end - self._announced > self._ahead // 2 or end == self._source.size > self._announced:
            self._source.expect([(self._announced, end - self._announced)])
            self._announced = end

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, uint8 (bytes,), and return the number of bytes read."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class RangeFile(io.BufferedReader):
    """Media file, of which a sample is the range from `begin_s` to `end_s` in seconds.

    `end_s` is None at the end of the file, and `fps` is the frame rate or None.
    """

    def __init__(self, source: ByteSource, begin_s: float, end_s: float | None, fps: float | None = None) -> None:
        super().__init__(SourceFile(source), _BUFFER)
        self.begin_s, self.end_s, self.fps = begin_s, end_s, fps


def seconds_of(file: BinaryIO) -> tuple[float, float | None]:
    """Return the start and end of an opened part in its file, in seconds.

    An end of None is the end of the file.
    """
    return (file.begin_s, file.end_s) if isinstance(file, RangeFile) else (0.0, None)
