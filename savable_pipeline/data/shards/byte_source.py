"""`ByteSource`: bytes that are read at an offset, from a disk, memory or a URL.

    LocalFile     a file on a disk that is open, such as one that is indexed
    StoreFile     a file of a store, on a disk or behind a URL (shard_files.py)
    part          some bytes of a source, such as a record, are a source again; so are bytes in memory
    SourceFile    any of them as a seekable file, for Pillow, PyAV, pyarrow, csv and others

`FileVersion`: what the system says of a file on a disk, which is another after each change.
`WholeFile`: all bytes of a file, in memory or a private copy that is mapped.
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

from savable_pipeline.core.files import regular_file, replacing, user_cache, with_handles
from savable_pipeline.core.patience import retry, with_retries

IN_MEMORY_BYTES = 4 << 20  # of a file, up to which it is read and not mapped
_HEAD = 24  # bytes of a file that tell its versions apart: those of an index have its checksum
_COPIED = 1 << 22  # bytes at a time
_BUFFER = 1 << 16  # bytes that small reads share; longer ones pass it by


class RecordError(ValueError):
    """Why a part of a source, such as a record, cannot be read: `reason: detail`."""


class FileVersion(NamedTuple):
    """What tells a file from what it was before, without reading it."""

    inode: int
    size: int
    written_ns: int
    changed_ns: int  # of the inode; it cannot be put back
    rights: tuple[int, int, int, int]  # mode, owner, group, number of links: they explain another `changed_ns`

    @classmethod
    def of(cls, stat: os.stat_result) -> FileVersion:
        """The version that has this status."""
        rights = stat.st_mode, stat.st_uid, stat.st_gid, stat.st_nlink
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, rights)

    @property
    def newest_ns(self) -> int:
        """When the file was written or put there, whichever came last."""
        return max(self.written_ns, self.changed_ns)


class WholeFile:
    """All bytes of a file, as `view`.

    A small file is read. Of a large one, a copy in the user's cache is mapped.

    Processes of a node share the copy, and nobody else writes there: overwriting or cutting the file changes no view. A
    file that is `mapped` by itself is in the cache already, and still written. Raises OSError, ValueError for an empty
    file.
    """

    def __init__(self, path: Path, *, mapped: bool = False) -> None:
        with path.open("rb") as file:
            version = FileVersion.of(os.fstat(file.fileno()))
            copy = _copy_of(path, file, version) if version.size > IN_MEMORY_BYTES and not mapped else None
            self.is_mapped = mapped or copy is not None
            with copy or contextlib.nullcontext(file) as used:
                data = mmap.mmap(used.fileno(), 0, access=mmap.ACCESS_READ) if self.is_mapped else file.read()
        self.view = memoryview(data)


def _copy_of(path: Path, file: BinaryIO, version: FileVersion) -> BinaryIO | None:
    """Return a copy of this version of a file, made if there is none; None without room in the user's cache."""
    with contextlib.suppress(OSError):
        folder = Path(user_cache() or os.devnull) / "savable_pipeline" / "indexes"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        prefix = f"{xxh3_64_hexdigest(os.fsencode(os.path.realpath(path)))}-"
        copy = folder / f"{prefix}{xxh3_64_hexdigest(os.pread(file.fileno(), _HEAD, 0) + repr(version).encode())}"
        if not copy.exists():
            with replacing(copy) as new:
                shutil.copyfileobj(file, new, _COPIED)
                if FileVersion.of(os.fstat(file.fileno())) != version:
                    raise OSError("it was written while it was copied")
            for old in set(folder.glob(f"{prefix}*[!p]")) - {copy}:  # of other versions, but no `.tmp` of a process
                old.unlink(missing_ok=True)
        found = copy.open("rb")
        if os.fstat(found.fileno()).st_size == version.size:
            return found
        found.close()
    file.seek(0)
    return None


class ByteSource:
    """`size` bytes from `begin` on of what `read(offset, size)` reads.

    Of a file, `name` is the last part of its name.

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
        """Bytes in memory."""
        return ByteSource(lambda offset, size: data[offset : offset + size], len(data))

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer where the source ends.

        Raises OSError, `ShardError`, `RemoteError`.
        """
        return self._read(self._begin + offset, max(0, min(size, self.size - offset)))

    def read(self) -> bytes:
        """All of its bytes."""
        return self._read(self._begin, self.size)

    def head(self, size: int) -> bytes:
        """Its first bytes, at most `size`."""
        return self._read(self._begin, min(size, self.size))

    def part(self, offset: int, size: int) -> ByteSource:
        """Some of its bytes. Raises `RecordError` if they would not lie in it."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise RecordError(f"damaged record: {size} bytes from {offset} on, in {self.size}")
        return ByteSource(self._read, size, begin=self._begin + offset)

    def rest(self, offset: int) -> ByteSource:
        """What follows `offset`."""
        return self.part(offset, self.size - offset)

    def uint32s(self, offset: int, count: int) -> tuple[int, ...]:
        """Little-endian numbers of 32 bits, as formats of records have them.

        Raises `RecordError`.
        """
        return struct.unpack(f"<{count}I", self.part(offset, 4 * count).read())

    def open(self) -> BinaryIO:
        """The source as a file. (Buffered: Pillow and others read a few bytes at a time.)"""
        return io.BufferedReader(SourceFile(self), _BUFFER)

    def expect(self, places: list[tuple[int, int]]) -> None:
        """Announces reads of these offsets and sizes."""

    def sidecar(self, suffix: str, name: str = "") -> Path | None:
        """Return a local sidecar of a file, with this suffix, or None without one.

        Given the file's `name` below its folder: what is called `suffix` in that folder.
        """
        return None

    def fileno(self) -> int:
        """The descriptor of a file on a disk. Raises OSError for any other source."""
        raise OSError(f"{self.name}: not a file on a disk")


class LocalFile(ByteSource):
    """A file on a disk that is open: to be used as long as its descriptor is.

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
            return retry(self._path, error, lambda: self._pread_anew(offset, size))

    def _pread_anew(self, offset: int, size: int) -> bytes:
        """The bytes by a descriptor of its own. Raises OSError where another file has taken its place."""
        with open(self._path, "rb", opener=regular_file) as file:
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
    """A file on a disk, open meanwhile. Raises OSError."""
    descriptor = with_handles(lambda: with_retries(path, lambda: regular_file(path, os.O_RDONLY)))
    try:
        yield LocalFile(path, descriptor)
    finally:
        os.close(descriptor)


class SourceFile(io.RawIOBase):
    """Seekable, read-only file over a source, without a descriptor or a copy.

    What comes next of it is announced, `ahead` bytes: for those who read it from its begin to its end.
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
        """At most `size` bytes from here on.

        Raises `ShardError`, also where the shard ends before the part does.
        """
        remaining = max(0, self._source.size - self._position)
        wanted = remaining if size is None or size < 0 else min(size, remaining)
        if self._ahead:
            self._announce(min(self._position + self._ahead, self._source.size))
        data = self._source.read_at(self._position, wanted) if wanted else b""
        self._position += len(data)
        return data

    def _announce(self, end: int) -> None:
        if end - self._announced > self._ahead // 2 or end == self._source.size > self._announced:
            self._source.expect([(self._announced, end - self._announced)])
            self._announced = end

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, uint8 (bytes,); gives how many bytes came."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class RangeFile(io.BufferedReader):
    """Whole file, of which `begin_s` to `end_s` belong to a sample.

    `fps` is the number of frames a second, None if unknown.
    """

    def __init__(self, source: ByteSource, begin_s: float, end_s: float | None, fps: float | None = None) -> None:
        super().__init__(SourceFile(source), _BUFFER)
        self.begin_s, self.end_s, self.fps = begin_s, end_s, fps


def seconds_of(file: BinaryIO) -> tuple[float, float | None]:
    """Return from where to where an opened part belongs to its sample, in seconds.

    None stands for its end.
    """
    return (file.begin_s, file.end_s) if isinstance(file, RangeFile) else (0.0, None)
